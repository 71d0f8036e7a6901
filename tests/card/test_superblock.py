"""Superblocks: round trip, choice between two copies, and whose card it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.card.samples import FACTS, OTHER_CARD, RUN, SUPERBLOCK
from xkv_gateway.card.format_errors import (
    BadChecksum,
    BadField,
    BadMagic,
    CopiesDisagree,
    GeometryChanged,
    NoSuperblock,
    UnknownFeature,
    UnknownVersion,
    WrongNamespace,
)
from xkv_gateway.card.structure import Stamp, crc_of
from xkv_gateway.card.superblock import Blank, Chosen, Stranger, Superblock, choose, decode, encode, match

EMPTY = bytes(4096)
DATA = b"\x55\xaa" * 2048


def reseal(block: bytes) -> bytes:
    """Give an altered structure a right checksum: what a faulty program would write."""
    return block[:12] + crc_of(block).to_bytes(4, "little") + block[16:]


def with_bytes(block: bytes, offset: int, data: bytes) -> bytes:
    return reseal(block[:offset] + data + block[offset + len(data) :])


def pair(first: Superblock, second: Superblock) -> tuple[bytes, bytes]:
    return encode(first, 0), encode(second, 1)


def chosen(copies: tuple[bytes, bytes]) -> Chosen:
    result = choose(copies)
    assert isinstance(result, Chosen)
    return result


def test_a_superblock_comes_back_as_it_was() -> None:
    for copy in (0, 1):
        block = encode(SUPERBLOCK, copy)
        assert len(block) == 4096
        assert decode(block, copy) == SUPERBLOCK


def test_the_secret_is_not_shown() -> None:
    assert "secret-secret" not in repr(SUPERBLOCK)


def test_a_label_that_does_not_fit_is_the_callers_error() -> None:
    for label in ("x" * 65, "ä" * 33, "a\0b"):
        with pytest.raises(ValueError, match="label"):
            encode(replace(SUPERBLOCK, label=label), 0)


def test_a_copy_read_at_the_place_of_the_other_is_refused() -> None:
    with pytest.raises(BadField, match="copy"):
        decode(encode(SUPERBLOCK, 1), 0)


def test_equal_copies_need_no_repair() -> None:
    assert chosen(pair(SUPERBLOCK, SUPERBLOCK)) == Chosen(SUPERBLOCK, 0, {}, contested=False)


@pytest.mark.parametrize("newer", [0, 1])
def test_the_newest_whole_copy_wins_and_the_other_is_to_be_repaired(newer: int) -> None:
    new = replace(SUPERBLOCK, sequence=6, clean=False)
    copies = pair(new, SUPERBLOCK) if newer == 0 else pair(SUPERBLOCK, new)
    assert chosen(copies) == Chosen(new, newer, {1 - newer: None}, contested=False)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("damage", ["flip", "zero", "data"])
def test_one_copy_is_enough(bad: int, damage: str) -> None:
    copies = list(pair(SUPERBLOCK, SUPERBLOCK))
    copies[bad] = {"flip": copies[bad][:700] + b"\xff" + copies[bad][701:], "zero": EMPTY, "data": DATA}[
        damage
    ]
    result = chosen((copies[0], copies[1]))
    assert result.superblock == SUPERBLOCK
    assert result.copy == 1 - bad
    assert isinstance(result.faults[bad], BadChecksum if damage == "flip" else BadMagic)


def test_a_torn_write_of_the_first_copy_leaves_the_second() -> None:
    old, new = pair(SUPERBLOCK, SUPERBLOCK), encode(replace(SUPERBLOCK, sequence=6, open_time_ns=1), 0)
    for sectors in range(1, 8):
        torn = new[: sectors * 512] + old[0][sectors * 512 :]
        result = chosen((torn, old[1]))
        assert result.superblock.sequence in {5, 6}
        assert result.superblock in {SUPERBLOCK, decode(new, 0)}


def test_nothing_anywhere_is_a_blank_card_and_data_without_our_stamp_a_strangers() -> None:
    assert choose((EMPTY, EMPTY)) == Blank()
    assert choose((DATA, EMPTY)) == Stranger()
    assert choose((EMPTY, DATA)) == Stranger()
    assert choose((DATA, DATA)) == Stranger()


def test_our_stamp_without_a_whole_copy_is_neither_blank_nor_a_strangers() -> None:
    broken = bytearray(encode(SUPERBLOCK, 0))
    broken[100] ^= 1
    for other in (EMPTY, DATA):
        with pytest.raises(NoSuperblock) as caught:
            choose((bytes(broken), other))
        assert [type(fault) for fault in caught.value.faults] == [BadChecksum, BadMagic]


@pytest.mark.parametrize("copy", [0, 1])
def test_an_unknown_version_refuses_the_card_whatever_the_other_copy_says(copy: int) -> None:
    copies = list(pair(SUPERBLOCK, SUPERBLOCK))
    copies[copy] = with_bytes(copies[copy], 8, (2).to_bytes(4, "little"))
    with pytest.raises(UnknownVersion) as caught:
        choose((copies[0], copies[1]))
    assert caught.value.version == 2


@pytest.mark.parametrize("copy", [0, 1])
def test_an_unknown_incompatible_feature_refuses_the_card_and_names_the_bit(copy: int) -> None:
    copies = [encode(SUPERBLOCK, 0), encode(SUPERBLOCK, 1)]
    copies[copy] = encode(replace(SUPERBLOCK, incompatible_features=1 << 63), copy)
    with pytest.raises(UnknownFeature, match="bit 63"):
        choose((copies[0], copies[1]))


def test_an_unknown_compatible_feature_is_kept() -> None:
    featured = replace(SUPERBLOCK, compatible_features=1 << 40)
    assert chosen(pair(featured, featured)).superblock == featured


def test_two_runs_with_one_sequence_are_contested_and_the_greater_epoch_is_taken() -> None:
    rival = replace(SUPERBLOCK, stamp=replace(RUN, epoch=3, run_id=b"rival-run-id-000"))
    for copies in (pair(SUPERBLOCK, rival), pair(rival, SUPERBLOCK)):
        result = chosen(copies)
        assert result.contested
        assert result.superblock == rival


def test_two_cards_with_one_sequence_are_refused_and_otherwise_the_newer_wins() -> None:
    other = replace(SUPERBLOCK, stamp=Stamp(OTHER_CARD, 2, RUN.run_id))
    with pytest.raises(CopiesDisagree):
        choose(pair(SUPERBLOCK, other))
    assert chosen(pair(SUPERBLOCK, replace(other, sequence=6))).superblock.stamp.card_uuid == OTHER_CARD


def test_the_card_is_where_it_was_formatted() -> None:
    found = match(SUPERBLOCK, FACTS)
    assert found.identified
    assert found.grown_bytes == 0


def test_a_grown_namespace_is_used_as_it_was_and_says_so() -> None:
    assert match(SUPERBLOCK, replace(FACTS, size_bytes=FACTS.size_bytes + 4096)).grown_bytes == 4096


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        (replace(FACTS, nguid=b"X" * 16), WrongNamespace),
        (replace(FACTS, nguid=bytes(16)), WrongNamespace),
        (replace(FACTS, uuid=b"X" * 16), WrongNamespace),
        (replace(FACTS, size_bytes=FACTS.size_bytes - 512), GeometryChanged),
        (replace(FACTS, block_bytes=4096), GeometryChanged),
    ],
)
def test_another_namespace_or_a_shrunk_one_is_refused(facts: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        match(SUPERBLOCK, facts)  # type: ignore[arg-type]


def test_a_namespace_without_identifiers_matches_and_cannot_be_told_from_a_copy() -> None:
    anonymous = replace(SUPERBLOCK, nguid=bytes(16), namespace_uuid=bytes(16))
    assert not match(anonymous, replace(FACTS, nguid=bytes(16), uuid=bytes(16))).identified


@pytest.mark.parametrize(
    ("offset", "data", "field"),
    [
        (80, b"\x02", "copy"),
        (81, b"\x02", "clean"),
        (82, b"\xff", "extents_handed_out"),
        (83, b"\x01", "reserved at 83"),
        (4095, b"\x01", "reserved at"),
        (128, (1024).to_bytes(4, "little"), "block_bytes"),
        (132, (3).to_bytes(4, "little"), "au_bytes"),
        (136, bytes(8), "max_objects"),
        (144, b"\xff" * 8, "capacity_au"),
        (152, bytes(8), "journal"),
        (232, b"\xff" * 8, "data"),
        (296, b"\xff\xfe", "label"),
        (296, b"a\0b", "label"),
    ],
)
def test_an_impossible_value_under_a_right_checksum_is_refused_by_the_name_of_the_field(
    offset: int, data: bytes, field: str
) -> None:
    with pytest.raises(BadField) as caught:
        decode(with_bytes(encode(SUPERBLOCK, 0), offset, data), 0)
    assert caught.value.field.startswith(field)
