"""`python -m cohort` is the `cohort` command."""

import sys

from cohort.cli.main import main

if __name__ == "__main__":  # a spawned worker imports this module and must not start the command again
    sys.exit(main())
