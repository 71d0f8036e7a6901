"""Superblocks read, judged and written: whose card this is, and making it ours (FORMAT.md, "Open", "Format")."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from xkv_gateway.card import heartbeat as heartbeat_format
from xkv_gateway.card import superblock as superblock_format
from xkv_gateway.card.fence import INTERVAL_MS, CardLost
from xkv_gateway.card.format_errors import FormatError
from xkv_gateway.card.layout import HEAD_BYTES, HEARTBEAT_OFFSET, TAIL_BYTES, superblock_1_offset
from xkv_gateway.card.structure import BLOCK_BYTES, RUN_ID_BYTES, UUID_BYTES, Stamp, is_blank
from xkv_gateway.card.superblock import Chosen, NamespaceFacts, Superblock, choose

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.heartbeat import Heartbeat
    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.superblock import Blank, Stranger
    from xkv_nvmeof.blockdev import BlockDevice

NS_PER_MS: Final = 1_000_000
SETTLE_MARGIN_NS: Final = 2_000_000_000
"""Beyond the keep-alive time of the run before: clocks differ, and targets look at their timers now and then."""
SAMPLES: Final = 256
"""Blocks of a card that are looked at before it is called blank, beside its ends."""
WATCH_INTERVALS: Final = 3
"""An owner that lives beats once in each interval."""
INTERVAL_MS_MAX: Final = 10_000
"""No version of ours beats more rarely; a greater number on the card is damage that must not make anybody wait for ever."""
HANDED_OUT_MAX_NS: Final = 900_000_000_000
"""No client of ours uses extents for longer; a greater number on the card is damage, as above."""
HEARTBEAT_READS_MAX: Final = 3
"""One that is torn is being written: read again."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who opens the card: written into the superblock, for the next one who does."""

    name: str
    host_nqn: str
    host_id: bytes
    boot_id: bytes
    pid: int
    keep_alive_ms: int
    lease_max_ns: int
    """How long a client may use what this run has given to it: the longest lease, or ticket and its grace."""
    hands_out_extents: bool = False
    """Whether clients read and write the card themselves (direct path)."""


def facts_of(device: BlockDevice) -> NamespaceFacts:
    """Return what the controller says about the namespace."""
    geometry, identity = device.geometry, device.identity
    return NamespaceFacts(identity.nguid, identity.uuid, geometry.size_bytes, geometry.block_bytes)


async def read_superblocks(blocks: CardBlocks, size_bytes: int) -> Blank | Stranger | Chosen:
    """Read both copies and judge them.

    Raises:
        FormatError: see `superblock.choose`.
        DeviceError: they could not be read.
    """
    first = await blocks.read(0, BLOCK_BYTES)
    with suppress(FormatError):
        # A card that has grown has its second copy where it was.
        size_bytes = min(size_bytes, superblock_format.decode(first, 0).layout.size_bytes)
    second = await blocks.read(superblock_1_offset(size_bytes), BLOCK_BYTES)
    return choose((first, second))


async def looks_blank(blocks: CardBlocks, size_bytes: int) -> bool:
    """Tell whether the first and the last MiB are all zero, where marks are, and samples of what is between. Raises DeviceError."""
    last_bytes = superblock_1_offset(size_bytes) + BLOCK_BYTES - TAIL_BYTES
    for offset_bytes, length_bytes in ((0, HEAD_BYTES), (last_bytes, size_bytes - last_bytes)):
        if not is_blank(await blocks.read(offset_bytes, length_bytes)):
            return False
    return await samples_are_blank(blocks, size_bytes)


async def samples_are_blank(blocks: CardBlocks, size_bytes: int) -> bool:
    """Tell whether blocks that are spread evenly are zero: somebody's data need not begin where a disk does. Raises DeviceError."""
    count = min(SAMPLES, size_bytes // BLOCK_BYTES)
    for number in range(count):
        offset_bytes = size_bytes // BLOCK_BYTES * number // count * BLOCK_BYTES
        if not is_blank(await blocks.read(offset_bytes, BLOCK_BYTES)):
            return False
    return True


async def owner_beats(blocks: CardBlocks, card_uuid: bytes) -> bool:
    """Watch the heartbeat; tell whether somebody moved it. Raises DeviceError."""
    before = await read_heartbeat(blocks, card_uuid)
    # An owner that has just opened the card has not beaten yet.
    interval_ms = INTERVAL_MS if before is None else min(before.interval_ms, INTERVAL_MS_MAX)
    for _ in range(WATCH_INTERVALS):
        await asyncio.sleep(interval_ms / 1000)
        if heartbeat_format.moved(before, await read_heartbeat(blocks, card_uuid)):
            return True
    return False


async def heartbeat_epoch(blocks: CardBlocks, card_uuid: bytes) -> int:
    """Return the epoch of the last beat, 0 where there is none. Raises DeviceError."""
    beat = await read_heartbeat(blocks, card_uuid)
    return 0 if beat is None else beat.stamp.epoch


async def read_heartbeat(blocks: CardBlocks, card_uuid: bytes) -> Heartbeat | None:
    """Return the last beat, None where there is none that can be read. Raises DeviceError."""
    for _ in range(HEARTBEAT_READS_MAX):
        try:
            return heartbeat_format.decode(await blocks.read(HEARTBEAT_OFFSET, BLOCK_BYTES), card_uuid)
        except FormatError:
            continue
    return None


async def write_both(blocks: CardBlocks, superblock: Superblock, *, first_copy: int) -> None:
    """Write both copies, one durable before the other is begun, and read them back.

    Raises:
        CardLost: another one wrote its own meanwhile.
        CardFailed.
    """
    offsets = superblock.layout.superblock_offsets
    for copy in (first_copy, 1 - first_copy):
        await blocks.write(offsets[copy], [superblock_format.encode(superblock, copy)], flush=True)
    for copy, offset_bytes in enumerate(offsets):
        block = await blocks.read_surely(offset_bytes, BLOCK_BYTES)
        if block != superblock_format.encode(superblock, copy):
            raise CardLost("another gateway opened the card at the same time")


def owned(
    before: Superblock, owner: Owner, *, epoch: int, run_id: bytes, wall_ns: int, reservation_key: int = 0
) -> Superblock:
    """Return the superblock of a run that begins; `reservation_key` of 0: it has no reservation.

    Where extents were handed out, that is known from here on, before any leave; and what a run before has said of it is kept,
    since its clients may live on when this run dies young.
    """
    lease_max_ns = owner.lease_max_ns
    if before.extents_handed_out:
        lease_max_ns = max(lease_max_ns, before.lease_max_ns)
    return replace(
        before,
        stamp=Stamp(before.stamp.card_uuid, epoch, run_id),
        sequence=before.sequence + 1,
        open_time_ns=wall_ns,
        clean=False,
        extents_handed_out=owner.hands_out_extents or before.extents_handed_out,
        incompatible_features=before.incompatible_features | superblock_format.FEATURE_TIMES,
        owner=owner.name,
        owner_host_nqn=owner.host_nqn,
        owner_host_id=owner.host_id,
        owner_boot_id=owner.boot_id,
        owner_pid=owner.pid,
        reservation_key=reservation_key,
        lease_max_ns=lease_max_ns,
        keep_alive_ms=owner.keep_alive_ms,
        controller_id=0,
    )


def closed(superblock: Superblock, *, extents_in_use: bool) -> Superblock:
    """Return the superblock of a run that ended in order; whether clients may still use extents, of it or of a run before."""
    return replace(
        superblock, sequence=superblock.sequence + 1, clean=True, extents_handed_out=extents_in_use
    )


def held_until_ns(before: Superblock, from_ns: int) -> int:
    """Return from when on no client can use extents that runs up to this superblock have handed out; 0: none did.

    Args:
        before: the newest superblock.
        from_ns: since when those runs have certainly handed out nothing.
    """
    if not before.extents_handed_out:
        return 0
    return from_ns + min(before.lease_max_ns, HANDED_OUT_MAX_NS)


def repair_first(chosen: Chosen) -> int:
    """Return the copy to write first: the one that is not the newest whole one."""
    return 1 - chosen.copy


async def format_card(
    blocks: CardBlocks,
    layout: Layout,
    facts: NamespaceFacts,
    *,
    label: str,
    sequence: int,
    wall_ns: int,
    entropy: Callable[[int], bytes],
    first_copy: int | None = None,
) -> Superblock:
    """Format: the card is empty afterwards, under a new UUID. The caller made sure that it may.

    Args:
        blocks: access to the card.
        layout: from `layout.plan`.
        facts: of the namespace.
        label: for people, up to 64 bytes.
        sequence: larger than that of any superblock that was there.
        wall_ns: ns since 1970.
        entropy: randomness.
        first_copy: where a card of ours is, with whole superblocks: the copy to write first. None: there is none, and
            what may be left of anything else is erased.

    Raises:
        CardFailed, CardLost, DeviceError.
    """
    if first_copy is None:
        await _erase(blocks, layout)
    superblock = Superblock(
        stamp=Stamp(entropy(UUID_BYTES), 1, entropy(RUN_ID_BYTES)),
        sequence=sequence,
        layout=layout,
        digest_secret=entropy(superblock_format.DIGEST_SECRET_BYTES),
        nguid=facts.nguid,
        namespace_uuid=facts.uuid,
        format_time_ns=wall_ns,
        open_time_ns=0,
        clean=True,
        label=label,
    )
    await write_both(blocks, superblock, first_copy=1 if first_copy is None else first_copy)
    return superblock


async def _erase(blocks: CardBlocks, layout: Layout) -> None:
    zero, draft = bytes(BLOCK_BYTES), blocks.draft()
    for offset_bytes in layout.superblock_offsets:
        await draft.write(offset_bytes, zero)
    await draft.flush()
    last_bytes = layout.superblock_offsets[1] + BLOCK_BYTES - TAIL_BYTES
    await draft.write(0, bytes(HEAD_BYTES))
    await draft.write(last_bytes, bytes(TAIL_BYTES))
    for region in (layout.checkpoint_a, layout.checkpoint_b, layout.ledger_a, layout.ledger_b):
        await draft.write(region.offset_bytes, zero)
        await draft.write(region.end_bytes - BLOCK_BYTES, zero)
    await draft.flush()
