"""Every field of every structure of a card that was lived on is damaged: refused or survived as FORMAT.md says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.crash.damage import (
    Place,
    batches_of,
    changed,
    flipped,
    forged,
    forged_body,
    layout_of,
    lived_base,
    older_base,
    opens,
    places_of,
)
from tests.sim.medium import read_image
from xkv_gateway.card.journal_format import BATCH
from xkv_gateway.card.layout import HEARTBEAT_OFFSET
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_gateway.card.table_file import CHUNK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.sim.medium import Image

KINDS: Final = ("superblock", "heartbeat", "batch", "checkpoint_a", "checkpoint_b", "ledger_a", "ledger_b")
BODIES: Final = ("batch", "checkpoint_a", "checkpoint_b", "ledger_a", "ledger_b")
HARMLESS: Final = ("superblock", "heartbeat", "ledger", "checkpoint")
"""There are two of each, or it costs nothing."""
TWICE: Final = 4
"""One in so many is opened a second time, and used."""
PART: Final = 11
"""One in so many of the values of a faulty program, in the quick suite; another one for each kind of structure."""
KEY: Final = "('ns'"


def places(kind: str) -> list[Place]:
    return [place for place in places_of(lived_base().image) if kind in place.name]


def try_all(images: Sequence[tuple[str, Image]], *, strict: bool) -> list[tuple[str, ...]]:
    seen = []
    for number, (name, image) in enumerate(images):
        try:
            seen.append(opens(lived_base(), image, strict=strict, twice=number % TWICE == 0))
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return seen


def forgeries(kind: str) -> list[tuple[str, Image]]:
    base = lived_base()
    return [
        (f"{place.name}.{field.name} {fill:#x}", forged(base.image, place, field, fill))
        for place in places(kind)
        for field in place.structure.fields
        if field.name and field.name != "crc"
        for fill in (0x01, 0xFF)
    ]


def bodies(kind: str) -> list[tuple[str, Image]]:
    base, images = lived_base(), []
    for place in places(kind):
        step = 4 if place.structure is not CHUNK else 37
        begin = place.structure.size_bytes
        for at in range(begin, min(place.length_bytes, begin + 60 * step), step):
            images += [
                (f"{place.name} at {at} {fill:#x}", forged_body(base.image, place, at, step, fill))
                for fill in (0x01, 0xFF)
            ]
    return images


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_in_any_field_costs_no_more_than_it_covers(kind: str) -> None:
    base = lived_base()
    images = [
        (f"{place.name}.{field.name or 'reserved'}", flipped(base.image, place, field.offset, 3))
        for place in places(kind)
        for field in place.structure.fields
    ]
    images += [
        (f"{place.name} body", flipped(base.image, place, at))
        for place in places(kind)
        for at in range(place.structure.size_bytes, place.length_bytes, 2039)
    ]
    try_all(images, strict=any(name in kind for name in HARMLESS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_value_under_a_right_checksum_is_refused_or_survived(kind: str) -> None:
    try_all(forgeries(kind)[len(kind) % PART :: PART], strict=False)


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_of_a_faulty_program_is_refused_or_survived(kind: str) -> None:
    try_all(bodies(kind)[len(kind) % PART :: PART], strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_wrong_values_under_right_checksums_are_refused_or_survived(kind: str) -> None:
    try_all(forgeries(kind), strict=False)
    if kind in BODIES:
        try_all(bodies(kind), strict=False)


@pytest.mark.parametrize("field", range(0, 40, 3))
def test_both_superblocks_damaged_are_refused_and_nothing_is_written(field: int) -> None:
    image = lived_base().image
    for place in places("superblock"):
        image = flipped(image, place, place.structure.fields[field].offset, 1)
    (refusal,) = opens(lived_base(), image)
    assert "the card cannot be used" in refusal or "somebody else's data" in refusal


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("checkpoint_a chunk 0", "checkpoint A"),
        ("checkpoint_b closing", "checkpoint B"),
        ("ledger_a closing", "ledger A"),
        ("ledger_b header", "ledger B"),
    ],
)
def test_damage_is_told_by_the_name_of_what_is_damaged(name: str, told: str) -> None:
    (place,) = (place for place in places_of(lived_base().image) if place.name == name)
    seen = opens(lived_base(), flipped(lived_base().image, place, place.structure.size_bytes - 20))
    assert any(told in line for line in seen if not line.startswith(KEY)), seen


def test_a_batch_that_is_damaged_before_others_is_a_gap_and_told_with_its_records() -> None:
    image = lived_base().image
    gaps = 0
    for at, length_bytes in batches_of(image, layout_of(image).journal):
        place = Place("batch", BATCH, at, length_bytes)
        seen = opens(lived_base(), flipped(image, place, 200), twice=False)
        gaps += any(line.startswith("journal: records") for line in seen)
    assert gaps > 2


# --- other parts, other sizes -----------------------------------------------------------------------------------


def parts() -> dict[str, tuple[int, int]]:
    layout = layout_of(lived_base().image)
    named = {name: (each.offset_bytes, each.length_bytes) for name, each in layout.regions.items()}
    first, second = layout.superblock_offsets
    return named | {
        "superblock 0": (first, BLOCK_BYTES),
        "superblock 1": (second, BLOCK_BYTES),
        "heartbeat": (HEARTBEAT_OFFSET, BLOCK_BYTES),
    }


@pytest.mark.parametrize("part", sorted(parts()))
def test_an_older_copy_of_any_part_never_gives_wrong_bytes_nor_what_was_wiped(part: str) -> None:
    offset_bytes, length_bytes = parts()[part]
    now, then = older_base().image, lived_base().image
    image = changed(now, offset_bytes, read_image(then, offset_bytes, length_bytes))
    opens(older_base(), image, strict=part in {"superblock 0", "superblock 1", "heartbeat"})


@pytest.mark.parametrize("part", sorted(set(parts()) - {"superblock 0", "superblock 1"}))
def test_a_part_that_is_zeroed_never_gives_wrong_bytes_nor_what_was_wiped(part: str) -> None:
    offset_bytes, length_bytes = parts()[part]
    image = changed(older_base().image, offset_bytes, bytes(length_bytes))
    opens(older_base(), image, strict=part in {"heartbeat", "ledger_a", "ledger_b"})


def test_a_card_that_has_grown_is_served_and_one_that_has_shrunk_is_refused() -> None:
    base = lived_base()
    grown = opens(base, base.image, strict=True, size_change=1 << 20)
    assert all(line.startswith(KEY) for line in grown)
    (refusal,) = opens(base, base.image, size_change=-(1 << 20))
    assert "size_bytes" in refusal


def test_a_card_cut_off_in_the_middle_loses_only_payloads_that_lay_behind() -> None:
    base = lived_base()
    data = layout_of(base.image).data
    middle = data.offset_bytes + 12 * BLOCK_BYTES
    image = changed(base.image, middle, bytes(data.offset_bytes + data.length_bytes - middle))
    seen = opens(base, image)
    assert any(line.endswith("corrupt") for line in seen)
    assert any(line.endswith("ok") for line in seen)
