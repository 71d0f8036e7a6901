"""Flip every byte, cut at every length, of every structure: only `FormatError` ever comes out, and never a wrong value.

Two kinds of damage: of the medium (the checksum tells), and of a program (the checksum is right, the value is not).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.card import samples
from tests.card.samples import CARD
from xkv_gateway.card import heartbeat, journal_format, superblock
from xkv_gateway.card.format_errors import FormatError, UnknownVersion
from xkv_gateway.card.journal_format import Ring
from xkv_gateway.card.structure import FORMAT_VERSION, Structure, crc_of
from xkv_gateway.card.table_file import CHUNK, CLOSING, FILE_HEADER, FileKind, TableWriter
from xkv_gateway.card.table_read import TableReader, decode_ends
from xkv_gateway.card.tables import OBJECTS

if TYPE_CHECKING:
    from collections.abc import Callable

RING = Ring(256 << 10)
IMAGE = samples.JournalImage()
IMAGE.append(count=3)
BATCH = b"".join(IMAGE.placed[1].buffers)
WRITER = TableWriter(samples.REGION_BYTES, samples.identity())
HEADER = bytes(WRITER.open_pieces()[0].data)
CHUNKS = [bytes(piece.data) for piece in WRITER.chunks(OBJECTS, samples.columns(OBJECTS, 30))]
CLOSED = bytes(WRITER.close(20, 1, 2).data)


def _ends(header: bytes, closing: bytes) -> Any:
    return decode_ends(
        header, closing, region_bytes=samples.REGION_BYTES, card_uuid=CARD, kind=FileKind.CHECKPOINT
    )


def _batch(data: bytes) -> Any:
    header = journal_format.decode_header(data, CARD, RING)
    return header, bytes(journal_format.check_body(header, memoryview(data)))


def _chunk(data: bytes) -> Any:
    reader = TableReader(samples.REGION_BYTES, _ends(HEADER, CLOSED))
    chunk = reader.decode(data)
    if chunk is None:
        raise reader.damaged[0]
    return chunk.index, chunk.first_row, {name: values.tobytes() for name, values in chunk.columns.items()}


CASES: Final[dict[str, tuple[bytes, Callable[[bytes], Any], Structure]]] = {
    "superblock": (
        superblock.encode(samples.SUPERBLOCK, 0),
        lambda data: superblock.decode(data, 0),
        superblock.SUPERBLOCK,
    ),
    "heartbeat": (
        heartbeat.encode(samples.HEARTBEAT),
        lambda data: heartbeat.decode(data, CARD),
        heartbeat.HEARTBEAT,
    ),
    "batch": (BATCH, _batch, journal_format.BATCH),
    "table_header": (HEADER, lambda data: _ends(data, CLOSED), FILE_HEADER),
    "table_closing": (CLOSED, lambda data: _ends(HEADER, data), CLOSING),
    "table_chunk": (CHUNKS[0], _chunk, CHUNK),
}
NAMES = sorted(CASES)


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_byte_is_found(name: str) -> None:
    whole, decode, _ = CASES[name]
    decode(whole)
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        with pytest.raises(FormatError):
            decode(bytes(flipped))


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_is_found(name: str) -> None:
    whole, decode, structure = CASES[name]
    for length in [*range(0, structure.size_bytes, 7), structure.size_bytes - 1]:
        with pytest.raises(FormatError):
            decode(whole[:length])


@pytest.mark.parametrize("name", NAMES)
def test_a_torn_write_over_zeroes_or_over_garbage_is_found(name: str) -> None:
    whole, decode, _ = CASES[name]
    used = len(whole.rstrip(b"\0"))
    for filler in (b"\0", b"\xa5"):
        for cut in range(0, len(whole), 512):
            torn = whole[:cut] + filler * (len(whole) - cut)
            if filler == b"\0" and cut >= used:
                assert decode(torn) == decode(whole)
            elif cut == 0 and filler == b"\0" and name == "heartbeat":
                assert decode(torn) is None
            else:
                with pytest.raises(FormatError):
                    decode(torn)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fill", [0x00, 0x01, 0x7F, 0x80, 0xFF])
def test_a_wrong_value_in_any_field_under_a_right_checksum_is_refused_or_read_as_such(
    name: str, fill: int
) -> None:
    """A faulty program wrote it: a typed refusal, or that value; never another exception."""
    whole, decode, structure = CASES[name]
    for field in structure.fields:
        for size in {field.size, 1}:
            altered = bytearray(whole)
            altered[field.offset : field.offset + size] = bytes([fill]) * size
            altered[12:16] = crc_of(memoryview(altered)[: structure.size_bytes]).to_bytes(4, "little")
            with suppress(FormatError):
                decode(bytes(altered))


@pytest.mark.parametrize("name", NAMES)
def test_reserved_bytes_are_checked(name: str) -> None:
    whole, decode, structure = CASES[name]
    for field in structure.fields:
        if field.name:
            continue
        for at in (field.offset, field.offset + field.size - 1):
            altered = bytearray(whole)
            altered[at] = 1
            altered[12:16] = crc_of(memoryview(altered)[: structure.size_bytes]).to_bytes(4, "little")
            with pytest.raises(FormatError, match="reserved"):
                decode(bytes(altered))


@pytest.mark.parametrize("name", NAMES)
def test_a_later_version_is_whole_and_unknown(name: str) -> None:
    whole, decode, structure = CASES[name]
    later = bytearray(whole)
    later[8:12] = (FORMAT_VERSION + 1).to_bytes(4, "little")
    later[12:16] = crc_of(memoryview(later)[: structure.size_bytes]).to_bytes(4, "little")
    with pytest.raises(UnknownVersion) as caught:
        decode(bytes(later))
    assert caught.value.version == FORMAT_VERSION + 1


def test_a_flipped_bit_in_every_64th_byte_of_a_checkpoint_is_found_for_one_reason_each_time() -> None:
    parts = {"header": HEADER, "chunk": CHUNKS[0], "closing": CLOSED}
    for name, whole in parts.items():
        for at in range(0, len(whole), 64):
            flipped = bytearray(whole)
            flipped[at] ^= 0x10
            found = {_reason(parts | {name: bytes(flipped)}) for _ in range(2)}
            assert len(found) == 1
            assert found != {None}
    assert _reason(parts) is None


def _reason(parts: dict[str, bytes]) -> str | None:
    try:
        facts = _ends(parts["header"], parts["closing"])
        reader = TableReader(samples.REGION_BYTES, facts)
        reader.decode(parts["chunk"])
        reader.finish()
    except FormatError as error:
        return str(error)
    return None


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.sampled_from(NAMES), st.binary(max_size=64), st.integers(0, 4096), st.booleans())
def test_garbage_is_only_ever_a_format_error(name: str, garbage: bytes, at: int, sealed: bool) -> None:
    whole, decode, structure = CASES[name]
    altered = bytearray(whole)
    altered[at : at + len(garbage)] = garbage
    if sealed and len(altered) >= structure.size_bytes:
        altered[12:16] = crc_of(memoryview(altered)[: structure.size_bytes]).to_bytes(4, "little")
    with suppress(FormatError):
        decode(bytes(altered))


def test_every_fault_has_a_code_of_its_own() -> None:
    classes: list[type[FormatError]] = [FormatError, *FormatError.__subclasses__()]
    assert len({cls.code for cls in classes}) == len(classes)
