"""`python -m app`: see `app.train`."""

import sys

from app.train import main

if __name__ == "__main__":
    sys.exit(main())
