"""The tables that checkpoints and ledgers consist of: names, types and order of their columns (FORMAT.md, "Tables").

A chunk of a table holds its columns one after the other, each contiguous, so that they are copied as whole arrays.
Columns come in falling order of width: none needs padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]
Columns = dict[str, AnyArray]

NAMESPACE_BYTES_MAX: Final = 64
SCOPE_BYTES_MAX: Final = 32
LABEL_BYTES_MAX: Final = 64
EXTENTS_PER_OBJECT_MAX: Final = 64


class ObjectState(IntEnum):
    """State of a row of `objects`. Fixed by the format; what is reserved or committing has no row."""

    LIVE = 1
    DOOMED = 2
    """Gone for lookups; its units are free once a `freed` record says so, or the reader knows that nobody reads them."""
    QUARANTINED = 3
    """Gone for lookups; a write may still land on its units, or they gave wrong bytes."""
    WIPED = 4
    """As doomed, and its units are erased and read back before they are free."""


class TenantKind(IntEnum):
    """What a row of `quotas`, or a tenant record, says. Fixed by the format."""

    NAMED = 0
    """A name, without a limit."""
    LIMITED = 1
    """A limit, and perhaps a name."""
    REMOVED = 2
    """Not registered any more."""
    OTHERS_LOST = 3
    """Of no tenant: damage took rows away, so one without a row may have had one."""
    COMPLETE = 4
    """Of no tenant: the operator has said that those that are there are all."""
    TTL = 5
    """Of no tenant: how long objects of a namespace may live. The name is the namespace, the limit is `ttl_value`."""


TTL_IDLE_BITS: Final = 32


def ttl_value(idle_s: int, total_s: int) -> int:
    """Return both limits of a rule in the place of a tenant's limit: idle in the low 32 bits; 0: no such limit."""
    return idle_s | total_s << TTL_IDLE_BITS


def ttl_limits(value: int) -> tuple[int, int]:
    """Return idle and total."""
    return value & (1 << TTL_IDLE_BITS) - 1, value >> TTL_IDLE_BITS


def tenant_kind(limit_bytes: int | None, name: str | None) -> TenantKind:
    """Return the kind of a tenant's row."""
    if limit_bytes is not None:
        return TenantKind.LIMITED
    return TenantKind.REMOVED if name is None else TenantKind.NAMED


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `dtype` is a little-endian numpy type string (`<u4`, `u1`, `S32`)."""

    name: str
    dtype: str

    @property
    def width_bytes(self) -> int:
        """Bytes of one value."""
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Table:
    """A named set of columns of equal length."""

    ident: int
    """Never reused."""
    name: str
    columns: tuple[Column, ...]
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute the row size."""
        object.__setattr__(self, "row_bytes", sum(column.width_bytes for column in self.columns))


def _columns(*pairs: tuple[str, str]) -> tuple[Column, ...]:
    return tuple(Column(name, dtype) for name, dtype in pairs)


OBJECTS: Final = Table(
    1,
    "objects",
    _columns(
        ("digest_low", "<u8"),
        ("digest_high", "<u8"),
        ("checksum", "<u8"),
        ("used_stamp", "<u8"),
        ("size_bytes", "<u4"),
        ("namespace_id", "<u4"),
        ("scope_id", "<u4"),
        ("generation", "<u4"),
        ("slot", "<u4"),
        ("first_au", "<u4"),
        ("first_count_au", "<u4"),
        ("hold_s", "<u2"),
        ("state", "u1"),
        ("extents", "u1"),
    ),
)
EXTENTS: Final = Table(
    2,
    "extents",
    _columns(
        ("slot", "<u4"), ("generation", "<u4"), ("ordinal", "<u4"), ("start_au", "<u4"), ("count_au", "<u4")
    ),
)
NAMESPACES: Final = Table(
    3, "namespaces", _columns(("ident", "<u4"), ("name", f"V{NAMESPACE_BYTES_MAX}"), ("name_bytes", "u1"))
)
SCOPES: Final = Table(
    4, "scopes", _columns(("ident", "<u4"), ("name", f"V{SCOPE_BYTES_MAX}"), ("name_bytes", "u1"))
)
WIPES: Final = Table(
    5,
    "wipes",
    _columns(
        ("lsn", "<u8"),
        ("namespace", f"V{NAMESPACE_BYTES_MAX}"),
        ("scope", f"V{SCOPE_BYTES_MAX}"),
        ("namespace_bytes", "u1"),
        ("scope_bytes", "u1"),
        ("whole_namespace", "u1"),
        ("stage", "u1"),
    ),
)
QUOTAS: Final = Table(
    6,
    "quotas",
    _columns(
        ("lsn", "<u8"),
        ("limit_bytes", "<u8"),
        ("label", f"V{LABEL_BYTES_MAX}"),
        ("scope", f"V{SCOPE_BYTES_MAX}"),
        ("label_bytes", "u1"),
        ("scope_bytes", "u1"),
        ("kind", "u1"),
    ),
)

LIVES: Final = Table(
    7,
    "lives",
    _columns(("slot", "<u4"), ("generation", "<u4"), ("stored_s", "<u4"), ("used_s", "<u4")),
)
CLOCK: Final = Table(8, "clock", _columns(("time_s", "<u8"), ("written_bytes", "<u8")))

TABLES: Final = {
    table.ident: table for table in (OBJECTS, EXTENTS, NAMESPACES, SCOPES, WIPES, QUOTAS, LIVES, CLOCK)
}
TABLES_MAX: Final = 16
"""Room for row counts in the closing block."""


def pack_names(names: list[bytes], width_bytes: int) -> tuple[AnyArray, AnyArray]:
    """Return the column of zero-padded names and the column of their lengths.

    Raises:
        ValueError: a name is longer than the column is wide.
    """
    lengths = np.fromiter(map(len, names), np.uint8, len(names))
    if names and int(lengths.max()) > width_bytes:
        raise ValueError(f"names of at most {width_bytes} bytes")
    joined = b"".join(name.ljust(width_bytes, b"\0") for name in names)
    return np.frombuffer(joined, f"V{width_bytes}"), lengths


def unpack_names(column: AnyArray, lengths: AnyArray) -> list[bytes]:
    """Return the names; a length beyond the column is cut to it (the caller compares where that matters)."""
    width_bytes = column.dtype.itemsize
    raw = column.tobytes()
    return [
        raw[at : at + min(length, width_bytes)]
        for at, length in zip(range(0, len(raw), width_bytes), lengths.tolist(), strict=True)
    ]
