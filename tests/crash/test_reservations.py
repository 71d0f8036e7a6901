"""The same crashes, deaths and changes of hands on a card that can be reserved; and what only happens there."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.crash.bench import FAULTS, KEEP_ALIVE_MS, CrashBench
from tests.crash.cutoff import comes_back
from tests.crash.explore import cut_by_death, cut_by_power, sound
from tests.crash.hosts import Hosts
from tests.crash.scenarios import SCENARIOS, Scenario
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.opening import open_card
from xkv_gateway.card.reservation import is_ours, key_of
from xkv_gateway.card.session import Phase
from xkv_gateway.card.store import CardOffline, CardRecovering
from xkv_gateway.errors import CardUnavailableError
from xkv_nvmeof.controller_reservations import ReservationTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.crash.bench import Base, Life
    from xkv_nvmeof.blockdev import ReservationStatus

RESERVED = [replace(scenario, reservations=True) for scenario in SCENARIOS]
NAMES = [scenario.name for scenario in RESERVED]
IMAGES_MAX = 2
PART = 11
SEEDS = 6
SEEDS_SLOW = 100
STEP_NS = 2_000_000
STEPS = 20
WATCHED_NS = 2_900_000_000
"""Back when the other one has just looked for a heartbeat long enough."""
SETTLING_S = KEEP_ALIVE_MS / 1000
STRANGER = b"somebody else..."


def base(name: str = "store") -> Base:
    return next(scenario for scenario in RESERVED if scenario.name == name).base()


def status(bench: CrashBench) -> ReservationStatus:
    assert bench.medium.reservations is not None
    return bench.medium.reservations.status()


def holder(bench: CrashBench) -> bytes:
    found = status(bench).holder
    assert found is not None
    assert is_ours(found.key)
    return found.host_id.rstrip(b".")


@pytest.mark.parametrize("scenario", RESERVED, ids=NAMES)
def test_whatever_survives_a_loss_of_power_is_right(scenario: Scenario) -> None:
    cut_by_power(scenario, IMAGES_MAX, every=3, offset=len(scenario.name) % 3)


@pytest.mark.parametrize("number", range(len(RESERVED)), ids=NAMES)
def test_the_next_run_is_right_whenever_the_last_write_of_the_dead_one_lands(number: int) -> None:
    assert cut_by_death(RESERVED[number], every=PART, offset=number % 5).cuts


@pytest.mark.slow
@pytest.mark.parametrize("scenario", RESERVED, ids=NAMES)
def test_the_next_run_is_right_whichever_write_lands_late(scenario: Scenario) -> None:
    cut_by_death(scenario)


def test_a_card_that_changes_hands_again_and_again_keeps_all_that_was_acknowledged() -> None:
    for seed in range(SEEDS):
        hosts = Hosts(base(), seed)
        hosts.play()
        assert hosts.acknowledged > 10, seed


@pytest.mark.slow
def test_many_more_changes_of_hands_keep_all_that_was_acknowledged() -> None:
    for seed in range(SEEDS_SLOW):
        try:
            Hosts(base(), seed).play()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_an_owner_that_was_cut_off_never_gets_its_card_back_from_who_has_reserved_it() -> None:
    assert all(comes_back(base(), step * STEP_NS - WATCHED_NS) for step in range(STEPS))


def test_keys_are_of_gateways_and_of_one_run() -> None:
    keys = {key_of(bytes([number]) * 16) for number in range(256)}
    assert len(keys) == 256
    assert all(is_ours(key) and key < 1 << 64 for key in keys)
    assert not is_ours(1)


def test_a_run_has_its_card_reserved_from_before_it_reads_the_journal_until_it_has_ended_in_order() -> None:
    async def work(bench: CrashBench) -> None:
        life = await bench.open("first", exclusive=True)
        assert holder(bench) == b"first"
        assert life.session.reservation is not None
        await life.owned()
        assert life.session.superblock.reservation_key == life.session.reservation.key
        assert await life.stop()
        assert status(bench).registrants == ()
        assert status(bench).kind is None

    assert base().bench().run(work)


def test_after_a_death_another_host_writes_at_once_and_nothing_of_the_dead_can_land() -> None:
    async def work(bench: CrashBench) -> None:
        first = await bench.open_owned("first")
        storing = asyncio.create_task(first.save(b"late", size_bytes=9000))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.medium.in_flight
        await first.kill()
        storing.cancel()
        began_s = bench.loop.time()
        second = await bench.open("second")
        await second.owned()
        # It has watched the heartbeat, and nothing else.
        assert bench.loop.time() - began_s < SETTLING_S
        assert not bench.medium.in_flight
        sound(second)
        await bench.told.judge(second)
        await second.kill()

    assert base().bench().run(work)


def test_after_a_death_the_same_host_waits_as_without_reservations() -> None:
    async def work(bench: CrashBench) -> None:
        first = await bench.open_owned("host")
        await first.kill()
        began_s = bench.loop.time()
        second = await bench.open("host")
        with pytest.raises(CardRecovering):
            await second.save(b"too early")
        await second.owned()
        assert bench.loop.time() - began_s > SETTLING_S
        assert len(status(bench).registrants) == 1
        await second.kill()

    assert base().bench().run(work)


def test_a_takeover_need_not_wait_for_writes_and_the_loser_names_the_taker() -> None:
    async def work(bench: CrashBench) -> None:
        first = await bench.open_owned("first")
        began_s = bench.loop.time()
        second = await bench.open("second", takeover=True)
        await second.owned()
        assert bench.loop.time() - began_s < SETTLING_S
        await asyncio.sleep(1.5)
        error = first.task.exception()
        assert isinstance(error, CardLost)
        assert "taken over by second" in str(error)
        assert first.session.phase is Phase.CLOSED
        # Nothing that it says at its end concerns the taker's registration.
        assert not await first.session.stop()
        assert holder(bench) == b"second"
        await second.save(b"of the second")
        assert await second.stop()

    assert base().bench().run(work)


@pytest.mark.parametrize("way", ["payload", "record"])
def test_a_write_that_is_refused_ends_the_run_and_nothing_more_is_acknowledged(way: str) -> None:
    async def work(bench: CrashBench) -> None:
        first = await bench.open_owned("first")
        table, intruder = bench.medium.reservations, b"intruder........"
        assert table is not None
        assert first.session.reservation is not None
        await asyncio.sleep(0.5)
        table.register(intruder, 0, 0, 99)
        table.acquire(intruder, 1 | 3 << 8, 99, first.session.reservation.key)
        if way == "payload":
            with contextlib.suppress(CardOffline):
                assert await first.save(b"refused") == ["io_error"]
        else:
            deleting = asyncio.create_task(first.delete(b"one"))
            await asyncio.sleep(0.1)
            assert not deleting.done()
            deleting.cancel()
        await asyncio.sleep(1)
        assert isinstance(first.task.exception(), CardLost)
        assert "another gateway reserved the card" in str(first.task.exception())
        assert not first.store.online
        await first.kill()

    assert base().bench().run(work)


def forgets_and_breaks(bench: CrashBench, life: Life) -> None:
    """As a target does that is started again."""
    bench.medium.reservations = ReservationTable()
    life.device.break_connection(100_000_000)


def forgets(bench: CrashBench, life: Life) -> None:
    """As when somebody clears the reservation."""
    bench.medium.reservations = ReservationTable()


@pytest.mark.parametrize("how", [forgets_and_breaks, forgets])
def test_a_card_that_has_forgotten_who_reserved_it_is_reserved_again(
    how: Callable[[CrashBench, Life], None],
) -> None:
    async def work(bench: CrashBench) -> None:
        life = await bench.open_owned("first")
        await life.save(b"before")
        how(bench, life)
        await asyncio.sleep(1.5)
        assert holder(bench) == b"first"
        await life.save(b"behind")
        assert await life.stop()

    assert base().bench().run(work)


def test_a_run_whose_card_was_taken_and_forgot_that_does_not_reserve_it_again() -> None:
    async def work(bench: CrashBench) -> None:
        first = await bench.open_owned("first")
        first.device.break_connection(30_000_000_000)
        second = await bench.open("second")
        await second.owned()
        assert await second.stop()
        assert status(bench).registrants == ()
        await asyncio.sleep(30)
        assert isinstance(first.task.exception(), CardLost)
        assert not await first.session.stop()
        assert status(bench).registrants == ()

    assert base().bench().run(work)


def test_two_runs_of_one_host_share_a_registration_and_the_older_one_ends() -> None:
    async def work(bench: CrashBench) -> None:
        first = await bench.open_owned("host")
        second = await bench.open("host", takeover=True)
        await second.owned()
        assert isinstance(first.task.exception(), CardLost)
        assert len(status(bench).registrants) == 1
        assert not await first.session.stop()
        assert holder(bench) == b"host"
        await second.save(b"of the second")
        assert await second.stop()

    assert base().bench().run(work)


def test_somebody_elses_reservation_is_respected_unless_the_operator_insists() -> None:
    async def work(bench: CrashBench) -> None:
        table = bench.medium.reservations
        assert table is not None
        table.register(STRANGER, 0, 0, 5)
        table.acquire(STRANGER, 3 << 8, 5, 0)
        with pytest.raises(CardUnavailableError, match="has the card reserved, and is no gateway"):
            await bench.open("first")
        assert status(bench).holder is not None
        life = await bench.open_owned("first", takeover=True)
        assert holder(bench) == b"first"
        assert len(status(bench).registrants) == 1
        await life.kill()

    assert base().bench().run(work)


def test_of_two_that_open_at_once_at_most_one_has_the_card() -> None:
    async def work(bench: CrashBench) -> None:
        opened = await asyncio.gather(
            bench.open_owned("first", exclusive=False),
            bench.open_owned("second", exclusive=False),
            return_exceptions=True,
        )
        await asyncio.sleep(5)
        owners = [
            life
            for life in opened
            if not isinstance(life, BaseException) and life.session.phase is Phase.OWNED
        ]
        assert len(owners) <= 1
        refused = [error for error in opened if isinstance(error, BaseException)]
        assert all(
            isinstance(error, CardUnavailableError | CardLost) or "reserved" in str(error)
            for error in refused
        )
        for life in owners:
            await life.save(b"mine")
            await life.kill()

    for lives in range(20):
        assert replace(base(), lives=3000 + lives).bench().run(work)


def test_faults_while_it_is_reserved_refuse_the_card_or_end_the_run_and_nothing_else() -> None:
    async def work(bench: CrashBench) -> None:
        first = await bench.open_owned("first")
        await first.save(b"before")
        await first.kill()
        device = bench.device("second")
        device.faults = replace(FAULTS, fail_probability=0.1, break_probability=0.05)
        with contextlib.suppress(CardUnavailableError, CardLost):
            second = await open_card(device, CardBlocks(device, bench.loop.clock), bench.options("second"))
            assert second.reservation is not None
        await device.aclose()
        last = await bench.open_owned("last", takeover=True, exclusive=False)
        sound(last)
        await bench.told.judge(last)
        await last.kill()

    for lives in range(20):
        assert replace(base(), lives=4000 + lives).bench().run(work)
