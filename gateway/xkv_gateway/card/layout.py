"""Where everything lies on the card: the region table, computed once at format and read from the superblock later.

    0        4 KiB   8 KiB     1 MiB                                                        end - 1 MiB     end - 4 KiB
    | super 0 | heart | zero ... | journal | ckpt A | ckpt B | ledger A | ledger B | data ... | zero ... | super 1 |

The two superblocks lie as far apart as can be. Everything but the data area is in proportion to it, so that a
checkpoint of a full card always fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from xkv_gateway.card.format_errors import BadField, CardTooSmall
from xkv_gateway.card.record_codec import record_bytes_max
from xkv_gateway.card.structure import BLOCK_BYTES, align_up
from xkv_gateway.card.tables import (
    EXTENTS,
    EXTENTS_PER_OBJECT_MAX,
    NAMESPACES,
    OBJECTS,
    QUOTAS,
    SCOPES,
    WIPES,
)

MIB: Final = 1 << 20
HEAD_BYTES: Final = MIB
TAIL_BYTES: Final = MIB
SUPERBLOCK_0_OFFSET: Final = 0
HEARTBEAT_OFFSET: Final = BLOCK_BYTES

AU_BYTES_MIN: Final = BLOCK_BYTES
AU_BYTES_MAX: Final = 64 * MIB
AU_BYTES_DEFAULT: Final = 64 << 10
CAPACITY_AU_MIN: Final = 16
CAPACITY_AU_MAX: Final = (1 << 32) - 1
OBJECTS_MAX: Final = 1 << 31
OBJECTS_DEFAULT_MAX: Final = 10_000_000
"""Unless asked for more: every object of the limit costs index memory on the host."""
BLOCK_SIZES: Final = (512, 4096)

JOURNAL_BYTES_MIN: Final = 256 << 10
JOURNAL_BATCHES_MIN: Final = 4
"""The largest record there can be fits at least so often."""
JOURNAL_BYTES_MAX: Final = 512 * MIB
"""Long enough that a background checkpoint ends before it is full, short enough to be replayed in seconds."""
LEDGER_BYTES_MIN: Final = 256 << 10
LEDGER_BYTES_MAX: Final = 4 * MIB

CHUNK_BYTES_LARGE: Final = MIB
CHUNK_BYTES_SMALL: Final = 64 << 10
CHUNK_HEADER_BYTES: Final = 128
TABLE_FILE_SMALL_BYTES: Final = 64 * MIB
"""Table files below this have small chunks, so that a small card is not all padding."""
FUZZ: Final = 2
"""A fuzzy checkpoint may see the same units twice: in the object that lost them, and in the one that got them."""


@dataclass(frozen=True, slots=True)
class Region:
    """A run of bytes of the namespace."""

    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """The first byte behind it."""
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Geometry and region table of a card."""

    size_bytes: int
    """Of the namespace, when it was formatted."""
    block_bytes: int
    au_bytes: int
    max_objects: int
    capacity_au: int
    journal: Region
    checkpoint_a: Region
    checkpoint_b: Region
    ledger_a: Region
    ledger_b: Region
    data: Region

    @property
    def capacity_bytes(self) -> int:
        """Of all units."""
        return self.capacity_au * self.au_bytes

    @property
    def superblock_offsets(self) -> tuple[int, int]:
        """Where the two copies are."""
        return SUPERBLOCK_0_OFFSET, superblock_1_offset(self.size_bytes)

    @property
    def regions(self) -> dict[str, Region]:
        """The regions by name, in the order in which they lie."""
        return {name: getattr(self, name) for name in REGION_NAMES}


REGION_NAMES: Final = ("journal", "checkpoint_a", "checkpoint_b", "ledger_a", "ledger_b", "data")


def superblock_1_offset(size_bytes: int) -> int:
    """Return where the second superblock is: the last whole 4 KiB of the namespace."""
    return size_bytes // BLOCK_BYTES * BLOCK_BYTES - BLOCK_BYTES


def chunk_bytes_of(file_bytes: int) -> int:
    """Return the distance of the chunks of a table file, which follows from the size of its region."""
    return CHUNK_BYTES_LARGE if file_bytes >= TABLE_FILE_SMALL_BYTES else CHUNK_BYTES_SMALL


def chunk_count_of(file_bytes: int) -> int:
    """Return how many chunks a table file of this size has room for (header and closing block aside)."""
    return max(0, (file_bytes - 2 * BLOCK_BYTES) // chunk_bytes_of(file_bytes))


def rows_per_chunk(row_bytes: int, chunk_bytes: int) -> int:
    """Return how many rows of a table fit into one chunk."""
    return (chunk_bytes - CHUNK_HEADER_BYTES) // row_bytes


def checkpoint_bytes(max_objects: int, units: int, ledger_bytes: int) -> int:
    """Return the size of a checkpoint region that holds any state of such a card.

    Args:
        max_objects: rows of `objects`; also the most namespaces and scopes that can be in use.
        units: allocation units, at least as many as there are.
        ledger_bytes: what wipes and quotas take at most.
    """
    extents = FUZZ * min(units, (EXTENTS_PER_OBJECT_MAX - 1) * max_objects)
    rows = ((OBJECTS, max_objects), (EXTENTS, extents), (NAMESPACES, max_objects), (SCOPES, max_objects))
    chunk_bytes = CHUNK_BYTES_SMALL
    while True:
        chunks = sum(-(-count // rows_per_chunk(table.row_bytes, chunk_bytes)) for table, count in rows)
        chunks += (
            2 + ledger_bytes // chunk_bytes
        )  # wipes and quotas: as in the ledger, each with a chunk begun
        size_bytes = 2 * BLOCK_BYTES + chunks * chunk_bytes
        if chunk_bytes_of(size_bytes) == chunk_bytes:
            return size_bytes
        if chunk_bytes == CHUNK_BYTES_LARGE:
            return TABLE_FILE_SMALL_BYTES  # between the two sizes: as many large chunks as it takes, and more
        chunk_bytes = CHUNK_BYTES_LARGE


def plan(size_bytes: int, block_bytes: int, au_bytes: int, max_objects: int | None = None) -> Layout:
    """Compute the layout of a card that is about to be formatted.

    Args:
        size_bytes: of the namespace.
        block_bytes: of its logical blocks.
        au_bytes: of an allocation unit; a power of two.
        max_objects: the object limit; by default one for each unit, at most OBJECTS_DEFAULT_MAX.

    Raises:
        BadField: a value that no card can have.
        CardTooSmall: the structures leave fewer than CAPACITY_AU_MIN units.
    """
    _require(block_bytes in BLOCK_SIZES, "block_bytes", f"{block_bytes}: not 512 or 4096")
    _require(
        AU_BYTES_MIN <= au_bytes <= AU_BYTES_MAX and au_bytes & (au_bytes - 1) == 0,
        "au_bytes",
        f"{au_bytes}: not a power of two from {AU_BYTES_MIN} to {AU_BYTES_MAX}",
    )
    _require(size_bytes >= 0 and size_bytes % block_bytes == 0, "size_bytes", "not a whole number of blocks")
    units = size_bytes // au_bytes
    if max_objects is None:
        max_objects = max(1, min(units, OBJECTS_DEFAULT_MAX))
    _require(1 <= max_objects <= OBJECTS_MAX, "max_objects", f"{max_objects}: not from 1 to {OBJECTS_MAX}")
    ledger = align_up(min(max(size_bytes // 1024, LEDGER_BYTES_MIN), LEDGER_BYTES_MAX))
    largest = align_up(record_bytes_max(max_objects, units) + CHUNK_HEADER_BYTES)
    journal = max(min(size_bytes // 64, JOURNAL_BYTES_MAX), JOURNAL_BYTES_MIN, JOURNAL_BATCHES_MIN * largest)
    journal = align_up(journal)
    checkpoint = checkpoint_bytes(max_objects, units, ledger)
    regions: list[Region] = []
    at = HEAD_BYTES
    for length in (journal, checkpoint, checkpoint, ledger, ledger):
        regions.append(Region(at, length))
        at += length
    at = align_up(at, max(MIB, au_bytes))
    end = superblock_1_offset(size_bytes) + BLOCK_BYTES - TAIL_BYTES
    capacity_au = max(0, end - at) // au_bytes
    if capacity_au < CAPACITY_AU_MIN:
        least = at + CAPACITY_AU_MIN * au_bytes + TAIL_BYTES
        raise CardTooSmall(
            "layout",
            "size_bytes",
            f"{size_bytes} bytes; {max_objects} objects and units of {au_bytes} bytes need about {least}",
        )
    _require(capacity_au <= CAPACITY_AU_MAX, "au_bytes", "too many units: choose a larger one")
    regions.append(Region(at, capacity_au * au_bytes))
    layout = Layout(size_bytes, block_bytes, au_bytes, max_objects, capacity_au, *regions)
    check(layout)
    return layout


def shrunk(layout: Layout, size_bytes: int) -> Layout:
    """Return what is left of a layout on a namespace that has become smaller: only the data area ends sooner.

    Raises:
        CardTooSmall: not even all regions are left, and some units.
    """
    data, au_bytes = layout.data, layout.au_bytes
    end = superblock_1_offset(size_bytes) + BLOCK_BYTES - TAIL_BYTES
    capacity_au = min(layout.capacity_au, max(0, end - data.offset_bytes) // au_bytes)
    if capacity_au < CAPACITY_AU_MIN:
        least = data.offset_bytes + CAPACITY_AU_MIN * au_bytes + TAIL_BYTES
        raise CardTooSmall("layout", "size_bytes", f"{size_bytes} bytes; it needs about {least}")
    left = replace(
        layout,
        size_bytes=size_bytes,
        capacity_au=capacity_au,
        data=Region(data.offset_bytes, capacity_au * au_bytes),
    )
    check(left)
    return left


def check(layout: Layout) -> None:
    """Check a layout, computed or read: possible values, regions in range, in order, and apart.

    Other proportions than those of `plan` are fine: a later version may choose others.

    Raises:
        BadField: names what is wrong.
    """
    au_bytes = layout.au_bytes
    _require(layout.block_bytes in BLOCK_SIZES, "block_bytes", "not 512 or 4096")
    _require(
        AU_BYTES_MIN <= au_bytes <= AU_BYTES_MAX and au_bytes & (au_bytes - 1) == 0,
        "au_bytes",
        "not possible",
    )
    _require(1 <= layout.max_objects <= OBJECTS_MAX, "max_objects", "not possible")
    _require(layout.size_bytes % layout.block_bytes == 0, "size_bytes", "not a whole number of blocks")
    at = HEAD_BYTES
    for name, region in layout.regions.items():
        _require(region.offset_bytes >= at, name, "overlaps what lies before it")
        _require(region.length_bytes > 0, name, "empty")
        _require(
            region.offset_bytes % BLOCK_BYTES == 0 and region.length_bytes % BLOCK_BYTES == 0,
            name,
            "not aligned",
        )
        at = region.end_bytes
    _require(at <= superblock_1_offset(layout.size_bytes), "data", "beyond the end of the card")
    _require(layout.journal.length_bytes >= JOURNAL_BYTES_MIN, "journal", "too short")
    for name in ("checkpoint_a", "checkpoint_b", "ledger_a", "ledger_b"):
        _require(chunk_count_of(layout.regions[name].length_bytes) > 0, name, "too short")
    _require(1 <= layout.capacity_au <= CAPACITY_AU_MAX, "capacity_au", "not possible")
    _require(
        layout.capacity_au * au_bytes <= layout.data.length_bytes,
        "capacity_au",
        "more than the data area holds",
    )


def _require(condition: bool, field: str, detail: str) -> None:
    if not condition:
        raise BadField("layout", field, detail)


def ledger_rows_max(file_bytes: int) -> int:
    """Return how many wipes and quotas together a ledger certainly holds."""
    chunk_bytes = chunk_bytes_of(file_bytes)
    widest = max(WIPES.row_bytes, QUOTAS.row_bytes)
    return (chunk_count_of(file_bytes) - 1) * rows_per_chunk(widest, chunk_bytes)
