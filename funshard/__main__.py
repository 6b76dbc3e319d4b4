"""The command line: ``python -m funshard plan --help``."""

import sys

from ._plan.command import main

if __name__ == "__main__":
    sys.exit(main())
