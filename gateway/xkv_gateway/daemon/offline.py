"""What is done to a card that no gateway serves: looked at, checked, formatted, adopted (`xkv-gateway card`)."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from xkv_gateway.card import ownership
from xkv_gateway.card.blocks import CardBlocks, CardFailed
from xkv_gateway.card.check import Checker
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.format_errors import FormatError
from xkv_gateway.card.layout import plan, shrunk
from xkv_gateway.card.opening import in_use, refusal_of
from xkv_gateway.card.readonly import ReadOnly
from xkv_gateway.card.reservation import reserve
from xkv_gateway.card.sight import Kind, anybody_beats, look, objects_in_checkpoint, owner_lives
from xkv_gateway.card.structure import RUN_ID_BYTES
from xkv_gateway.cardurl import SoftCardUrl
from xkv_gateway.daemon.card import engine_limits, owner_of
from xkv_gateway.errors import CardUnavailableError
from xkv_gateway.networks import StorageNetworks
from xkv_gateway.target.attach import attach, initiator_options
from xkv_gateway.target.hostkeys import read_host_keys
from xkv_nvmeof.blockdev import DeviceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from xkv_gateway.card.check import Progress
    from xkv_gateway.card.fsck import Report
    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.opening import FormatWish
    from xkv_gateway.card.sight import Sight
    from xkv_gateway.card.superblock import Superblock
    from xkv_gateway.cardurl import CardUrl
    from xkv_gateway.config import Config
    from xkv_gateway.state import HostIdentity
    from xkv_gateway.target.attach import AttachedCard
    from xkv_nvmeof.blockdev import BlockDevice, DeviceIdentity

ADOPTABLE: Final = frozenset({"wrong_namespace", "geometry_changed"})
"""What is wrong with a card that can be adopted: it is on another namespace, or that has shrunk."""
WRITE_TIMEOUT_S: Final = 60.0
"""For the few writes of a format or an adoption; a card that is away meanwhile is waited for so long."""


@dataclass(frozen=True, slots=True)
class Door:
    """How the card is reached, and by whom."""

    url: CardUrl
    config: Config
    identity: HostIdentity
    clock: Callable[[], int]
    wall_clock: Callable[[], int]
    entropy: Callable[[int], bytes]
    say: Callable[[str], None]
    """Tells people why it takes so long."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at a card tells."""

    sight: Sight
    identity: DeviceIdentity
    lives: bool
    """Whether a gateway has the card now."""
    objects: int
    """In the newest checkpoint."""


@contextlib.asynccontextmanager
async def _card_at(
    door: Door, *, read_only: bool
) -> AsyncIterator[tuple[AttachedCard, BlockDevice, CardBlocks]]:
    """Attach the card for the time of the block, and turn what goes wrong there into what a person reads."""
    keys = read_host_keys(door.config.fabric, credentials=None)
    options = initiator_options(door.config.nvme, door.identity, keys)
    storage = StorageNetworks(door.config.fabric.networks)
    attached = await attach(
        door.url, options, storage, clock=door.clock, entropy=door.entropy, read_only=read_only
    )
    device: BlockDevice = ReadOnly(attached.device) if read_only else attached.device
    try:
        yield attached, device, CardBlocks(device, door.clock)
    except FormatError as error:
        raise refusal_of(error) from error
    except (DeviceError, CardFailed, CardLost, TimeoutError) as error:
        reason = str(error) or f"the card did not answer within {WRITE_TIMEOUT_S:.0f} s"
        raise CardUnavailableError(f"the card {door.url}: {reason}") from error
    finally:
        await attached.aclose()


async def look_at(door: Door) -> Look:
    """Look at a card, without writing to it.

    Raises:
        CardUnavailableError: it cannot be reached or read, or its file is in use.
    """
    async with _card_at(door, read_only=True) as (attached, device, blocks):
        sight = await look(device, blocks)
        objects = 0
        if sight.superblock is not None and (sight.error is None or sight.error.code == "wrong_namespace"):
            objects = await objects_in_checkpoint(blocks, sight.superblock)
        # A soft card's file is locked by whoever serves it, so nobody does.
        lives = attached.soft_card is None and await owner_lives(blocks, sight)
        return Look(sight, device.identity, lives, objects)


async def check(door: Door, *, payload: bool, progress: Progress) -> tuple[Sight, Report]:
    """Check a card, without writing to it.

    Raises:
        CardUnavailableError: it cannot be reached or read, or a gateway has it.
    """
    async with _card_at(door, read_only=True) as (attached, device, blocks):
        sight = await look(device, blocks)
        if attached.soft_card is None and await owner_lives(blocks, sight):
            assert sight.superblock is not None
            refusal = in_use(sight.superblock)
            raise CardUnavailableError(
                str(refusal), advice="A card that is written to cannot be checked. Stop that gateway first."
            )
        checker = Checker(
            device, blocks, lambda layout: engine_limits(door.config, layout), door.clock, progress
        )
        sight = await checker.run(payload=payload)
        return sight, checker.report


async def format_card(
    door: Door, wish: FormatWish, *, force: bool, takeover: bool, describe: Callable[[Look], str]
) -> Superblock:
    """Format the card; return its superblock.

    Args:
        door: the card.
        wish: how.
        force: give up what is on it.
        takeover: also from an owner that lives; it is told first, and stops.
        describe: says what is on a card, for the refusal.

    Raises:
        CardUnavailableError: it cannot be reached, a living gateway has it, or it is not blank and `force` is not given.
    """
    async with _card_at(door, read_only=False) as (attached, device, blocks):
        geometry = device.geometry
        # What cannot be done is said before anything is given up.
        layout = plan(geometry.size_bytes, geometry.block_bytes, wish.au_bytes, wish.max_objects)
        sight = await look(device, blocks)
        soft = attached.soft_card is not None
        await _require_free(
            door,
            blocks,
            sight,
            soft=soft,
            force=force,
            takeover=takeover,
            describe=describe,
            identity=device.identity,
        )
        async with _reserved(door, device, insist=takeover) as run:
            if not soft:
                await _settle(door, attached, blocks, sight, run)
            ours = _superblock_to_follow(sight)
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                return await ownership.format_card(
                    blocks,
                    layout,
                    ownership.facts_of(device),
                    label=wish.label,
                    # Beyond those that `_settle` wrote.
                    sequence=1 if ours is None else 2 + ours.sequence,
                    wall_ns=door.wall_clock(),
                    entropy=door.entropy,
                    first_copy=None if ours is None else _first_copy(sight),
                )


@dataclass(frozen=True, slots=True)
class _Run:
    """This command, as an owner of the card."""

    run_id: bytes
    reservation_key: int


@contextlib.asynccontextmanager
async def _reserved(door: Door, device: BlockDevice, *, insist: bool) -> AsyncIterator[_Run]:
    """Have the card reserved for the time of the block, where its controller has reservations."""
    run_id = door.entropy(RUN_ID_BYTES)
    reservation, _ = await reserve(device.reservations, run_id, insist=insist)
    if reservation is None:
        yield _Run(run_id, 0)
        return
    try:
        yield _Run(run_id, reservation.key)
    finally:
        await reservation.give_up()


def _superblock_to_follow(sight: Sight) -> Superblock | None:
    """Return the superblock of the card that is there, if both of its copies can be written."""
    shrunk = sight.error is not None and sight.error.code == "geometry_changed"
    return None if shrunk else sight.superblock


async def _require_free(
    door: Door,
    blocks: CardBlocks,
    sight: Sight,
    *,
    soft: bool,
    force: bool,
    takeover: bool,
    describe: Callable[[Look], str],
    identity: DeviceIdentity,
) -> None:
    if sight.kind is Kind.BLANK:
        return
    lives = not soft and await owner_lives(blocks, sight)
    if lives and not (force and takeover):
        assert sight.superblock is not None
        raise CardUnavailableError(
            str(in_use(sight.superblock)),
            advice="Stop that one first. To take the card from it, and give up what is on it: --force --takeover.",
        )
    if not force:
        objects = 0 if sight.superblock is None else await objects_in_checkpoint(blocks, sight.superblock)
        raise CardUnavailableError(
            f"the card {door.url} is not blank: {describe(Look(sight, identity, lives, objects))}",
            advice="If that can be given up: --force.",
        )
    if not soft and sight.kind in {Kind.DAMAGED, Kind.UNKNOWN} and await anybody_beats(blocks):
        raise CardUnavailableError(
            "a gateway of another version has the card and lives", advice="Stop that one first."
        )


async def _settle(door: Door, attached: AttachedCard, blocks: CardBlocks, sight: Sight, run: _Run) -> None:
    """Wait until nobody can write to the card any more but us; an owner that lives is told, and stops."""
    if sight.kind in {Kind.BLANK, Kind.STRANGER}:
        return
    before = _superblock_to_follow(sight)
    if before is not None:
        # Also where nobody is to be told: who opens the card should this command die waits for its last writes.
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await ownership.write_both(
                blocks, await _owned(door, attached, blocks, before, run), first_copy=_first_copy(sight)
            )
    handed_out_ms = _handed_out_ms(sight.superblock)
    if sight.clean and not handed_out_ms:
        return
    keep_alive_ms = door.config.nvme.keep_alive_ms if before is None else before.keep_alive_ms
    # An owner that lives ends by itself, and its last command with it.
    await _wait(door, max(keep_alive_ms, door.config.nvme.command_timeout_ms, handed_out_ms))


def _handed_out_ms(seen: Superblock | None) -> int:
    """Return for how long clients of a run before may write to what it handed out, also when it has ended in order."""
    return 0 if seen is None else ownership.held_until_ns(seen, 0) // ownership.NS_PER_MS


async def _wait(door: Door, keep_alive_ms: int) -> None:
    delay_s = (keep_alive_ms * ownership.NS_PER_MS + ownership.SETTLE_MARGIN_NS) / 1e9
    door.say(f"waiting {delay_s:.0f} s, until the run before certainly cannot write any more")
    await asyncio.sleep(delay_s)


def _first_copy(sight: Sight) -> int:
    assert sight.chosen is not None
    return ownership.repair_first(sight.chosen)


async def _owned(
    door: Door, attached: AttachedCard, blocks: CardBlocks, before: Superblock, run: _Run
) -> Superblock:
    """Return the superblock with which this command is the owner."""
    keep_alive_ms = attached.keep_alive_ms(door.config.nvme.keep_alive_ms)
    beat_epoch = await ownership.heartbeat_epoch(blocks, before.stamp.card_uuid)
    return ownership.owned(
        before,
        owner_of(door.identity, keep_alive_ms, door.config.control.limits.lease_ms),
        epoch=1 + max(before.stamp.epoch, beat_epoch),
        run_id=run.run_id,
        wall_ns=door.wall_clock(),
        reservation_key=run.reservation_key,
    )


def adoptable(door: Door, seen: Look) -> bool:
    """Tell whether there is something to adopt: False where it is this host's card already.

    Raises:
        CardUnavailableError: it is no card of ours, cannot be used, or a gateway has it.
    """
    sight, superblock = seen.sight, seen.sight.superblock
    if superblock is None:
        raise CardUnavailableError(
            f"there is nothing to adopt: {_nothing(sight)}", advice="See `xkv-gateway card info`."
        )
    if sight.error is not None and sight.error.code not in ADOPTABLE:
        raise refusal_of(sight.error)
    _layout_of(sight)
    if seen.lives:
        raise CardUnavailableError(
            str(in_use(superblock)),
            advice="Stop that one first, or take the card from it: `xkv-gateway serve --takeover`.",
        )
    ours = superblock.owner_host_nqn in {"", door.identity.host_nqn} or isinstance(door.url, SoftCardUrl)
    return sight.error is not None or not ours


def _nothing(sight: Sight) -> str:
    if sight.kind is Kind.BLANK:
        return "the card is blank"
    return ", ".join(sight.marks) if sight.marks else str(sight.error)


def _layout_of(sight: Sight) -> Layout:
    """Return the layout of the card on its present namespace: where that has shrunk, what is left of it.

    Raises:
        CardUnavailableError: too little is left, or it has other blocks.
    """
    assert sight.superblock is not None
    layout, facts = sight.superblock.layout, sight.facts
    if facts.block_bytes != layout.block_bytes and sight.error is not None:
        raise refusal_of(sight.error)
    try:
        return layout if facts.size_bytes >= layout.size_bytes else shrunk(layout, facts.size_bytes)
    except FormatError as error:
        raise refusal_of(error) from error


async def adopt(door: Door, seen: Superblock) -> Superblock:
    """Make the card belong to its present namespace, and to this host; return its superblock.

    Args:
        door: the card.
        seen: the superblock that the operator has agreed to.

    Raises:
        CardUnavailableError: it cannot be reached, or has changed since.
    """
    async with _card_at(door, read_only=False) as (attached, device, blocks):
        sight = await look(device, blocks)
        if sight.superblock != seen:
            raise CardUnavailableError("the card has changed since it was looked at: look again")
        if attached.soft_card is None:
            if not sight.clean and await owner_lives(blocks, sight):
                raise in_use(seen)
            # What reaches beyond the end of a card that has shrunk is dropped, and with it what a client may still write to.
            handed_out_ms = _handed_out_ms(seen) if _layout_of(sight) != seen.layout else 0
            if handed_out_ms or not sight.clean:
                await _wait(door, max(handed_out_ms, 0 if sight.clean else seen.keep_alive_ms))
        facts = ownership.facts_of(device)
        async with _reserved(door, device, insist=False) as run:
            ours = replace(
                await _owned(door, attached, blocks, seen, run),
                nguid=facts.nguid,
                namespace_uuid=facts.uuid,
                layout=_layout_of(sight),
                # Nothing was written but this: what was complete is complete.
                clean=sight.clean,
            )
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await ownership.write_both(blocks, ours, first_copy=_first_copy(sight))
            return ours
