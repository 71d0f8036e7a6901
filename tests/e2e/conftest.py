from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: Unix sockets below it must fit into 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="xkv-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
