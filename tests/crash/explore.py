"""Cuts an operation at every command, opens every survivor with the product's own code, and judges what is there."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests.crash.bench import AU_BYTES, FAULTS, OBJECTS_MAX, Base, CrashBench, Life, limits_of
from tests.crash.device import Fuse, Kind
from tests.crash.told import NOTHING, Broken
from tests.sim.medium import SECTOR_BYTES
from xkv_gateway.card import fsck, ownership
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.check import Checker
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.layout import plan
from xkv_gateway.card.session import Phase
from xkv_gateway.card.store import CardOffline
from xkv_gateway.errors import CardUnavailableError
from xkv_nvmeof.blockdev import DeviceError

if TYPE_CHECKING:
    from tests.crash.scenarios import Scenario
    from tests.sim.medium import Image

SETTLED_S: Final = FAULTS.settle_ns / 1e9 + 1
BEHIND_THE_END_S: Final = 0.001
"""So long what an operation has set going may go on behind its end."""


DEEP: Final = 6
"""One image in so many is used, checked, ended in order and checked again."""
DOOMED_LOOKS: Final = 100
"""So often doomed space is looked at: it comes back within a second, also where it is erased first."""


@dataclass
class Found:
    """How much was looked at."""

    cuts: int = 0
    images: int = 0
    blank: int = 0
    """Cards without a superblock, after a format that was cut."""
    seen: set[int] = field(default_factory=set)

    def is_new(self, image: Image, told: int) -> bool:
        mark = hash((frozenset(image.items()), told))
        if mark in self.seen:
            return False
        self.seen.add(mark)
        self.images += 1
        return True


def commands_of(scenario: Scenario) -> Fuse:
    """Run it once without a cut: which commands it sends."""
    fuse = Fuse()
    assert scenario.base().bench(fuse).run(scenario.act)
    return fuse


def cut_by_power(scenario: Scenario, images_max: int, every: int = 1, offset: int = 0) -> Found:
    """Cut the power at every command; `every` and `offset` take a part of them."""
    found, base = Found(), scenario.base()
    points = commands_of(scenario).points()
    for at in points[offset::every]:
        fuse = Fuse(at)
        bench = base.bench(fuse)
        ended = bench.run(scenario.act)
        assert ended is (at == points[-1]), "a run is the same each time"
        found.cuts += 1
        told = bench.told.mark()
        for number, image in enumerate(bench.medium.survivors(images_max, random.Random(at))):
            if not found.is_new(image, told):
                continue
            here = f"{scenario.name}, power lost at command {at} ({' '.join(fuse.commands[-4:])}), image {number}"
            try:
                open_survivor(base.then(bench, image), found, deep=found.images % DEEP == 0)
            except Exception as error:
                raise Broken(f"{here}: {error}") from error
    return found


REFUSALS_OF_AN_OUTAGE: Final = (CardOffline, CardUnavailableError, DeviceError)
"""What may come of an operation whose card goes away in the middle of it. Nobody was told that it is done then."""


def cut_by_outage(scenario: Scenario, images: int = 1) -> Found:
    """Cut the power of the card alone, at every command: the gateway goes on, and what it acknowledges then must be there."""
    found, base = Found(), scenario.base()
    for at in commands_of(scenario).points()[:-1]:
        found.cuts += 1
        for survivor in range(images):
            fuse = Fuse(at, Kind.OUTAGE, survivor=survivor)
            bench = base.bench(fuse)
            with suppress(*REFUSALS_OF_AN_OUTAGE):
                bench.run(scenario.act)
            assert fuse.blown, "a run is the same each time"
            here = f"{scenario.name}, outage at command {at} ({' '.join(fuse.commands[at - 4 : at])}), image {survivor}"
            lost = next(bench.medium.survivors(1))
            if not found.is_new(lost, bench.told.mark()):
                continue
            try:
                open_survivor(base.then(bench, lost), found, deep=found.images % DEEP == 0)
            except Exception as error:
                raise Broken(f"{here}: {error}") from error
    return found


def open_survivor(base: Base, found: Found, *, deep: bool) -> None:
    """Open it, judge it, use it, cut it off, and open it again."""
    bench = base.bench()

    async def look(bench: CrashBench) -> None:
        try:
            life = await bench.open(exclusive=True)
        except CardUnavailableError as refused:
            life = await format_again(bench, refused, found)
        sound(life)
        await bench.told.judge(life)
        await life.owned()
        if deep:
            await use(life)
        await life.kill()

    assert bench.run(look)
    second = base.then(bench).bench()

    async def again(bench: CrashBench) -> None:
        if deep:
            await check(bench)
        life = await bench.open(exclusive=True)
        sound(life)
        await bench.told.judge(life)
        if deep:
            await life.owned()
            assert await life.stop()
            await check(bench)

    assert second.run(again)


def sound(life: Life) -> None:
    """A crash is no damage."""
    recovery = life.session.recovery
    if recovery.damage or recovery.restored.dropped_objects:
        raise Broken(
            f"damage after a mere crash: {recovery.damage}, {recovery.restored.dropped_objects} dropped"
        )


async def use(life: Life) -> None:
    """Everything works: all that is free can be stored, and nothing else suffers."""
    for _ in range(DOOMED_LOOKS):
        await asyncio.sleep(0.01)
        usage = life.store.engine.usage()
        if not (usage.doomed_au or usage.quarantined_au):
            break
    else:
        raise Broken(f"space that nobody uses does not come back: {usage}")
    await life.fill()
    evicts, life.bench.told.evicts = life.bench.told.evicts, False
    await life.bench.told.judge(life)
    life.bench.told.evicts = evicts


async def check(bench: CrashBench) -> None:
    """The offline check agrees that nothing is damaged."""
    device = bench.device()
    checker = Checker(
        device, CardBlocks(device, bench.loop.clock), limits_of, bench.loop.clock, lambda *_: None
    )
    await checker.run(payload=True)
    report: fsck.Report = checker.report
    if not report.clean:
        raise Broken(f"the check finds {report.findings}")


async def format_again(bench: CrashBench, refused: Exception, found: Found) -> Life:
    """A format that was cut may leave what only a forced format cleans up; nobody was told anything of such a card."""
    if not bench.told.formatting:
        raise Broken(f"the card is refused: {refused}")
    found.blank += 1
    bench.told.may = dict.fromkeys(bench.told.may, NOTHING)
    bench.told.formatting = False
    device = bench.device()
    layout = plan(device.geometry.size_bytes, device.geometry.block_bytes, AU_BYTES, OBJECTS_MAX)
    facts = ownership.facts_of(device)
    await ownership.format_card(
        CardBlocks(device, bench.loop.clock),
        layout,
        facts,
        label="",
        sequence=2,
        wall_ns=1,
        entropy=bench.rng.randbytes,
    )
    return await bench.open_owned()


# --- deaths ---------------------------------------------------------------------------------------------------

Landing = tuple[float, float, float]
"""When, in seconds after the death; from which to which part of the write."""
NEVER: Final[tuple[Landing, ...]] = ()
AT_ONCE: Final[tuple[Landing, ...]] = ((0.0, 0.0, 1.0),)
READ: Final = FAULTS.settle_ns / 1e9 - 0.3
"""After the next run has read the index, and before the run before is settled."""
LANDINGS: Final[dict[str, tuple[Landing, ...]]] = {
    "never": NEVER,
    "at once": AT_ONCE,
    "while the next run watches": ((1.5, 0.0, 1.0),),
    "when the next run has read the index": ((READ, 0.0, 1.0),),
    "its first half when the next run has read the index": ((READ, 0.0, 0.5),),
    "in two halves": ((0.0, 0.0, 0.5), (READ, 0.5, 1.0)),
}


def cut_by_death(scenario: Scenario, every: int = 1, offset: int = 0) -> Found:
    """Let the process die with each write on its way, which is executed never, at once, or late."""
    found, base = Found(), scenario.base()
    for at in commands_of(scenario).writes()[offset::every]:
        found.cuts += 1
        for name, landing in LANDINGS.items():
            fuse = Fuse(at, Kind.DEATH)
            bench = base.bench(fuse)
            try:
                bench.run(lambda bench, landing=landing: _dies_and_is_followed(scenario, bench, landing))  # type: ignore[misc]
            except Exception as error:
                raise Broken(
                    f"{scenario.name}, dead in command {at}, its write lands {name}: {error}"
                ) from error
            found.images += 1
    return found


async def _dies_and_is_followed(scenario: Scenario, bench: CrashBench, landing: tuple[Landing, ...]) -> None:
    blown: asyncio.Future[None] = bench.loop.create_future()
    bench.fuse.on_blow = lambda: None if blown.done() else blown.set_result(None)
    acting = asyncio.ensure_future(scenario.act(bench))
    await asyncio.wait((acting, blown), return_when=asyncio.FIRST_COMPLETED)
    if not blown.done():
        # It has ended, and what it has set going (the record of what became free) has not.
        await asyncio.wait((blown,), timeout=BEHIND_THE_END_S)
    assert blown.done(), "a run is the same each time"
    dying, bench.told = bench.told, bench.told.copy()
    for number in sorted(bench.medium.in_flight):
        for when_s, first, last in landing:
            bench.loop.call_later(when_s, land, bench, number, first, last)
    died_ns = bench.loop.clock()
    await _follow(bench, died_ns)
    assert dying is not bench.told
    acting.cancel()


def land(bench: CrashBench, number: int, first: float, last: float) -> None:
    """Execute a part of a write that is still on its way."""
    write = bench.medium.in_flight.get(number)
    if write is None:
        return
    sectors = len(write.data) // SECTOR_BYTES
    begin, end = round(sectors * first), round(sectors * last)
    if begin < end:
        bench.medium.execute(number, begin, end)


async def _follow(bench: CrashBench, died_ns: int) -> None:
    """The next run: warm, and right, also when everything has landed."""
    formatting = bench.told.formatting
    life = await _next_life(bench)
    await bench.told.judge(life)
    await use(life)
    await asyncio.sleep(max(0.0, died_ns / 1e9 + SETTLED_S - bench.loop.time()))
    if not (formatting and life.session.phase is Phase.CLOSED):
        # Nobody can know of a format that died: a late write of it may end the next run, and costs nothing but that.
        await bench.told.judge(life)
    await life.kill()
    last = await bench.open("last", exclusive=True)
    sound(last)
    await bench.told.judge(last)
    await last.kill()


REFUSALS: Final = ("lives", "at the same time")
"""What the last writes of the dead may look like: a heartbeat that moves, or a superblock of another run."""


async def _next_life(bench: CrashBench) -> Life:
    """Open the card; now and then only the second attempt may succeed, when nothing can land any more."""
    try:
        life = await bench.open("next")
        sound(life)
        await life.owned()
    except (CardUnavailableError, CardLost) as refused:
        if not any(text in str(refused) for text in REFUSALS):
            return await format_again(bench, refused, Found())
        await asyncio.sleep(SETTLED_S)
        life = await bench.open("next")
        await life.owned()
    sound(life)
    return life
