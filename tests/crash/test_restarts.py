"""What a restart must not leave behind: space that is lost, usage that is wrong, bytes of somebody else, an object that is half there."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.crash.bench import NAMESPACE, SCOPE, Base, CrashBench, Life, content_of, prepared
from tests.crash.explore import sound
from tests.crash.scenarios import format_only, populated
from xkv_gateway.card.save import Save
from xkv_gateway.card.store import CardOffline, CardRecovering, JournalFull
from xkv_gateway.core.errors import UnknownLease
from xkv_gateway.core.types import BeginStore, Delete, LoadStatus, Lookup, LookupMode

if TYPE_CHECKING:
    from tests.crash.told import Key

A, B = b"tenant a", b"tenant b"
AU = 4096


def formatted() -> Base:
    return prepared(format_only)


def used_au(bench: CrashBench, scope: bytes) -> int:
    """Units of what a scope holds for certain."""
    sizes = [
        len(content)
        for (_, of, _), may in bench.told.may.items()
        if of == scope
        for content in may
        if content
    ]
    return sum(-(-size // AU) for size in sizes)


async def churn(life: Life, rng: random.Random, client: int) -> None:
    """Store and delete until the end."""
    scope = (A, B)[client % 2]
    while not life.task.done():
        name = b"%d/%d" % (client, rng.randrange(5))
        try:
            if rng.random() < 0.45:
                await life.delete(name, scope=scope)
            else:
                await life.save(name, size_bytes=rng.randrange(3 * AU), scope=scope)
        except (CardOffline, CardRecovering, JournalFull):
            await asyncio.sleep(0.001)


async def usage_is_that_of_its_entries(life: Life) -> None:
    """Before anything was asked."""
    engine = life.session.engine
    usage = engine.usage()
    units = life.session.superblock.layout.capacity_au
    assert usage.free_au + usage.live_au + usage.doomed_au + usage.quarantined_au == units
    assert usage.reserved_au == usage.leases == 0
    engine.audit()
    held = {scope: engine.inspection.tenant(scope).held.charged_bytes for scope in (A, B)}
    assert sum(held.values()) == usage.live_au * AU
    await life.bench.told.judge(life)
    assert held == {scope: used_au(life.bench, scope) * AU for scope in (A, B)}


@pytest.mark.parametrize("rounds", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_after_a_kill_at_any_moment_usage_is_that_of_the_entries_before_the_first_request(
    rounds: int,
) -> None:
    rng = random.Random(7)

    async def work(bench: CrashBench) -> None:
        for _ in range(rounds):
            life = await bench.open(exclusive=True)
            sound(life)
            await usage_is_that_of_its_entries(life)
            await life.owned()
            clients = [
                asyncio.create_task(churn(life, random.Random(rng.random()), each)) for each in range(4)
            ]
            await asyncio.sleep(rng.random() * 0.03)
            life.device.die()
            for number in sorted(bench.medium.in_flight):
                if rng.random() < 0.5:
                    bench.medium.execute(number)
                else:
                    bench.medium.forget(number)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await life.kill()

    assert formatted().bench().run(work)


def test_quotas_refuse_after_a_kill_what_they_refused_before() -> None:
    async def work(bench: CrashBench) -> None:
        life = await bench.open_owned()
        await life.operator.set_limit(A, 4 * AU)
        assert await life.save(b"one", size_bytes=3 * AU, scope=A) == ["stored"]
        assert await life.save(b"two", size_bytes=5 * AU, scope=A) == ["over_quota"]
        assert await life.save(b"two", size_bytes=2 * AU, scope=B) == ["stored"]
        await life.kill()
        life = await bench.open_owned()
        assert await life.save(b"two", size_bytes=5 * AU, scope=A) == ["over_quota"]
        assert await life.save(b"three", size_bytes=AU, scope=A) == ["stored"]
        await life.kill()

    assert formatted().bench().run(work)


@pytest.mark.parametrize("object_bytes_max", [100, 4096, 1 << 20])
def test_other_settings_than_those_of_the_run_before_read_the_same_bytes(object_bytes_max: int) -> None:
    async def work(bench: CrashBench) -> None:
        original = bench.options

        def other(name: str, *, takeover: bool = False, exclusive: bool = False) -> object:
            options = original(name, takeover=takeover, exclusive=exclusive)
            assert options.format_blank is not None
            return replace(
                options,
                format_blank=replace(options.format_blank, au_bytes=64 << 10, max_objects=7),
                limits_of=lambda layout: replace(
                    options.limits_of(layout), object_bytes_max=object_bytes_max, corrupt_hold_ns=1
                ),
                flush=False,
            )

        bench.options = other  # type: ignore[method-assign,assignment]
        life = await bench.open_owned()
        sound(life)
        await bench.told.judge(life)
        assert await life.stop()
        bench.options = original  # type: ignore[method-assign]
        life = await bench.open_owned()
        await bench.told.judge(life)
        await life.kill()

    assert prepared(populated, formatted()).bench().run(work)


def test_a_store_that_dies_in_the_middle_shows_nothing_of_the_tenant_who_was_there_before() -> None:
    """At each of its commands; nor does a tail behind the end of an object."""

    async def before(bench: CrashBench) -> None:
        life = await bench.open_owned()
        bench.content = lambda name, size_bytes: b"\xaa" * size_bytes  # type: ignore[method-assign]
        free_bytes = life.store.engine.usage().free_au * AU
        assert await life.save(b"all", size_bytes=free_bytes, scope=A) == ["stored"]
        await life.delete(b"all", scope=A)
        assert await life.stop()

    async def during(bench: CrashBench) -> None:
        life = await bench.open_owned()
        bench.content = lambda name, size_bytes: b"\x11" * size_bytes  # type: ignore[method-assign]
        await asyncio.gather(
            life.save(b"large", size_bytes=64 * AU, scope=B), life.save(b"odd", size_bytes=AU + 1, scope=B)
        )

    base = prepared(before, formatted())
    bench = base.bench()
    assert bench.run(during)
    points = bench.fuse.points()
    assert len(points) > 8
    for at in points:
        bench = base.bench()
        bench.fuse.at = at
        bench.run(during)
        for image in bench.medium.survivors(6, random.Random(at)):
            after = base.then(bench, image).bench()
            assert after.run(nothing_of_a)


async def nothing_of_a(bench: CrashBench) -> None:
    life = await bench.open_owned()
    await bench.told.judge(life)
    for name, size_bytes in ((b"large", 64 * AU), (b"odd", AU + 1)):
        for scope in (A, B):
            ((status, payload),) = await life.load_all(NAMESPACE, scope, [name])
            assert status is LoadStatus.MISS or (status is LoadStatus.OK and payload == b"\x11" * size_bytes)
    await life.kill()


def test_a_thousand_writers_that_died_leave_no_drift_and_block_no_key() -> None:
    async def one(life: Life, number: int) -> None:
        payload = memoryview(content_of(b"never", number, 20 * AU))
        request = BeginStore(NAMESPACE, SCOPE, [b"key"], [len(payload)])
        save = Save(life.store, request, [payload], life.store.clock() + 1_000_000_000)
        if number % 3 == 0:
            save.give_up()
            return
        saving = asyncio.create_task(save.run())
        await asyncio.sleep(number % 7 * 20e-6)
        outcome = life.store.lookup(Lookup(NAMESPACE, SCOPE, [b"key"], LookupMode.EACH, 0))
        assert outcome.sizes_bytes == [None], "seen before it is stored"
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        # Whether it was stored before it was given up nobody knows.
        await life.delete(b"key")

    async def work(bench: CrashBench) -> None:
        number = 0
        free_au = 0
        for _ in range(10):
            life = await bench.open_owned()
            life.device.faults = replace(life.device.faults, break_on_cancel_probability=0.0)
            usage = life.store.engine.usage()
            assert not free_au or usage.free_au == free_au, "space drifts away"
            free_au = usage.free_au
            for _ in range(100):
                number += 1
                await one(life, number)
                # What was given up in the middle is out of use for as long as it may land.
                await asyncio.sleep(61 if number % 10 == 0 else 0)
            life.store.engine.audit()
            await life.kill()
        life = await bench.open_owned()
        assert life.store.engine.usage().free_au == free_au
        assert await life.save(b"key") == ["stored"]
        await life.kill()

    assert prepared(populated, formatted()).bench().run(work)


def test_leases_that_nobody_returned_hold_nothing_after_a_restart() -> None:
    async def work(bench: CrashBench) -> None:
        life = await bench.open_owned()
        await life.fill()
        names = [
            name for (_, scope, name), may in bench.told.may.items() if scope == SCOPE and None not in may
        ]
        for _ in range(5):
            lease = life.store.lookup(Lookup(NAMESPACE, SCOPE, names, LookupMode.EACH, 60_000_000_000)).lease
        assert lease is not None
        assert life.store.engine.usage().leased_au > 200
        await life.kill()
        life = await bench.open_owned()
        assert life.store.engine.usage().leased_au == life.store.engine.usage().leases == 0
        with pytest.raises(UnknownLease):
            life.store.release(lease)
        bench.told.evicts = True
        units = life.session.superblock.layout.capacity_au
        assert await life.save(b"as large as the card", size_bytes=units * AU) == ["stored"]
        await life.kill()

    assert prepared(populated, formatted()).bench().run(work)


def test_whatever_is_ended_twice_is_ended_once_also_across_restarts() -> None:
    async def work(bench: CrashBench) -> None:
        for life_number in range(6):
            life = await bench.open_owned()
            engine, store = life.store.engine, life.store
            await life.save(b"key", size_bytes=3 * AU)
            lease = store.lookup(Lookup(NAMESPACE, SCOPE, [b"key"], LookupMode.EACH, 1_000_000_000)).lease
            assert lease is not None
            payload = memoryview(bytes(AU))
            request = BeginStore(NAMESPACE, SCOPE, [b"other"], [AU])
            saving = asyncio.create_task(Save(store, request, [payload], store.clock() + 10**9).run())
            await asyncio.sleep(life_number * 50e-6)
            both: list[Key] = [(NAMESPACE, SCOPE, b"key"), (NAMESPACE, SCOPE, b"other")]
            bench.told.ever.setdefault(both[1], {None}).add(bytes(payload))
            bench.told.may[both[1]] = frozenset({None, bytes(payload)})
            for _ in range(2):
                store.delete(Delete(NAMESPACE, SCOPE, [b"key", b"other"]))
                engine.audit()
            await life.delete(b"key", b"other")
            await saving
            await life.delete(b"other")
            store.release(lease)
            with pytest.raises(UnknownLease):
                store.release(lease)
            engine.audit()
            await asyncio.sleep(2)
            await life.kill()
            life = await bench.open_owned()
            sound(life)
            await bench.told.judge(life)
            await life.kill()

    assert prepared(populated, formatted()).bench().run(work)
