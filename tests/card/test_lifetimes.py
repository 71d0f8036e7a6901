"""Lifetimes on a card: rules and ages over restarts, clocks that jump, and cards that know nothing of times."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.card.runs import Bench
from tests.card.tenant_runs import A, serve
from xkv_gateway.card.administration import BadTenant, TooManyTenants
from xkv_gateway.card.superblock import FEATURE_TIMES
from xkv_gateway.core.lifetimes import AWAY_S_MAX, CLOCK_RECORD_S, RECORDS_PER_IDLE, RULES_MAX
from xkv_gateway.core.tenancy import TTL_S_MAX

if TYPE_CHECKING:
    from tests.card.tenant_runs import Served

S_NS = 1_000_000_000
DAY_S = 86_400
KEYS = [b"0", b"1", b"2"]


def bench() -> Bench:
    made = Bench()
    made.wall_ns = 1_800_000_000 * S_NS
    return made


async def again(bench: Bench, served: Served, *, orderly: bool, away_s: int) -> Served:
    """End the run, and begin the next one when the host's clock has gone on by so much."""
    if orderly:
        assert await served.stop()
    else:
        await served.kill()
    bench.wall_ns += away_s * S_NS
    return await serve(bench)


def held(served: Served) -> int:
    info = served.operator.namespace("ns")
    assert info is not None
    return info.held.objects


@pytest.mark.parametrize("orderly", [True, False])
def test_a_rule_and_the_age_of_objects_survive_the_end_of_a_run(orderly: bool) -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        info = await served.operator.set_ttl("ns", None, 1000)
        assert (info.idle_s, info.total_s, info.held.objects) == (0, 1000, 0)
        assert await served.save(KEYS, b"x") == ["stored"] * 3
        served = await again(bench, served, orderly=orderly, away_s=500)
        info = served.operator.namespaces().items[0]
        assert (info.idle_s, info.total_s) == (0, 1000)
        assert await served.load(KEYS) == [b"x"] * 3
        served = await again(bench, served, orderly=orderly, away_s=500 + CLOCK_RECORD_S)
        assert await served.load(KEYS) == [None] * 3
        # Others, and what is stored anew, are not touched by that.
        assert await served.save(KEYS, b"y") == ["stored"] * 3
        assert await served.load(KEYS) == [b"y"] * 3
        await served.kill()

    bench().play(work)  # type: ignore[arg-type]


def test_a_rule_that_was_taken_away_does_not_come_back() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        await served.operator.set_ttl("ns", 60, 60)
        await served.run.session.checkpointer.write()  # type: ignore[union-attr]
        await served.operator.set_ttl("ns", 0, 0)
        for orderly in (False, True, False):
            served = await again(bench, served, orderly=orderly, away_s=5)
            assert served.operator.namespaces().total == 0
        await served.kill()

    bench().play(work)  # type: ignore[arg-type]


def test_after_an_orderly_end_idle_time_goes_on_where_it_was() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        await served.operator.set_ttl("ns", 1000, None)
        await served.save(KEYS, b"x")
        served = await again(bench, served, orderly=True, away_s=600)
        assert await served.load(KEYS[:1]) == [b"x"]
        served = await again(bench, served, orderly=True, away_s=600)
        assert await served.load(KEYS) == [b"x", None, None]
        await served.kill()

    bench().play(work)  # type: ignore[arg-type]


def test_after_a_kill_nobody_is_taken_to_have_been_idle_before_it() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        await served.operator.set_ttl("ns", 1000, None)
        await served.save(KEYS, b"x")
        for _ in range(3):
            served = await again(bench, served, orderly=False, away_s=900)
            await asyncio.sleep(1)  # in which the card is told the time
        assert await served.load(KEYS) == [b"x"] * 3
        # They may have been read until shortly before the card would have been told the time again.
        served = await again(bench, served, orderly=False, away_s=1000)
        assert await served.load(KEYS) == [b"x"] * 3
        served = await again(bench, served, orderly=False, away_s=1000 + 1000 // RECORDS_PER_IDLE + 2)
        assert await served.load(KEYS) == [None] * 3
        await served.kill()

    bench().play(work)  # type: ignore[arg-type]


def test_a_clock_that_jumps_ages_nothing_by_more_than_a_day_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        await served.operator.set_ttl("ns", None, AWAY_S_MAX + DAY_S)
        await served.save(KEYS, b"x")
        served = await again(bench, served, orderly=True, away_s=10 * 365 * DAY_S)
        assert "was away for" in caplog.text
        assert await served.load(KEYS) == [b"x"] * 3
        served = await again(bench, served, orderly=True, away_s=-10 * 365 * DAY_S)
        assert await served.load(KEYS) == [b"x"] * 3
        # While a run lasts the host's clock has no say.
        bench.wall_ns += 10 * 365 * DAY_S * S_NS
        assert await served.load(KEYS) == [b"x"] * 3
        assert held(served) == 3
        await served.kill()

    bench().play(work)  # type: ignore[arg-type]


def test_what_was_written_within_the_day_is_known_after_any_end() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        await served.save(KEYS, b"x" * 1000)
        for orderly, away_s, written in ((False, 60, 3000), (True, 60, 3000), (False, 60, 3000)):
            served = await again(bench, served, orderly=orderly, away_s=away_s)
            engine = served.run.store.engine
            assert engine.budget.written(engine.lifetimes.now_s) == written
        served = await again(bench, served, orderly=True, away_s=DAY_S)
        engine = served.run.store.engine
        assert engine.budget.written(engine.lifetimes.now_s) == 0
        await served.kill()

    bench().play(work)  # type: ignore[arg-type]


def test_a_run_says_that_it_writes_times_and_objects_without_any_count_from_its_start() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        assert served.run.session.superblock.incompatible_features & FEATURE_TIMES
        await served.save(KEYS, b"x")
        engine = served.run.store.engine
        engine._state.slots.stored_s[:] = engine._state.slots.used_s[:] = 0  # as an older program left them
        assert await served.stop()
        bench.wall_ns += 500 * S_NS
        served = await serve(bench)
        await served.operator.set_ttl("ns", None, 100)
        assert await served.load(KEYS) == [b"x"] * 3
        await served.kill()

    bench().play(work)  # type: ignore[arg-type]


def test_what_no_rule_can_be_is_refused_and_their_number_is_bounded() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        for idle_s, total_s in ((-1, None), (TTL_S_MAX + 1, 0), (0, TTL_S_MAX + 1)):
            with pytest.raises(BadTenant):
                await served.operator.set_ttl("ns", idle_s, total_s)
        with pytest.raises(BadTenant):
            await served.operator.set_ttl("n" * 65, 1, None)
        assert served.operator.namespaces().total == 0
        lifetimes = served.run.store.engine.lifetimes
        for number in range(RULES_MAX):
            lifetimes.set(f"{number}", 1, 0)
        with pytest.raises(TooManyTenants):
            await served.operator.set_ttl("ns", 1, None)
        await served.operator.set_ttl("7", 2, None)
        await served.operator.set_limit(A, 5)
        served = await again(bench, served, orderly=False, away_s=0)
        assert served.operator.namespaces().total == RULES_MAX
        await served.kill()

    bench().play(work)  # type: ignore[arg-type]
