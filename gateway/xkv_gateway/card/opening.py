"""Opening a card: whose it is, whether it may be opened, and what it holds (FORMAT.md, "Open" up to O3, "Takeover").

Nothing is written here, but by a format of a blank card that was asked for, and by a takeover.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from xkv_gateway.card import ownership
from xkv_gateway.card.blocks import CardFailed
from xkv_gateway.card.fence import CHECK_AGE_MAX_NS, CardLost
from xkv_gateway.card.format_errors import FormatError
from xkv_gateway.card.layout import plan
from xkv_gateway.card.recovery import Recoverer, made_of
from xkv_gateway.card.reservation import reserve
from xkv_gateway.card.session import CardSession
from xkv_gateway.card.structure import RUN_ID_BYTES
from xkv_gateway.card.superblock import Chosen, Stranger, match
from xkv_gateway.errors import CardUnavailableError
from xkv_nvmeof.blockdev import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.ownership import Owner
    from xkv_gateway.card.reservation import Reservation
    from xkv_gateway.card.superblock import Superblock
    from xkv_gateway.core.types import EngineLimits
    from xkv_nvmeof.blockdev import BlockDevice

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FormatWish:
    """How a blank card is to be formatted."""

    au_bytes: int
    max_objects: int | None
    """None: one for each unit, up to a bound."""
    label: str = ""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """Who opens the card, and how."""

    owner: Owner
    limits_of: Callable[[Layout], EngineLimits]
    """The engine's limits on a card of this layout."""
    clock: Callable[[], int]
    """Monotonic ns."""
    wall_clock: Callable[[], int]
    """Ns since 1970, for people."""
    entropy: Callable[[int], bytes]
    command_timeout_ms: int = 0
    """Deadline of a command of an owner that lives (assumed to be configured as this one): until then it may be executed."""
    flush: bool = True
    """Whether what is acknowledged must survive a loss of power (durability "power")."""
    exclusive: bool = False
    """Nobody else can have the card: it is our own soft card, and the process of the run before has ended."""
    takeover: bool = False
    """Take the card from an owner that lives."""
    format_blank: FormatWish | None = None
    """Format the card if it is blank; otherwise a blank card is refused."""


async def open_card(device: BlockDevice, blocks: CardBlocks, options: OpenOptions) -> CardSession:
    """Open the card for one run: afterwards lookups and loads can be served.

    Raises:
        CardUnavailableError: it may not, or cannot, be opened; the message says whose it is or what is wrong with it.
    """
    try:
        return await _open(device, blocks, options)
    except FormatError as error:
        raise refusal_of(error) from error
    except DeviceError as error:
        raise CardUnavailableError(f"the card cannot be read: {error}") from error
    except (CardLost, CardFailed) as error:
        raise CardUnavailableError(f"the card cannot be opened: {error}") from error


async def _open(device: BlockDevice, blocks: CardBlocks, options: OpenOptions) -> CardSession:
    chosen = await _superblock(device, blocks, options)
    before = chosen.superblock
    _note_match(device, before)
    began_ns = options.clock()
    settled = options.exclusive or (before.clean and not chosen.contested)
    if not settled and not options.takeover:
        if await ownership.owner_beats(blocks, before.stamp.card_uuid):
            raise in_use(before)
        log.info("the run before (%s) did not end in order", before.owner or "unknown")
    run_id = options.entropy(RUN_ID_BYTES)
    reservation, taken = await reserve(device.reservations, run_id, insist=options.takeover)
    # Of a run whose registration was ended, and its commands with it, nothing can land any more.
    fenced = before.reservation_key in taken.ended
    opening = _Opening(device, blocks, options, run_id, reservation)
    try:
        if settled:
            return await opening.recover(chosen, settled_at_ns=began_ns)
        if options.takeover:
            return await opening.take_over(chosen, fenced=fenced)
        if fenced:
            return await opening.recover(chosen, settled_at_ns=began_ns)
        # The connection of the run before, if it had one, ended before this one began, or its beats would have been seen.
        settled_at_ns = began_ns + before.keep_alive_ms * ownership.NS_PER_MS + ownership.SETTLE_MARGIN_NS
        return await opening.recover(chosen, settled_at_ns=settled_at_ns, owner_may_live=True)
    except BaseException:
        if reservation is not None:
            await reservation.give_up()
        raise


@dataclass(frozen=True, slots=True)
class _Opening:
    """A card that has been reserved for a run, where that is possible."""

    device: BlockDevice
    blocks: CardBlocks
    options: OpenOptions
    run_id: bytes
    reservation: Reservation | None

    async def take_over(self, chosen: Chosen, *, fenced: bool) -> CardSession:
        """Tell the old owner first, through the superblock; then wait until its last writes are over, and only then read.

        Args:
            chosen: its superblock.
            fenced: nothing of it can be written any more. It may still answer from what it has in memory, until it looks.
        """
        before, options, blocks = chosen.superblock, self.options, self.blocks
        log.warning(
            "taking the card from %s (process %d)", before.owner or "an unknown owner", before.owner_pid
        )
        beat_epoch = await ownership.heartbeat_epoch(blocks, before.stamp.card_uuid)
        ours = ownership.owned(
            before,
            options.owner,
            # The journal is read later: epochs in it are at most that of the newest superblock or heartbeat.
            epoch=1 + max(before.stamp.epoch, beat_epoch),
            run_id=self.run_id,
            wall_ns=options.wall_clock(),
            reservation_key=0 if self.reservation is None else self.reservation.key,
        )
        await ownership.write_both(blocks, ours, first_copy=1 - chosen.copy)
        longest_ms = max(before.keep_alive_ms, options.command_timeout_ms)
        settle_ns = longest_ms * ownership.NS_PER_MS + ownership.SETTLE_MARGIN_NS
        if fenced:
            settle_ns = CHECK_AGE_MAX_NS
        log.info("waiting %.1f s until its last writes are over", settle_ns / 1e9)
        await asyncio.sleep(settle_ns / 1e9)
        found = await ownership.read_superblocks(blocks, before.layout.size_bytes)
        if not isinstance(found, Chosen) or found.superblock.stamp not in {ours.stamp, before.stamp}:
            raise CardLost("another gateway took it meanwhile")
        # A late write of the old run may have landed on a copy.
        await ownership.write_both(blocks, ours, first_copy=0)
        chosen = replace(chosen, superblock=ours, copy=0)
        return await self.recover(chosen, settled_at_ns=options.clock(), taken=True)

    async def recover(
        self, chosen: Chosen, *, settled_at_ns: int, taken: bool = False, owner_may_live: bool = False
    ) -> CardSession:
        """Read what is on the card."""
        superblock, options, blocks = chosen.superblock, self.options, self.blocks
        limits = options.limits_of(superblock.layout)
        # After a clean stop nothing can lie behind the end of the journal.
        search = not superblock.clean or chosen.contested or taken
        recovery = await Recoverer(blocks, superblock, limits, options.clock).run(search=search)
        beat_epoch = await ownership.heartbeat_epoch(blocks, superblock.stamp.card_uuid)
        recovery.epoch_max = max(recovery.epoch_max, beat_epoch)
        make = partial(
            CardSession,
            self.device,
            blocks,
            superblock,
            1 - chosen.copy,
            recovery,
            options,
            settled_at_ns=settled_at_ns,
            run_id=self.run_id,
            reservation=self.reservation,
            taken=taken,
            owner_may_live=owner_may_live,
        )
        session = await made_of(recovery, make)
        await session.look()
        return session


async def _superblock(device: BlockDevice, blocks: CardBlocks, options: OpenOptions) -> Chosen:
    size_bytes = device.geometry.size_bytes
    found = await ownership.read_superblocks(blocks, size_bytes)
    if isinstance(found, Chosen):
        return found
    if isinstance(found, Stranger):
        raise CardUnavailableError(
            "the card bears somebody else's data, so it is left alone",
            advice="Check the address and the NQN. If the data is of no use: `xkv-gateway card format URL --force`.",
        )
    if options.format_blank is None:
        raise CardUnavailableError(
            "the card is blank: it was never formatted, or it was zeroed",
            advice="Format it with `xkv-gateway card format URL`.",
        )
    superblock = await format_blank(device, blocks, options.format_blank, options)
    log.info("formatted a blank card: %d units", superblock.layout.capacity_au)
    return Chosen(superblock, 0, {}, contested=False)


async def format_blank(
    device: BlockDevice, blocks: CardBlocks, wish: FormatWish, options: OpenOptions
) -> Superblock:
    """Format a card that bears nothing.

    Raises:
        CardUnavailableError: there is something on it.
        FormatError: it is too small, or the wish does not fit it.
    """
    geometry = device.geometry
    if not await ownership.looks_blank(blocks, geometry.size_bytes):
        raise CardUnavailableError(
            "there is data on the card: somebody else uses it, so it is left alone",
            advice="If the data is of no use: `xkv-gateway card format URL --force`.",
        )
    layout = plan(geometry.size_bytes, geometry.block_bytes, wish.au_bytes, wish.max_objects)
    return await ownership.format_card(
        blocks,
        layout,
        ownership.facts_of(device),
        label=wish.label,
        sequence=1,
        wall_ns=options.wall_clock(),
        entropy=options.entropy,
    )


def _note_match(device: BlockDevice, superblock: Superblock) -> None:
    facts = match(superblock, ownership.facts_of(device))
    if not facts.identified:
        log.warning("the namespace has neither NGUID nor UUID: a copy of this card could not be told from it")
    if facts.grown_bytes:
        log.warning(
            "the card has grown by %d bytes; they are used after it is formatted anew", facts.grown_bytes
        )


def in_use(superblock: Superblock) -> CardUnavailableError:
    """Return the refusal of a card whose owner lives."""
    return CardUnavailableError(
        f"another gateway has the card and lives: {superblock.owner or 'unknown'}, process {superblock.owner_pid}",
        advice="Stop that one first, or take the card from it with --takeover.",
    )


_ADVICE = {
    "no_superblock": "Both superblocks are damaged. If the cache can be given up: `xkv-gateway card format URL --force`.",
    "unknown_version": "Use the version of xkv-gateway that formatted it, or a newer one.",
    "unknown_feature": "Use the version of xkv-gateway that formatted it, or a newer one.",
    "copies_disagree": "Two cards' superblocks are on it. If the cache can be given up: `xkv-gateway card format URL"
    " --force`.",
    "wrong_namespace": "It is a copy, or another card answers under this name. To use it as it is: `xkv-gateway card"
    " adopt URL`.",
    "geometry_changed": "Restore its size. Where it has become smaller, what is left can be used: `xkv-gateway card adopt URL`."
    " Or format it anew: `xkv-gateway card format URL --force`.",
    "card_too_small": "Use a larger card, a smaller card.au or a smaller card.max_objects.",
}


def refusal_of(error: FormatError) -> CardUnavailableError:
    """Return what a person reads of a fault of the card."""
    return CardUnavailableError(
        f"the card cannot be used: {error}", advice=_ADVICE.get(error.code, "See gateway/FORMAT.md.")
    )
