"""The command line: ``python -m funshard plan --help``."""

from ._plan.plan import main

if __name__ == "__main__":
    main()
