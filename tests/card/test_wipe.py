"""Wipes on a card: gone for lookups at once, gone from the card in the end, whatever happens in between."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.card.runs import PERFECT, Bench
from tests.card.tenant_runs import MARK, A, B, Failing, Served, damage, holds, serve
from tests.sim.device import SimDevice
from xkv_gateway.card.administration import Verification, WipeStage
from xkv_gateway.card.save import Save
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_gateway.core.types import BeginLoad, BeginStore, Lookup, LookupMode
from xkv_nvmeof.blockdev import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_nvmeof.blockdev import ByteRange, Geometry

UNIT = 64 << 10
KEYS = [b"%d" % i for i in range(6)]
PAYLOAD = MARK * 1500
"""Two units."""
CLEAN = b"\x5a" * 70_000


async def two_tenants(bench: Bench, device: SimDevice | None = None) -> Served:
    served = await serve(bench, device)
    assert await served.save(KEYS, PAYLOAD, A) == ["stored"] * 6
    assert await served.save(KEYS, CLEAN, B) == ["stored"] * 6
    assert await served.save(KEYS, CLEAN, A, "other") == ["stored"] * 6
    return served


async def only_a_is_gone(served: Served) -> None:
    assert await served.load(KEYS, A) == [None] * 6
    assert await served.load(KEYS, B) == [CLEAN] * 6
    assert await served.load(KEYS, A, "other") == [CLEAN] * 6


def test_a_wiped_scope_is_gone_at_once_and_its_bytes_are_gone_from_the_card_in_the_end() -> None:
    async def work(bench: Bench) -> None:
        served = await two_tenants(bench)
        free_au = served.run.session.engine.usage().free_au
        job = served.operator.wipe("ns", A)
        await only_a_is_gone(served)
        await job.durable()
        assert job.progress.stage is WipeStage.DURABLE
        report = await job.run()
        assert (report.stage, report.objects, report.payload_bytes) == (WipeStage.DONE, 6, 6 * len(PAYLOAD))
        assert (report.erased_bytes, report.left_bytes, report.waiting_bytes) == (12 * UNIT, 0, 0)
        assert report.verification is Verification.DEALLOCATED
        assert not holds(bench, MARK)
        await only_a_is_gone(served)
        assert served.run.session.engine.usage().free_au == free_au + 12
        assert served.operator.namespace("ns").scopes == 1  # type: ignore[union-attr]
        served.run.session.engine.audit()
        assert await served.save(KEYS, CLEAN, A) == ["stored"] * 6
        await served.kill()
        served = await serve(bench)
        assert await served.load(KEYS, A) == [CLEAN] * 6
        await served.kill()

    Bench().play(work)


def test_a_wiped_namespace_takes_all_its_scopes_and_no_other_namespace() -> None:
    async def work(bench: Bench) -> None:
        served = await two_tenants(bench)
        job = await served.wiped("ns", None)
        assert job.progress.objects == 12
        assert await served.load(KEYS, A) == await served.load(KEYS, B) == [None] * 6
        assert await served.load(KEYS, A, "other") == [CLEAN] * 6
        assert [space.name for space in served.operator.namespaces().items] == ["other"]
        empty = await served.wiped("nobody", None)
        assert (empty.progress.objects, empty.progress.verification) == (0, Verification.NOTHING)
        assert len(served.operator.wipes()) == 2
        await served.kill()

    Bench().play(work)


class OtherDevice(SimDevice):
    """One that cannot do everything, or says so and does not do it."""

    promises: bool = False
    zeroes: bool = True
    lies: bool = False
    refuses: bool = False

    @property
    def geometry(self) -> Geometry:
        return replace(super().geometry, deallocate_zeroes=self.promises, can_write_zeroes=self.zeroes)

    async def deallocate(self, ranges: Sequence[ByteRange]) -> None:
        if self.refuses:
            raise CommandFailed("no", status_code_type=0, status_code=6, do_not_retry=True)
        if not self.lies:
            await super().deallocate(ranges)


@pytest.mark.parametrize(
    "flaws",
    [{}, {"zeroes": False}, {"promises": True, "lies": True}, {"promises": True, "refuses": True}],
    ids=["no promise of zeroes", "cannot write zeroes either", "lies", "refuses"],
)
def test_whatever_the_device_can_do_zeroes_are_read_back_in_the_end(flaws: dict[str, bool]) -> None:
    async def work(bench: Bench) -> None:
        device = OtherDevice(bench.loop, bench.medium, random.Random(1), PERFECT)
        for name, value in flaws.items():
            setattr(device, name, value)
        served = await two_tenants(bench, device)
        job = await served.wiped("ns", A)
        assert job.progress.verification is Verification.ZEROED
        assert job.progress.erased_bytes == 12 * UNIT
        assert not holds(bench, MARK)
        await only_a_is_gone(served)
        await served.kill()

    Bench().play(work)


def test_what_is_leased_is_wiped_when_the_lease_ends_and_gives_no_bytes_before() -> None:
    async def work(bench: Bench) -> None:
        served = await two_tenants(bench)
        outcome = served.run.store.lookup(Lookup("ns", A, KEYS[:2], LookupMode.PREFIX, 20 * 10**9))
        assert outcome.lease is not None
        job = served.operator.wipe("ns", A)
        assert served.run.store.begin_load(BeginLoad("ns", A, KEYS[:2], outcome.lease)) == [None, None]
        await asyncio.sleep(10)
        progress = job.progress
        assert (progress.stage, progress.left_bytes, progress.waiting_bytes) == (
            WipeStage.DURABLE, 4 * UNIT, 4 * UNIT,
        )  # fmt: skip
        assert progress.erased_bytes == 8 * UNIT
        assert holds(bench, MARK)
        report = await job.run()
        assert bench.loop.clock() >= 20 * 10**9
        assert report.erased_bytes == 12 * UNIT
        assert not holds(bench, MARK)
        await served.kill()

    Bench().play(work)


def test_a_store_that_began_before_a_wipe_never_becomes_visible_after_it() -> None:
    async def work(bench: Bench) -> None:
        for moment in range(40):
            served = await serve(bench)
            request = BeginStore("ns", A, KEYS, [len(PAYLOAD)] * 6)
            save = Save(served.run.store, request, [memoryview(PAYLOAD)] * 6, bench.loop.clock() + 10**9)
            saving = asyncio.create_task(save.run())
            await asyncio.sleep(moment * 40e-6)
            job = served.operator.wipe("ns", A)
            assert await served.load(KEYS, A) == [None] * 6
            statuses = {status.value for status in await saving}
            assert len(statuses) == 1
            assert statuses <= {"stored", "cancelled"}
            assert await served.load(KEYS, A) == [None] * 6
            await job.run()
            assert not holds(bench, MARK), moment
            await served.kill()
            served = await serve(bench)
            assert await served.load(KEYS, A) == [None] * 6
            await served.kill()

    Bench().play(work)


def test_a_wipe_under_load_leaves_what_was_stored_since_alone() -> None:
    async def work(bench: Bench) -> None:
        served = await two_tenants(bench)
        stop = asyncio.Event()
        stored: set[bytes] = set()

        async def writer(number: int) -> None:
            count = 0
            while not stop.is_set():
                key, wipes = b"w%d/%d" % (number, count := count + 1), len(served.operator.wipes())
                if await served.save([key], CLEAN, A) == ["stored"] and wipes == len(served.operator.wipes()):
                    # All of it came after the last wipe.
                    stored.add(key)

        async def wiper() -> None:
            for _ in range(6):
                await asyncio.sleep(0.002)
                job = served.operator.wipe("ns", A)
                stored.clear()
                await job.run()
            stop.set()

        await asyncio.gather(*(writer(number) for number in range(4)), wiper())
        assert stored
        for key in sorted(stored):
            assert await served.load([key], A) == [CLEAN]
        assert await served.load(KEYS, B) == [CLEAN] * 6
        served.run.session.engine.audit()
        await served.kill()

    Bench(seed=3).play(work)


def test_an_orderly_end_in_the_middle_of_a_wipe_leaves_the_rest_to_the_next_run() -> None:
    async def work(bench: Bench) -> None:
        served = await two_tenants(bench)
        outcome = served.run.store.lookup(Lookup("ns", A, KEYS[:2], LookupMode.PREFIX, 60 * 10**9))
        assert outcome.lease is not None
        job = served.operator.wipe("ns", A)
        await asyncio.sleep(1)
        assert await served.stop()
        assert (await job.run()).stage is WipeStage.FAILED
        served = await serve(bench)
        (resumed,) = served.operator.wipes()
        assert (resumed.resumed, resumed.namespace, resumed.scope) == (True, "ns", A)
        await done(served)
        assert not holds(bench, MARK)
        await only_a_is_gone(served)
        await served.kill()
        served = await serve(bench)
        assert served.operator.wipes() == []
        await served.kill()

    Bench().play(work)


async def done(served: Served) -> None:
    keeper = served.run.session.keeper
    assert keeper is not None
    for job in list(keeper.wiper.jobs.values()):
        await job.run()


def test_a_power_failure_at_any_command_of_a_wipe_undoes_it_or_completes_it() -> None:
    async def before(served: Served) -> None:
        for scope in (A, B):
            assert await served.save(KEYS[:3], PAYLOAD if scope == A else CLEAN, scope) == ["stored"] * 3

    async def during(served: Served, told: list[str]) -> None:
        job = served.operator.wipe("ns", A)
        await job.durable()
        told.append("durable")
        assert await served.save(KEYS[3:4], CLEAN, A) == ["stored"]
        told.append("stored")
        await job.run()
        told.append("done")

    async def after(served: Served, told: list[str]) -> None:
        found = await served.load(KEYS[:3], A)
        assert found == [None] * 3 or (not told and found == [PAYLOAD] * 3), told
        assert await served.load(KEYS[:3], B) == [CLEAN] * 3
        if "stored" in told:
            assert await served.load(KEYS[3:4], A) == [CLEAN]
        await done(served)
        medium = served.run.device.medium
        left = any(data.startswith(MARK) for data in medium.current().values())
        assert left == (found == [PAYLOAD] * 3), told
        if "done" in told:
            assert served.operator.wipes() == []

    history = Failing(before, during, after)
    history.play(step=1, survivors=2)
    assert history.cuts > 25


@pytest.mark.parametrize("later", [True, False], ids=["with a store since", "nothing since"])
def test_damage_to_the_journal_never_brings_wiped_objects_back(later: bool) -> None:
    async def work(bench: Bench) -> None:
        served = await two_tenants(bench)
        assert await served.stop()
        served = await serve(bench)
        keeper = served.run.session
        assert keeper.journal is not None
        begin = keeper.journal.acknowledged.position
        await served.wiped("ns", A)
        if later:
            assert await served.save(KEYS[:1], CLEAN, A) == ["stored"]
        end = keeper.journal.acknowledged.position
        journal = served.layout.journal
        await served.kill()
        # Of what was written since only the last batch, if any, is left.
        for at in range(begin, end - BLOCK_BYTES if later else end, BLOCK_BYTES):
            damage(bench, journal.offset_bytes + at % journal.length_bytes)
        for _ in range(3):
            served = await serve(bench)
            assert await served.load(KEYS[1:], A) == [None] * 5
            assert await served.load(KEYS, B) == [CLEAN] * 6
            assert await served.save([b"x"], CLEAN, A) in (["stored"], ["exists"])
            assert await served.load([b"x"], A) == [CLEAN]
            served.run.session.engine.audit()
            await served.kill()

    Bench().play(work)


def test_wipes_that_are_done_are_forgotten_when_no_checkpoint_can_bring_them_back() -> None:
    async def work(bench: Bench) -> None:
        served = await serve(bench)
        keeper = served.run.session.keeper
        assert keeper is not None
        for number in range(300):
            await served.wiped(f"n{number}", None)
        assert len(keeper.register.wipes) <= 80
        assert len(keeper.wiper.jobs) <= 65
        await served.kill()

    Bench().play(work)
