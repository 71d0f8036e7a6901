"""`python -m xkv_gateway` is `xkv-gateway`."""

from __future__ import annotations

import sys

from xkv_gateway.cli import main

sys.exit(main())
