"""The product with one rule of the card switched off at a time. A mutation replaces names in modules while it is looked for."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from tests.crash.cutoff import (
    any_lost_write_before_a_clean_stop,
    any_owner_that_comes_back,
    any_owner_that_comes_back_late,
    loser_acknowledges_nothing,
)
from tests.crash.explore import cut_by_death, cut_by_outage, cut_by_power
from tests.crash.hosts import Hosts
from tests.crash.scenarios import SCENARIOS
from tests.sim.mutations import FORGETS_OUTAGES, FreesBeforeTombstone
from tests.sim.warm import play_warm
from xkv_gateway.card import ownership
from xkv_gateway.card import superblock as superblock_format
from xkv_gateway.card.blocks import Draft
from xkv_gateway.card.checkpointer import Checkpointer
from xkv_gateway.card.format_errors import NoRoom
from xkv_gateway.card.journal_format import encode_batch
from xkv_gateway.card.record_codec import encode_batches
from xkv_gateway.card.reservation import Reservation, Taken
from xkv_gateway.card.session import CardSession
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_gateway.card.writer import JournalWriter
from xkv_gateway.core.types import Lsn
from xkv_nvmeof.blockdev import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.superblock import Superblock
    from xkv_gateway.core.records import Record


async def _writes_one_copy(blocks: CardBlocks, superblock: Superblock, *, first_copy: int) -> None:
    offset_bytes = superblock.layout.superblock_offsets[0]
    await blocks.write(offset_bytes, [superblock_format.encode(superblock, 0)], flush=True)


async def _writes_both_at_once(blocks: CardBlocks, superblock: Superblock, *, first_copy: int) -> None:
    for copy, offset_bytes in enumerate(superblock.layout.superblock_offsets):
        await blocks.write(offset_bytes, [superblock_format.encode(superblock, copy)], flush=False)
    await blocks.flush()
    for offset_bytes in superblock.layout.superblock_offsets:
        await blocks.read_surely(offset_bytes, BLOCK_BYTES)


_owned = ownership.owned


def _owned_and_clean(*args: Any, **options: Any) -> Superblock:
    return replace(_owned(*args, **options), clean=True)


def _owned_in_the_same_epoch(before: Superblock, owner: Any, *, epoch: int, **options: Any) -> Superblock:
    return _owned(before, owner, epoch=before.stamp.epoch, **options)


class _RecordsBeforeData(JournalWriter):
    def cover(self, done: Callable[[], None]) -> None:
        done()


class _CoversWhatCameDuringTheFlush(JournalWriter):
    """Payloads that were written while a flush was on its way count as covered by it."""

    async def _tell_covered(self) -> None:
        self._take_covers()
        await super()._tell_covered()


class _NoFencingRead(JournalWriter):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)

        async def verify() -> None:
            pass

        self._verify = verify


class _OtherBytesAtTheSamePlace(JournalWriter):
    """What was submitted meanwhile joins a batch whose outcome is unknown."""

    async def _commit(self, records: Sequence[Record]) -> None:
        gathered = list(records)
        while True:
            bodies = list(encode_batches(gathered, self._ring.body_bytes_max))
            if len(bodies) != 1:
                break
            try:
                placed = encode_batch(self._ring, self._written, self._stamp, self._needed_from, bodies[0])
            except NoRoom:
                break
            buffers = [memoryview(each) for each in placed.buffers if each]
            device = self._blocks._device
            try:
                await device.write_from(self._region.offset_bytes + placed.offset_bytes, buffers)
                await device.flush()
            except DeviceError:
                await asyncio.sleep(0.05)
                await self._blocks.online()
                gathered += self._pending
                self._pending = []
                continue
            self._written = placed.after
            await self._verify()
            if len(gathered) > len(records):
                self.acknowledged = self._written
                assert self._durable is not None
                assert self._pending_lsn is not None
                self._durable(Lsn(gathered[-1].lsn))
            return
        await super()._commit(gathered)


class _NoRunStart(JournalWriter):
    async def start_run(self) -> None:
        self._written = replace(self._written, epoch=self._stamp.epoch, run_id=self._stamp.run_id)
        self.acknowledged = self._written


class _ReachedAtOnce(JournalWriter):
    async def reached(self, lsn: int) -> None:
        pass


class _NoFlush:
    def __init__(self, blocks: CardBlocks) -> None:
        self._blocks = blocks

    async def write(self, *args: Any, **options: Any) -> None:
        await self._blocks.write(*args, **options)

    async def flush(self) -> None:
        pass


class _FlushesWhateverIsLeft(Draft):
    """What was written before an outage counts as covered by the flush that came after it."""

    async def flush(self) -> None:
        await self._blocks.flush()
        self._kept.clear()


class _ClosesBeforeItsChunks(Checkpointer):
    def __init__(self, blocks: CardBlocks, *args: Any, **options: Any) -> None:
        super().__init__(_NoFlush(blocks), *args, **options)  # type: ignore[arg-type] # has what a checkpoint asks for


class _NoSettling(CardSession):
    async def _settle(self, store: Any) -> None:
        pass


class _CleanWhileWritesAreLost(CardSession):
    async def stop(self) -> bool:
        self._options = replace(self._options, exclusive=True)
        return await super().stop()


class _EndsWithoutAborting(Reservation):
    """Others' registrations are ended, and what they have on its way is forgotten about."""

    async def _end(self, victim: Any) -> bool:
        await self._reservations.preempt(self.key, victim.key, abort=False)
        return True


class _LeavesOthersRegistered(Reservation):
    async def take(self, *, insist: bool) -> Taken:
        await self._reservations.register(self.key)
        self.held = True
        return Taken(frozenset(each.key for each in (await self._reservations.report()).registrants))


class _ReservesWhateverItFinds(Reservation):
    """Who finds that its reservation is gone takes the card back."""

    async def _hold(self) -> None:
        await self._take(await self._reservations.report())


def _by_name(name: str, *, reservations: bool = False) -> Any:
    found = next(scenario for scenario in SCENARIOS if scenario.name == name)
    return replace(found, reservations=reservations)


def by_power(name: str) -> None:
    """Look for it by cutting an operation by power."""
    cut_by_power(_by_name(name), 16)


def by_outage(name: str) -> None:
    """Look for it by an outage of the card in an operation."""
    cut_by_outage(_by_name(name))


def by_death(name: str, *, reservations: bool = False) -> None:
    """Look for it by letting the process die in an operation."""
    cut_by_death(_by_name(name, reservations=reservations))


def by_changing_hands(*seeds: int, reservations: bool = True) -> None:
    """Look for it by letting the card change hands."""
    for seed in seeds:
        Hosts(_by_name("store", reservations=reservations).base(), seed).play()


def by_seeds(*seeds: int, reopens_at_once: bool = False) -> None:
    """Look for it by playing seeds."""
    for seed in seeds:
        play_warm(seed, 200, reopens_at_once=reopens_at_once)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule switched off, and what finds that."""

    name: str
    replaces: tuple[tuple[str, object], ...]
    look: Callable[[], None]
    quick: bool = True
    """Whether it is found within a second or two."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for target, value in self.replaces:
                stack.enter_context(mock.patch(target, value, create=True))
            yield


def _of_ownership(name: str, value: object) -> tuple[tuple[str, object], ...]:
    return ((f"xkv_gateway.card.ownership.{name}", value),)


def _of_reservation(value: object) -> tuple[tuple[str, object], ...]:
    return (("xkv_gateway.card.reservation.Reservation", value),)


def _of_session(name: str, value: object) -> tuple[tuple[str, object], ...]:
    return ((f"xkv_gateway.card.session.{name}", value),)


MUTATIONS: Final = (
    Mutation(
        "a single superblock", _of_ownership("write_both", _writes_one_copy), partial(by_power, "whole life")
    ),
    Mutation(
        "both superblocks at once",
        _of_ownership("write_both", _writes_both_at_once),
        partial(by_power, "whole life"),
    ),
    Mutation(
        "units reused before their tombstone is durable",
        _of_session("Engine", FreesBeforeTombstone),
        partial(by_power, "reuse"),
    ),
    Mutation(
        "records before data", _of_session("JournalWriter", _RecordsBeforeData), partial(by_power, "store")
    ),
    Mutation(
        "records before data that came during a flush",
        _of_session("JournalWriter", _CoversWhatCameDuringTheFlush),
        partial(by_power, "store in turns"),
    ),
    Mutation("acknowledges payloads that an outage took", FORGETS_OUTAGES, partial(by_outage, "store")),
    Mutation(
        "closes a checkpoint whose chunks an outage took",
        (("xkv_gateway.card.blocks.Draft", _FlushesWhateverIsLeft),),
        partial(by_outage, "checkpoint under load"),
    ),
    Mutation(
        "closes a ledger whose chunks an outage took",
        (("xkv_gateway.card.blocks.Draft", _FlushesWhateverIsLeft),),
        partial(by_outage, "limit"),
    ),
    Mutation("no run start", _of_session("JournalWriter", _NoRunStart), partial(by_power, "store")),
    Mutation(
        "a checkpoint valid before its end is durable",
        # Records that gather are through so soon that a small checkpoint never comes before them.
        (*_of_session("JournalWriter", _ReachedAtOnce), ("xkv_gateway.card.writer.TURNS_TO_GATHER", 0)),
        partial(by_power, "checkpoint under load"),
    ),
    Mutation(
        "a checkpoint closed before its chunks",
        _of_session("Checkpointer", _ClosesBeforeItsChunks),
        partial(by_power, "checkpoint"),
    ),
    Mutation(
        "the epoch is not raised",
        _of_ownership("owned", _owned_in_the_same_epoch),
        partial(by_power, "first open"),
    ),
    Mutation(
        "no waiting for what may land late",
        (("xkv_gateway.card.opening.CardSession", _NoSettling),),
        partial(by_death, "store"),
    ),
    Mutation(
        "clean from the beginning", _of_ownership("owned", _owned_and_clean), partial(by_death, "store")
    ),
    Mutation(
        "acknowledged without looking at the superblock",
        _of_session("JournalWriter", _NoFencingRead),
        loser_acknowledges_nothing,
    ),
    Mutation(
        "writes behind a new connection without looking",
        (("xkv_gateway.card.blocks.CardBlocks.guard", lambda *_: None),),
        any_owner_that_comes_back_late,
    ),
    Mutation(
        "no second wait for an owner that comes back",
        _of_session("CHECK_AGE_MAX_NS", 0),
        any_owner_that_comes_back,
    ),
    Mutation(
        "clean while lost writes may land",
        (("xkv_gateway.card.opening.CardSession", _CleanWhileWritesAreLost),),
        any_lost_write_before_a_clean_stop,
    ),
    Mutation(
        "ends registrations without aborting",
        _of_reservation(_EndsWithoutAborting),
        partial(by_death, "store", reservations=True),
    ),
    Mutation(
        "leaves others registered",
        _of_reservation(_LeavesOthersRegistered),
        partial(by_death, "store", reservations=True),
    ),
    Mutation(
        "takes back what was taken",
        _of_reservation(_ReservesWhateverItFinds),
        partial(by_changing_hands, 7, *range(4)),
    ),
    Mutation(
        "a new checkpoint where a write of an old one may still land",
        (
            (
                "xkv_gateway.card.echoes.Echoes.settled_at_ns",
                lambda _echoes, _offset, _buffers, now_ns: now_ns,
            ),
        ),
        partial(by_changing_hands, 25, 26, reservations=False),
    ),
    Mutation(
        "the journal goes on over a batch of unknown outcome",
        _of_session("JournalWriter", _OtherBytesAtTheSamePlace),
        partial(by_seeds, *range(40)),
        quick=False,
    ),
)
