"""Operations on a card, each from a card at rest: what is cut, at every command."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from tests.crash import tickets
from tests.crash.bench import AU_BYTES, BLANK, OBJECTS_MAX, CrashBench, prepared
from xkv_gateway.card import ownership
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.layout import plan
from xkv_gateway.card.store import CardOffline
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_gateway.card.superblock import Chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tests.crash.bench import Base, Life

    Work = Callable[[CrashBench], Coroutine[Any, Any, None]]


TURNS: Final = 12
TURN_S: Final = 0.000_15
"""Less than a command takes."""


async def format_only(bench: CrashBench) -> None:
    bench.told.formatting = True
    life = await bench.open()
    bench.told.formatting = False
    await life.kill()


async def first_open(bench: CrashBench) -> None:
    await bench.open_owned()


async def populate(bench: CrashBench, life: Life) -> None:
    """Objects of all kinds: live, deleted, without a byte, in two scopes."""
    await life.save(b"one")
    await life.save(b"two", b"three", b"four", size_bytes=4096)
    await life.save(b"empty", size_bytes=0)
    await life.save(b"other", scope=b"")
    await life.delete(b"three")
    await life.save(b"five", size_bytes=3 * 4096 + 1)


async def populated(bench: CrashBench) -> None:
    """Ended in order, with a checkpoint."""
    life = await bench.open_owned()
    await populate(bench, life)
    assert await life.stop()


async def unclean(bench: CrashBench) -> None:
    """A checkpoint, and records behind it; two doomed rows among them."""
    life = await bench.open_owned()
    await life.save(b"six", b"seven", b"eight")
    await life.delete(b"one", b"seven")
    await life.kill()


async def store_one(bench: CrashBench) -> None:
    life = await bench.open_owned()
    await life.save(b"new", size_bytes=9000)


async def store_several(bench: CrashBench) -> None:
    life = await bench.open_owned()
    await asyncio.gather(
        life.save(b"a", b"b", b"c", size_bytes=4097),
        life.save(b"d"),
        life.save(b"e", size_bytes=0, scope=b"n"),
    )


async def store_in_turns(bench: CrashBench) -> None:
    """Each comes while the records of the one before are on their way, at another moment of that."""
    life = await bench.open_owned()

    async def later(number: int) -> None:
        await asyncio.sleep(number * TURN_S)
        await life.save(b"turn %d" % number, size_bytes=3000)

    await asyncio.gather(*map(later, range(TURNS)))


async def delete(bench: CrashBench) -> None:
    life = await bench.open_owned()
    await life.delete(b"two", b"four")


async def replace(bench: CrashBench) -> None:
    """Delete and store anew, so that units and slots change hands; the full card makes sure of that."""
    life = await bench.open_owned()
    await life.fill()
    await life.delete(b"two", b"five")
    await life.save(b"two", size_bytes=4096)
    await life.save(b"five", size_bytes=3 * 4096)


async def reuse(bench: CrashBench) -> None:
    """Units are wanted while the record that frees them is on its way."""
    life = await bench.open_owned()
    await life.fill()
    deleting = asyncio.create_task(life.delete(b"two", b"five"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    bench.told.evicts = True
    await asyncio.gather(deleting, life.save(b"new", size_bytes=5 * 4096))


async def evict(bench: CrashBench) -> None:
    life = await bench.open_owned()
    await life.fill()
    bench.told.evicts = True
    await life.save(b"new", size_bytes=4 * 4096)


async def wipe(bench: CrashBench) -> None:
    life = await bench.open_owned()
    await life.wipe(b"tenant")
    await life.save(b"after", scope=b"")


async def wipe_all(bench: CrashBench) -> None:
    life = await bench.open_owned()
    await asyncio.gather(life.wipe(), life.save(b"beside", scope=b"n"))


async def limit(bench: CrashBench) -> None:
    """Quotas go to the ledger and to the journal."""
    life = await bench.open_owned()
    await life.operator.set_tenant("a tenant", b"tenant", 1 << 30)
    await life.save(b"within")
    await life.operator.set_limit(b"other", 0)


async def checkpoint(bench: CrashBench) -> None:
    life = await bench.open_owned()
    await life.save(b"before")
    assert life.session.checkpointer is not None
    await life.session.checkpointer.write()
    await life.session.checkpointer.write()


async def fuzzy_checkpoint(bench: CrashBench) -> None:
    """Stores and deletes while it is written."""
    life = await bench.open_owned()

    async def work() -> None:
        await life.delete(b"one", b"five")
        await life.save(b"x", size_bytes=4096)
        await life.save(b"y", b"z", size_bytes=4096)
        await life.delete(b"x")

    async def meanwhile() -> None:
        for number in range(4):
            await life.save(b"meanwhile %d" % number, size_bytes=100)

    async def removed_one_by_one() -> None:
        """At each moment there is a record on its way, and one that waits for it."""
        for name in (b"two", b"four", b"empty"):
            await life.delete(name)

    async def removed_beside() -> None:
        await asyncio.sleep(TURN_S)
        for number in range(4):
            await life.delete(b"meanwhile %d" % number)

    assert life.session.checkpointer is not None
    await asyncio.gather(
        life.session.checkpointer.write(), work(), meanwhile(), removed_one_by_one(), removed_beside()
    )


async def near_the_end_of_the_ring(bench: CrashBench) -> None:
    """So that the next batches go around the end of the ring."""
    life = await bench.open_owned()
    journal = life.session.journal
    assert journal is not None
    number = 0
    while journal.acknowledged.position % journal.ring_bytes < journal.ring_bytes - 3 * BLOCK_BYTES:
        number += 1
        await life.save(b"turn %d" % (number % 3), size_bytes=100)
        await life.delete(b"turn %d" % (number % 3))
        await bench_settles(life)
    await life.kill()


async def bench_settles(life: Life) -> None:
    """Until what was recorded in passing is durable too."""
    await asyncio.sleep(0.01)
    assert await life.store.durable(life.store.engine.last_lsn, life.store.clock() + 10**10)


async def journal_wrap(bench: CrashBench) -> None:
    life = await bench.open_owned()
    for number in range(4):
        await life.save(b"wrap %d" % number, size_bytes=100)
    # Records that take more than a block, so that a batch can find too little left of the lap.
    await life.save(*(b"many %d" % number for number in range(20)), size_bytes=1)


async def ring_full_of_run_starts(bench: CrashBench) -> None:
    """Lives that died young have used up even what is kept free for them: the next one must begin with a checkpoint."""
    for _ in range(100):
        before = bench.medium.current()
        life = await bench.open_owned()
        assert life.session.checkpointer is not None
        first_had_to = life.session.checkpointer.completed
        await life.kill()
        if first_had_to:
            bench.medium.lose_power(before)
            return
    raise AssertionError("the ring never fills")


async def ring_full_of_records(bench: CrashBench) -> None:
    """A life that dies when its stores begin to wait for a checkpoint: those of the next one wait as well."""
    for _ in range(100):
        life = await bench.open_owned()
        for number in range(2):
            await life.save(b"short %d" % number, size_bytes=100)
            if life.session.pressed:
                await life.kill()
                return
            await life.delete(b"short %d" % number)
        await life.kill()
    raise AssertionError("the ring never fills")


async def full_ring(bench: CrashBench) -> None:
    life = await bench.open_owned()
    await life.save(b"after")
    await life.delete(b"two")


async def format_anew(bench: CrashBench) -> None:
    """Over a card with objects, forced: the old card, or no card, or the new one."""
    bench.told.formatting = True
    device = bench.device()
    geometry = device.geometry
    found = await ownership.read_superblocks(CardBlocks(device, bench.loop.clock), geometry.size_bytes)
    assert isinstance(found, Chosen)
    owner = bench.options("formats").owner
    # As `card format --force` does.
    before = found.superblock
    ours = ownership.owned(
        before, owner, epoch=1 + before.stamp.epoch, run_id=bench.rng.randbytes(16), wall_ns=1
    )
    await ownership.write_both(CardBlocks(device, bench.loop.clock), ours, first_copy=1 - found.copy)
    await ownership.format_card(
        CardBlocks(device, bench.loop.clock),
        plan(geometry.size_bytes, geometry.block_bytes, AU_BYTES, OBJECTS_MAX),
        ownership.facts_of(device),
        label="anew",
        sequence=2 + before.sequence,
        wall_ns=1,
        entropy=bench.rng.randbytes,
        first_copy=1 - found.copy,
    )
    bench.told.formatting = False
    for key in bench.told.may:
        bench.told.hears(key, None)


async def clean_stop(bench: CrashBench) -> None:
    life = await bench.open_owned()
    await life.save(b"last")
    await life.delete(b"two")
    assert await life.stop()


async def whole_life(bench: CrashBench) -> None:
    """From a blank card to a clean stop."""
    await format_only(bench)
    life = await bench.open_owned()
    await life.save(b"one")
    assert await life.stop()


async def takeover(bench: CrashBench) -> None:
    first = await bench.open_owned("first")

    async def stores() -> None:
        with contextlib.suppress(CardOffline):
            await stores_for_ever()

    async def stores_for_ever() -> None:
        for number in range(1000):
            await first.save(b"of the first %d" % (number % 5), size_bytes=100)
            await first.delete(b"of the first %d" % (number % 5))
            await asyncio.sleep(0.002)

    storing = asyncio.create_task(stores())
    second = await bench.open_owned("second", takeover=True, exclusive=False)
    storing.cancel()
    # Not swallowed: that the power fails while this waits ends it.
    await asyncio.gather(storing, first.task, return_exceptions=True)
    await second.save(b"of the second")


async def recovery(bench: CrashBench) -> None:
    """Opening an unclean card is itself cut."""
    life = await bench.open_owned()
    await life.save(b"after", size_bytes=4096)


@dataclass(frozen=True)
class Scenario:
    """What is prepared, and what is cut."""

    name: str
    act: Work
    before: tuple[Work, ...] = (populated,)
    reservations: bool = False
    """Whether the controller has them while it is cut."""

    direct: bool = False
    """Whether extents are handed out while it is cut."""

    def base(self) -> Base:
        return replaced(_base(self.before), reservations=self.reservations, direct=self.direct)


@cache
def _base(works: tuple[Work, ...]) -> Base:
    if not works:
        return BLANK
    return prepared(works[-1], _base(works[:-1]))


SCENARIOS: Final = (
    Scenario("format", format_only, ()),
    Scenario("first open", first_open, (format_only,)),
    Scenario("store", store_one),
    Scenario("store several", store_several),
    Scenario("store in turns", store_in_turns),
    Scenario("delete", delete),
    Scenario("replace on a full card", replace),
    Scenario("reuse", reuse),
    Scenario("evict", evict),
    Scenario("wipe", wipe),
    Scenario("wipe all", wipe_all),
    Scenario("limit", limit),
    Scenario("checkpoint", checkpoint),
    Scenario("checkpoint under load", fuzzy_checkpoint),
    Scenario("journal wrap", journal_wrap, (populated, near_the_end_of_the_ring)),
    Scenario("ring full of run starts", full_ring, (populated, ring_full_of_run_starts)),
    Scenario("ring full of records", full_ring, (populated, ring_full_of_records)),
    Scenario("format anew", format_anew),
    Scenario("clean stop", clean_stop),
    Scenario("whole life", whole_life, ()),
    Scenario("takeover", takeover),
    Scenario("recovery", recovery, (populated, unclean)),
    Scenario("reserve", tickets.reserve, direct=True),
    Scenario("commit", tickets.commit, direct=True),
    Scenario("commit of what is cancelled", tickets.commit_cancelled, direct=True),
    Scenario("abort", tickets.abort, direct=True),
    Scenario("expire", tickets.expire, direct=True),
    Scenario("checkpoint with tickets", tickets.direct_checkpoint, direct=True),
    Scenario("after tickets", tickets.after_tickets, (populated, tickets.tickets_of_a_dead_run), direct=True),
)
