"""Reservations of the card, where its controller has them (FORMAT.md, "Reservation"): the target itself keeps everybody else out.

    take      register a key of this run; pre-empt (and abort) all others; reserve    before the journal is read
    hold      still registered, and still the holder? Behind each new connection, and each second
    give_up   release, unregister                                                       at the end

A registration belongs to a host, by its host identifier, and outlives its associations. Two runs of one host share one: the key
tells them apart, but what the target keeps out is other hosts only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

from xkv_gateway.card.fence import CardLost
from xkv_gateway.errors import CardUnavailableError
from xkv_nvmeof.blockdev import CommandFailed, DeviceError, ReservationConflict, ReservationType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xkv_nvmeof.blockdev import Registrant, Reservations, ReservationStatus

log = logging.getLogger(__name__)

KEY_MARK: Final = 0x786B76 << 40
"""`xkv` in the upper three bytes of a key: whoever sees it knows that a gateway is, or was, the registrant."""
_KEY_MARK_MASK: Final = 0xFFFFFF << 40
KEY_RUN_BYTES: Final = 5
TYPE: Final = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS_ONLY
ROUNDS_MAX: Final = 8
"""Each one ends the registration of a host, and targets have room for few."""
GIVE_UP_TIMEOUT_S: Final = 0.5
"""A card that is away may keep a dead run's reservation: the next run pre-empts it."""


def key_of(run_id: bytes) -> int:
    """Return the key of a run."""
    return KEY_MARK | int.from_bytes(run_id[:KEY_RUN_BYTES], "little")


def is_ours(key: int) -> bool:
    """Tell whether a gateway registered that key."""
    return key & _KEY_MARK_MASK == KEY_MARK


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of the others when the card was reserved."""

    ended: frozenset[int] = frozenset()
    """Keys of other hosts of whose commands none can be executed any more."""


class Reservation:
    """The registration of one run, and its reservation.

    Args:
        reservations: of the card's namespace.
        key: see `key_of`.
    """

    def __init__(self, reservations: Reservations, key: int) -> None:
        self._reservations = reservations
        self.key = key
        self.held = False
        """Whether this run had the card reserved when it last looked."""

    # --- taking -----------------------------------------------------------------------------------------------

    async def take(self, *, insist: bool) -> Taken:
        """Register and reserve, whatever other gateways are registered; the caller made sure that none of them lives, or insists.

        Args:
            insist: also from others than gateways.

        Raises:
            CardUnavailableError: somebody else than a gateway has it reserved or is registered; or the target does not do as it says.
            CardLost: another gateway took it at the same time.
            DeviceError.
        """
        before = await self._reservations.report()
        strangers = [each for each in self._others(before) if not is_ours(each.key)]
        if strangers and not insist:
            raise _reserved(strangers[0])
        try:
            return await self._take(before)
        except ReservationConflict as error:
            raise CardLost("another gateway reserved the card at the same time") from error

    async def _take(self, before: ReservationStatus) -> Taken:
        mine = before.of_host(self._reservations.host_id)
        if mine is None or mine.key != self.key:
            await self._reservations.register(self.key, before=None if mine is None else mine.key)
        ended: set[int] = set()
        for _ in range(ROUNDS_MAX):
            now = await self._reservations.report()
            mine = now.of_host(self._reservations.host_id)
            if mine is None or mine.key != self.key:
                raise CardLost("another gateway reserved the card at the same time")
            others = list(self._others(now))
            if not others and mine.holds and now.kind is TYPE:
                self.held = True
                return Taken(frozenset(ended))
            if others:
                # The holder first: with it the reservation changes hands, and is never free in between.
                victim = max(others, key=lambda each: each.holds)
                if await self._end(victim):
                    ended.add(victim.key)
            elif now.kind is None:
                await self._reservations.acquire(self.key)
            else:
                # Reserved by this host, in another way.
                await self._reservations.preempt(self.key, self.key, abort=False)
        raise CardUnavailableError(
            "the card cannot be reserved: its target does not do what a reservation asks of it",
            advice="See who is registered: `nvme resv-report`.",
        )

    async def _end(self, victim: Registrant) -> bool:
        """End a registration; tell whether nothing of that host can be executed any more."""
        log.info("ending the registration of host %s", UUID(bytes=victim.host_id))
        try:
            await self._reservations.preempt(self.key, victim.key, abort=True)
        except ReservationConflict:
            raise
        except CommandFailed as error:
            log.info("the target does not abort what it pre-empts: %s", error)
            await self._reservations.preempt(self.key, victim.key, abort=False)
            return False
        return True

    def _others(self, status: ReservationStatus) -> Iterator[Registrant]:
        return (each for each in status.registrants if each.host_id != self._reservations.host_id)

    # --- holding ----------------------------------------------------------------------------------------------

    async def hold(self) -> None:
        """Make sure that this run has the card reserved: a target that was restarted has forgotten it.

        Raises:
            CardLost: somebody else has, or a run of this very host took its place.
            DeviceError.
        """
        try:
            await self._hold()
        except ReservationConflict as error:
            raise CardLost("another gateway reserved the card") from error

    async def _hold(self) -> None:
        now = await self._reservations.report()
        mine, holder = now.of_host(self._reservations.host_id), now.holder
        if mine is not None and mine.key != self.key:
            raise CardLost("another gateway with the identity of this host reserved the card")
        if mine is not None and mine.holds:
            self.held = True
            return
        self.held = False
        if holder is not None or now.kind is not None:
            who = "unknown" if holder is None else str(UUID(bytes=holder.host_id))
            raise CardLost(f"another gateway reserved the card (host {who})")
        log.info("the card has forgotten who reserved it: reserving it again")
        if mine is None:
            await self._reservations.register(self.key)
        await self._reservations.acquire(self.key)
        self.held = True

    async def give_up(self) -> None:
        """Release and unregister, as far as that is possible. Never takes long, never raises."""
        self.held = False
        with contextlib.suppress(DeviceError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_TIMEOUT_S):
                await self._reservations.release(self.key)
                await self._reservations.unregister(self.key)


def _reserved(stranger: Registrant) -> CardUnavailableError:
    what = "has the card reserved" if stranger.holds else "is registered with the card for reservations"
    return CardUnavailableError(
        f"host {UUID(bytes=stranger.host_id)} {what}, and is no gateway",
        advice="Let it give that up, or take the card from it with --takeover.",
    )


async def reserve(
    reservations: Reservations | None, run_id: bytes, *, insist: bool
) -> tuple[Reservation | None, Taken]:
    """Reserve the card for a run, where its controller has reservations. Raises as `Reservation.take`."""
    if reservations is None:
        return None, Taken()
    reservation = Reservation(reservations, key_of(run_id))
    return reservation, await reservation.take(insist=insist)
