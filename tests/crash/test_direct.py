"""Clients of a run that is cut off go on writing: what they hold is nobody else's, in the next run, until their time is over."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.crash.bench import HELD_NS
from tests.crash.device import Fuse
from tests.crash.explore import commands_of, sound
from tests.crash.scenarios import SCENARIOS, Scenario, populated
from tests.crash.told import Broken
from xkv_gateway.card import ownership
from xkv_gateway.core.image import EngineImage
from xkv_gateway.core.removal import Removal
from xkv_gateway.core.stores import Stores
from xkv_gateway.core.types import NO_LSN

if TYPE_CHECKING:
    from tests.crash.bench import CrashBench, Held
    from xkv_gateway.card.superblock import Superblock

DIRECT = [scenario for scenario in SCENARIOS if scenario.direct]


async def die_twice(bench: CrashBench) -> None:
    """The next run dies young as well, without having handed out anything: it must not forget the clients of the first."""
    first = await bench.open_owned()
    await first.reserve(b"held", size_bytes=9000)
    await first.kill()
    bench.direct = False
    second = await bench.open_owned()
    await second.save(b"of the second")
    await second.kill()
    await bench.open_owned()


async def stop_with_a_ticket(bench: CrashBench) -> None:
    """A clean stop does not end what clients hold."""
    life = await bench.open_owned()
    await life.reserve(b"held", size_bytes=9000)
    assert await life.stop()


TWO_RUNS = Scenario("die twice", die_twice, (populated,), direct=True)
STOPS = Scenario("stop with a ticket", stop_with_a_ticket, (populated,), direct=True)


def cut_and_write_late(scenario: Scenario, every: int = 1, images_max: int = 4) -> int:
    """Cut the power of the gateway at every command; the next one fills the card, and then clients write. Returns how often they did."""
    base, late = scenario.base(), 0
    for at in commands_of(scenario).points()[::every]:
        bench = base.bench(Fuse(at))
        bench.run(scenario.act)
        left = list(bench.left.values())
        for number, image in enumerate(bench.medium.survivors(images_max, random.Random(at))):
            try:
                assert (
                    base.then(bench, image)
                    .bench()
                    .run(lambda next_bench, left=left: _next_run(next_bench, left))
                )  # type: ignore[misc]
            except Exception as error:
                raise Broken(f"{scenario.name}, cut at command {at}, image {number}: {error}") from error
            late += bool(left)
    return late


async def _next_run(bench: CrashBench, left: list[Held]) -> None:
    life = await bench.open_owned()
    sound(life)
    await bench.told.judge(life)
    await life.fill()
    for held in left:
        await life.write(held)
    await bench.told.judge(life)
    # When their time is over the space comes back.
    await asyncio.sleep(HELD_NS / 1e9 + 0.01)
    usage = life.store.engine.usage()
    assert not usage.doomed_au, "space that nobody uses does not come back"
    await life.fill()
    await bench.told.judge(life)


@pytest.mark.parametrize("scenario", [*DIRECT, TWO_RUNS, STOPS], ids=lambda scenario: scenario.name)
def test_what_clients_write_after_a_crash_harms_nobody(scenario: Scenario) -> None:
    late = cut_and_write_late(scenario, every=3)
    assert late or scenario.name in {"abort", "after tickets"}


_owned = ownership.owned


def _owned_by_a_run_that_forgets(before: Superblock, owner: Any, **options: Any) -> Superblock:
    ours = _owned(before, owner, **options)
    return replace(ours, extents_handed_out=owner.hands_out_extents)


def _says_nothing(*args: Any, **options: Any) -> Superblock:
    return replace(_owned(*args, **options), extents_handed_out=False)


def _records_nothing(self: Stores, plans: Any) -> Any:
    self._removal.recorded.update(plan.slot for plan in plans)
    return NO_LSN


_abandon = Removal.abandon


def _abandons_at_once(self: Removal, slots: Any, settles_at_ns: int | None) -> None:
    del settles_at_ns
    _abandon(self, slots, None)


_rows = EngineImage.rows


def _rows_without_tickets(self: EngineImage, first: int, last: int, now_ns: int) -> Any:
    with mock.patch.object(self._removal, "recorded", set()):
        return _rows(self, first, last, now_ns)


def _scenario(name: str) -> Scenario:
    return next(scenario for scenario in DIRECT if scenario.name == name)


MUTATIONS = {
    "the superblock does not say that extents leave": (
        ownership,
        "owned",
        _says_nothing,
        _scenario("reserve"),
    ),
    "a run forgets the clients of the run before": (
        ownership,
        "owned",
        _owned_by_a_run_that_forgets,
        TWO_RUNS,
    ),
    "reservations are not recorded": (Stores, "record_reserved", _records_nothing, _scenario("reserve")),
    "checkpoints have no rows of tickets": (EngineImage, "rows", _rows_without_tickets, STOPS),
    "what ended by its time is free at once": (Removal, "abandon", _abandons_at_once, _scenario("expire")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_product_without_one_of_the_rules_is_found_out(name: str) -> None:
    where, what, instead, scenario = MUTATIONS[name]
    with mock.patch.object(where, what, instead), pytest.raises((Broken, AssertionError)):
        cut_and_write_late(scenario)


def test_the_superblock_tells_of_extents_until_nobody_can_use_any() -> None:
    told: list[tuple[bool, bool]] = []

    async def work(bench: CrashBench) -> None:
        async def one_life(*, direct: bool, wait_s: float) -> None:
            bench.direct = direct
            life = await bench.open_owned()
            while_it_lives = life.session.superblock.extents_handed_out
            await asyncio.sleep(wait_s)
            assert await life.stop()
            told.append((while_it_lives, life.session.superblock.extents_handed_out))
            assert life.session.superblock.lease_max_ns == HELD_NS

        await one_life(direct=False, wait_s=0)
        await one_life(direct=True, wait_s=2 * HELD_NS / 1e9)
        await one_life(direct=False, wait_s=0)
        await one_life(direct=False, wait_s=HELD_NS / 1e9)
        await one_life(direct=False, wait_s=0)

    assert Scenario("", populated).base().bench().run(work)
    assert told == [(False, False), (True, True), (True, True), (True, False), (False, False)]
