"""`python -m cohort` is the `cohort` command."""

import sys

from cohort.cli.main import main

# A spawned worker imports this module and must not start the command again.
if __name__ == "__main__":
    sys.exit(main())
