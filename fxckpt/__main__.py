"""``python -m fxckpt``: see :mod:`fxckpt.cli`."""

import sys

from fxckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
