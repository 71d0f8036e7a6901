"""The bytes of every structure are those of its version. If one changes: a new FORMAT_VERSION, and new files."""

from __future__ import annotations

import pytest

from tests.card.golden import FOLDER, dump, path_of, structures
from xkv_gateway.card.structure import FORMAT_VERSION

STRUCTURES = structures()


@pytest.mark.parametrize("name", sorted(STRUCTURES))
def test_the_bytes_are_those_of_the_version(name: str) -> None:
    assert dump(STRUCTURES[name]) == path_of(name).read_text(), (
        "the bytes of the card changed: give FORMAT_VERSION a new number, and say in FORMAT.md what is new"
    )


def test_no_golden_file_is_left_over() -> None:
    kept = set(FOLDER.glob(f"card-v{FORMAT_VERSION}-*.hex"))
    assert kept == {path_of(name) for name in STRUCTURES}
