"""Fixed structures of the card as tables of fields: one table, from which bytes are packed and unpacked.

Every structure begins with the same 56 bytes, at the same offsets in every version there will ever be, so that a
future version can be recognised as ours and whole without knowing anything else about it:

    magic, format version, CRC32C over the whole structure (with this field as zero), card, epoch, run

All integers are little-endian and unaligned fields do not exist. Reserved bytes are zero, and checked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from crc32c import crc32c

from xkv_gateway.card.format_errors import BadChecksum, BadField, BadMagic, Truncated, UnknownVersion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Bytes = bytes | bytearray | memoryview
"""What decoders take."""

FORMAT_VERSION: Final = 1
"""Of the card as a whole: any change of any byte of any structure makes it another one."""

BLOCK_BYTES: Final = 4096
"""Alignment of every structure, whatever the block size of the namespace (512 or 4096)."""

UUID_BYTES: Final = 16
RUN_ID_BYTES: Final = 16

_INTEGERS: Final = {"u8": ("B", 1), "u16": ("H", 2), "u32": ("I", 4), "u64": ("Q", 8)}
_SIZED: Final = re.compile(r"(bytes|utf8|zero)\[(\d+)\]")

_COMMON: Final = (
    ("bytes[8]", "magic"),
    ("u32", "format_version"),
    ("u32", "crc"),
    ("bytes[16]", "card_uuid"),
    ("u64", "epoch"),
    ("bytes[16]", "run_id"),
)
COUNTER_LIMIT: Final = 1 << 62
"""Counters go on from what is read: one that is not below this was never counted to."""
_COUNTERS: Final = frozenset(
    {
        "epoch",
        "sequence",
        "beat",
        "number",
        "position",
        "first_lsn",
        "last_lsn",
        "start_position",
        "start_number",
        "start_lsn",
        "start_epoch",
        "end_lsn",
        "used_stamp_max",
    }
)
_CRC_OFFSET: Final = 12
_CRC_END: Final = 16
_ZERO_CRC: Final = bytes(4)
COMMON_BYTES: Final = 56


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who wrote a structure: which card it belongs to, in which epoch, by which run."""

    card_uuid: bytes
    """16 random bytes, new at each format: what was there before is foreign."""
    epoch: int
    """Grows with each opening of the card for writing."""
    run_id: bytes
    """16 random bytes, new for each run: tells two runs apart that took the same epoch."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        assert len(self.card_uuid) == UUID_BYTES
        assert len(self.run_id) == RUN_ID_BYTES
        assert 0 <= self.epoch < 1 << 64


@dataclass(frozen=True, slots=True)
class Field:
    """One row of a byte table."""

    offset: int
    size: int
    type: str
    """`u8`..`u64`, `bytes[n]`, `utf8[n]` (padded with NUL), `zero[n]` (reserved)."""
    name: str
    """Empty for reserved bytes."""


def align_up(value: int, alignment: int = BLOCK_BYTES) -> int:
    """Return the smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


class Structure:
    """A structure of fixed size.

    Args:
        name: its name in FORMAT.md.
        magic: its first 8 bytes.
        size_bytes: whole size; what the fields do not cover is reserved.
        fields: (type, name) for each field behind the common ones, in order. Each lies at a multiple of its size.
    """

    def __init__(self, name: str, magic: bytes, size_bytes: int, fields: Sequence[tuple[str, str]]) -> None:
        self.name = name
        self.magic = magic
        self.size_bytes = size_bytes
        table: list[Field] = []
        codes: list[str] = []
        offset = 0
        for type_, field_name in (*_COMMON, *fields):
            code, size = _code_of(type_)
            assert type_ not in _INTEGERS or offset % size == 0, (name, field_name, offset)
            table.append(Field(offset, size, type_, field_name))
            codes.append(code)
            offset += size
        if offset < size_bytes:
            table.append(Field(offset, size_bytes - offset, f"zero[{size_bytes - offset}]", ""))
            codes.append(f"{size_bytes - offset}s")
        self.fields: Final = tuple(table)
        self._struct = Struct("<" + "".join(codes))
        self._names = tuple(field.name for field in table)
        self._texts = tuple((field.name, field.size) for field in table if field.type.startswith("utf8"))
        self._raws = tuple((field.name, field.size) for field in table if field.type.startswith("bytes"))
        self._counters = tuple(field.name for field in table if field.name in _COUNTERS)
        self._reserved = tuple((index, field.offset) for index, field in enumerate(table) if not field.name)
        assert self._struct.size == size_bytes, (name, self._struct.size)
        assert len(magic) == 8

    def pack(self, stamp: Stamp, values: Mapping[str, Any]) -> bytes:
        """Return the bytes. `values` has every field that is neither common nor reserved.

        Raises:
            ValueError: a text is too long for its field, or contains NUL.
        """
        common: dict[str, Any] = {
            "magic": self.magic,
            "format_version": FORMAT_VERSION,
            "crc": 0,
            "card_uuid": stamp.card_uuid,
            "epoch": stamp.epoch,
            "run_id": stamp.run_id,
        }
        common.update(values)
        for name, size in self._texts:
            common[name] = pack_text(name, common[name], size)
        for name, size in self._raws:
            assert len(common[name]) == size, (self.name, name)
        row = [common[name] if name else b"" for name in self._names]
        block = self._struct.pack(*row)
        crc = crc_of(block)
        return block[:_CRC_OFFSET] + crc.to_bytes(4, "little") + block[_CRC_END:]

    def unpack(self, block: Bytes) -> tuple[Stamp, dict[str, Any]]:
        """Return the stamp and all fields by name (the common ones too; texts as str).

        Raises:
            Truncated, BadMagic, BadChecksum, UnknownVersion, BadField.
        """
        if len(block) < self.size_bytes:
            raise Truncated(self.name, "", f"{len(block)} of {self.size_bytes} bytes")
        block = memoryview(block)[: self.size_bytes]
        if block[:8] != self.magic:
            raise BadMagic(self.name, "magic", "not a structure of this kind")
        if crc_of(block) != int.from_bytes(block[_CRC_OFFSET:_CRC_END], "little"):
            raise BadChecksum(self.name, "crc", "the structure is damaged")
        version = int.from_bytes(block[8:12], "little")
        if version != FORMAT_VERSION:
            raise UnknownVersion(self.name, version, FORMAT_VERSION)
        row = self._struct.unpack(block)
        for index, offset in self._reserved:
            if row[index].count(0) != len(row[index]):
                raise BadField(self.name, f"reserved at {offset}", "not zero")
        values: dict[str, Any] = dict(zip(self._names, row, strict=True))
        for name in self._counters:
            self.require(values[name] < COUNTER_LIMIT, name, "beyond anything that was ever counted")
        for name, _ in self._texts:
            values[name] = self._text(name, values[name])
        return Stamp(values["card_uuid"], values["epoch"], values["run_id"]), values

    def _text(self, field_name: str, raw: bytes) -> str:
        text = raw.rstrip(b"\0")
        if b"\0" in text:
            raise BadField(self.name, field_name, "NUL inside a text")
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise BadField(self.name, field_name, "not UTF-8") from error

    def require(self, condition: bool, field_name: str, detail: str) -> None:
        """Raise BadField unless the condition holds."""
        if not condition:
            raise BadField(self.name, field_name, detail)


def _code_of(type_: str) -> tuple[str, int]:
    if type_ in _INTEGERS:
        return _INTEGERS[type_]
    match = _SIZED.fullmatch(type_)
    assert match is not None, type_
    return f"{match[2]}s", int(match[2])


def crc_of(block: Bytes) -> int:
    """Return the CRC32C of a structure with its CRC field taken as zero."""
    view = memoryview(block)
    crc = crc32c(view[:_CRC_OFFSET])
    return int(crc32c(view[_CRC_END:], crc32c(_ZERO_CRC, crc)))


def pack_text(field_name: str, text: str, size_bytes: int) -> bytes:
    """Return the UTF-8 of a text that fits its field.

    Raises:
        ValueError: it does not.
    """
    raw = text.encode()
    if len(raw) > size_bytes or b"\0" in raw:
        raise ValueError(f"{field_name}: at most {size_bytes} bytes of UTF-8, and no NUL")
    return raw


def is_blank(block: Bytes) -> bool:
    """Tell whether nothing was ever written here: all zero."""
    return bytes(block).count(0) == len(block)
