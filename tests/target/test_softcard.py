from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, NamedTuple

import pytest

from xkv_gateway.errors import CardUnavailableError
from xkv_gateway.target.softcard import DEFAULT_BYTES, SIZE_STEP_BYTES, default_size

if TYPE_CHECKING:
    from pathlib import Path


class Disk(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("free_bytes", "size_bytes"),
    [(1 << 40, DEFAULT_BYTES), (10 << 30, (9 << 30)), (100 << 20, SIZE_STEP_BYTES)],
)
def test_the_default_card_is_as_large_as_the_disk_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, size_bytes: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(0, 0, free_bytes))
    assert default_size(tmp_path) == size_bytes


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(0, 0, 10 << 20))
    with pytest.raises(CardUnavailableError, match="no room for a soft card"):
        default_size(tmp_path)
