"""The devices of these tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .devices import SIZE, FileWay, loop_device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def way(tmp_path: Path) -> FileWay:
    return FileWay(tmp_path)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "disk"
    file.write_bytes(bytes(SIZE))
    with loop_device(file) as path:
        yield path
