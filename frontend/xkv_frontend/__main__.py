"""`python -m xkv_frontend`."""

from __future__ import annotations

import sys

from xkv_frontend.cli import main

if __name__ == "__main__":
    sys.exit(main())
