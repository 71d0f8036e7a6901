"""The card gateway: engine, card, service, command line."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

__version__: Final = version("xkv-gateway")
