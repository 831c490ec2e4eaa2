"""The program of an engine process with `mapped_memory` in place of a GPU's memory."""

from __future__ import annotations

import sys

from tests.helpers import mapped_memory

if __name__ == "__main__":
    sys.modules["cohort.engines.fleet.gpu_memory"] = mapped_memory
    from cohort.engines.fleet.worker import main

    main(sys.argv[1:])
