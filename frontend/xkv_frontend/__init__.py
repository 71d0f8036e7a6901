"""The API front end: salts every request from the identity of its sender, so that tenants never share a cache."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
