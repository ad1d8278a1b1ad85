"""`python -m twinpool` is `twinpool`."""

import sys

from twinpool.cli import main

if __name__ == "__main__":
    sys.exit(main())
