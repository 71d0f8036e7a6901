"""The superblock: whose card this is, how it is laid out, and who opened it last. Two copies, far apart.

Vocabulary
    copy        0 at the beginning of the namespace, 1 at its end; equal but for their copy number
    sequence    counts the writes of the superblock since the card was first formatted; the newest whole copy wins
    clean       the run ended in order: a checkpoint is complete and nothing of that run can still be written
    contested   two copies of one sequence by different runs: two gateways wrote at the same time
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from xkv_gateway.card import layout as layout_module
from xkv_gateway.card.format_errors import (
    BadMagic,
    CopiesDisagree,
    ForeignCard,
    FormatError,
    GeometryChanged,
    NoSuperblock,
    UnknownFeature,
    UnknownVersion,
    WrongNamespace,
)
from xkv_gateway.card.layout import REGION_NAMES, Layout, Region
from xkv_gateway.card.structure import BLOCK_BYTES, Stamp, Structure, is_blank

if TYPE_CHECKING:
    from xkv_gateway.card.structure import Bytes

FEATURE_TIMES: Final = 1
"""Incompatible: tables `lives` and `clock`, records of kind 8, rows and records of tenants of kind 5, cause 6 of deletes. Every
run that writes these says so, so a card that has it may have been formatted without."""
INCOMPATIBLE_KNOWN: Final = FEATURE_TIMES
"""Features without which the card cannot be read rightly; an unknown bit refuses the card."""

SUPERBLOCK: Final = Structure(
    "superblock",
    b"XKVSUPER",
    BLOCK_BYTES,
    (
        ("u64", "sequence"),
        ("u64", "incompatible_features"),
        ("u64", "compatible_features"),
        ("u8", "copy"),
        ("u8", "clean"),
        ("u8", "extents_handed_out"),
        ("zero[5]", ""),
        ("bytes[16]", "nguid"),
        ("bytes[16]", "namespace_uuid"),
        ("u64", "size_bytes"),
        ("u32", "block_bytes"),
        ("u32", "au_bytes"),
        ("u64", "max_objects"),
        ("u64", "capacity_au"),
        *((("u64"), f"{name}_{part}") for name in REGION_NAMES for part in ("offset", "bytes")),
        ("u64", "format_time_ns"),
        ("u64", "open_time_ns"),
        ("bytes[32]", "digest_secret"),
        ("utf8[64]", "label"),
        ("utf8[64]", "owner"),
        ("utf8[224]", "owner_host_nqn"),
        ("bytes[16]", "owner_host_id"),
        ("bytes[16]", "owner_boot_id"),
        ("u64", "owner_pid"),
        ("u64", "reservation_key"),
        ("u64", "lease_max_ns"),
        ("u32", "keep_alive_ms"),
        ("u16", "controller_id"),
        ("zero[2]", ""),
    ),
)

KEEP_ALIVE_MS_MAX: Final = 3_600_000
"""An opener waits for so long: no association is kept alive more slowly than that."""
DIGEST_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Superblock:
    """One superblock, without its copy number. Fields as in FORMAT.md."""

    stamp: Stamp
    sequence: int
    layout: Layout
    digest_secret: bytes = field(repr=False)
    """32 bytes: the key of the identity digests. Never shown."""
    nguid: bytes
    namespace_uuid: bytes
    format_time_ns: int
    """Wall clock, for people."""
    open_time_ns: int
    """Wall clock, for people."""
    clean: bool = False
    extents_handed_out: bool = False
    """Whether the run gave extents to clients (direct path)."""
    label: str = ""
    owner: str = ""
    owner_host_nqn: str = ""
    owner_host_id: bytes = bytes(16)
    owner_boot_id: bytes = bytes(16)
    owner_pid: int = 0
    """0: none. With the boot id it tells whether the process of a soft card's owner still runs."""
    reservation_key: int = 0
    lease_max_ns: int = 0
    keep_alive_ms: int = 0
    controller_id: int = 0
    compatible_features: int = 0
    incompatible_features: int = 0


_PLAIN: Final = tuple(f.name for f in fields(Superblock) if f.name not in {"stamp", "layout"})
_GEOMETRY: Final = ("size_bytes", "block_bytes", "au_bytes", "max_objects", "capacity_au")
_FLAGS: Final = ("clean", "extents_handed_out")


def encode(superblock: Superblock, copy: int) -> bytes:
    """Return the 4 KiB of one copy.

    Raises:
        ValueError: a text is too long or contains NUL.
    """
    assert copy in {0, 1}
    values: dict[str, Any] = {name: getattr(superblock, name) for name in _PLAIN}
    values |= {name: getattr(superblock.layout, name) for name in _GEOMETRY}
    values["copy"] = copy
    for name, region in superblock.layout.regions.items():
        values[f"{name}_offset"], values[f"{name}_bytes"] = region.offset_bytes, region.length_bytes
    return SUPERBLOCK.pack(superblock.stamp, values)


def decode(block: Bytes, copy: int) -> Superblock:
    """Return the superblock of a copy.

    Raises:
        FormatError: Truncated, BadMagic, BadChecksum, UnknownVersion, UnknownFeature, BadField.
    """
    stamp, values = SUPERBLOCK.unpack(block)
    unknown = values["incompatible_features"] & ~INCOMPATIBLE_KNOWN
    if unknown:
        raise UnknownFeature(SUPERBLOCK.name, "incompatible_features", unknown)
    SUPERBLOCK.require(values["copy"] == copy, "copy", f"{values['copy']} was read where copy {copy} belongs")
    SUPERBLOCK.require(
        values["keep_alive_ms"] <= KEEP_ALIVE_MS_MAX, "keep_alive_ms", "nobody waits that long"
    )
    for name in _FLAGS:
        SUPERBLOCK.require(values[name] <= 1, name, "neither 0 nor 1")
        values[name] = bool(values[name])
    regions = (Region(values[f"{name}_offset"], values[f"{name}_bytes"]) for name in REGION_NAMES)
    layout = Layout(*(values[name] for name in _GEOMETRY), *regions)
    layout_module.check(layout)
    return Superblock(stamp=stamp, layout=layout, **{name: values[name] for name in _PLAIN})


@dataclass(frozen=True, slots=True)
class Blank:
    """Both places are all zero: nobody's card, or one whose format never began."""


@dataclass(frozen=True, slots=True)
class Stranger:
    """Neither place bears our stamp, and not both are empty: somebody's data."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The newest whole copy."""

    superblock: Superblock
    copy: int
    faults: dict[int, FormatError | None]
    """What is wrong with the other copy, by copy number (None: only older; ForeignCard: older, and another card's). Empty: both are
    the same."""
    contested: bool
    """Not to be taken for clean, whatever it says."""


def choose(copies: tuple[Bytes, Bytes]) -> Blank | Stranger | Chosen:
    """Judge the 4 KiB read from each of the two places.

    A copy that is whole but of an unknown version or feature refuses the card, whatever the other says: a newer
    program was here, and may have been interrupted between its two writes.

    Raises:
        NoSuperblock: at least one copy bears our stamp, and none is usable.
        UnknownVersion, UnknownFeature: see above.
        CopiesDisagree: two cards' superblocks of one sequence.
    """
    if all(map(is_blank, copies)):
        return Blank()
    good: dict[int, Superblock] = {}
    faults: dict[int, FormatError] = {}
    for copy, block in enumerate(copies):
        try:
            good[copy] = decode(block, copy)
        except (UnknownVersion, UnknownFeature):
            raise
        except FormatError as error:
            faults[copy] = error
    if not good:
        if all(isinstance(error, BadMagic) for error in faults.values()):
            return Stranger()
        raise NoSuperblock(tuple(faults.values()))
    if len(good) == 1:
        ((copy, superblock),) = good.items()
        return Chosen(superblock, copy, {1 - copy: faults[1 - copy]}, contested=False)
    return _newest(good[0], good[1])


def _newest(first: Superblock, second: Superblock) -> Chosen:
    if first == second:
        return Chosen(first, 0, {}, contested=False)
    if first.sequence == second.sequence:
        if first.stamp.card_uuid != second.stamp.card_uuid:
            raise CopiesDisagree(SUPERBLOCK.name, "card_uuid", "the copies belong to two cards")
        first_wins = first.stamp.epoch >= second.stamp.epoch
        return Chosen(
            first if first_wins else second, int(not first_wins), {int(first_wins): None}, contested=True
        )
    copy = int(first.sequence < second.sequence)
    newest, other = (second, first) if copy else (first, second)
    fault = None
    if other.stamp.card_uuid != newest.stamp.card_uuid:
        fault = ForeignCard(
            SUPERBLOCK.name, "card_uuid", f"it is of the card {UUID(bytes=other.stamp.card_uuid)}"
        )
    return Chosen(newest, copy, {1 - copy: fault}, contested=False)


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """What the controller says about the namespace."""

    nguid: bytes
    uuid: bytes
    """Both 16 bytes, all zero when not reported."""
    size_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Match:
    """The card is where it was formatted."""

    identified: bool
    """False: the namespace has neither NGUID nor UUID, so that a copy could not be told from the original."""
    grown_bytes: int
    """By how much the namespace is larger than when formatted; not used until the card is formatted again."""


def match(superblock: Superblock, facts: NamespaceFacts) -> Match:
    """Check that a superblock belongs to the namespace that it was read from.

    Raises:
        WrongNamespace: NGUID or UUID differ (also: one is reported now and was not, or the other way round).
        GeometryChanged: another block size, or the namespace has shrunk.
    """
    if facts.nguid != superblock.nguid:
        raise WrongNamespace(SUPERBLOCK.name, "nguid", f"formatted on {superblock.nguid.hex()}")
    if facts.uuid != superblock.namespace_uuid:
        raise WrongNamespace(
            SUPERBLOCK.name, "namespace_uuid", f"formatted on {superblock.namespace_uuid.hex()}"
        )
    layout = superblock.layout
    if facts.block_bytes != layout.block_bytes:
        raise GeometryChanged(
            SUPERBLOCK.name, "block_bytes", f"{facts.block_bytes} now, {layout.block_bytes} when formatted"
        )
    if facts.size_bytes < layout.size_bytes:
        raise GeometryChanged(
            SUPERBLOCK.name, "size_bytes", f"{facts.size_bytes} now, {layout.size_bytes} when formatted"
        )
    return Match(any(facts.nguid) or any(facts.uuid), facts.size_bytes - layout.size_bytes)
