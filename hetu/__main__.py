"""`python -m hetu` is the `hetu` command. Ignored on purpose: everything else, see `cli.py`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
