from __future__ import annotations

from tests.e2e.conftest import home

__all__ = ["home"]
