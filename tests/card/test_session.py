from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.card.runs import MIB, SIZE_BYTES, Bench, Run
from xkv_gateway.card import heartbeat as heartbeat_format
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.journal_format import beginning
from xkv_gateway.card.layout import HEARTBEAT_OFFSET, superblock_1_offset
from xkv_gateway.card.recovery import OBJECTS_AT_ONCE, Recovery, made_of
from xkv_gateway.card.session import Phase
from xkv_gateway.card.store import CardRecovering
from xkv_gateway.card.structure import Stamp
from xkv_gateway.card.superblock import encode
from xkv_gateway.core.restore import Restored
from xkv_gateway.core.types import EngineLimits
from xkv_gateway.errors import CardUnavailableError

if TYPE_CHECKING:
    from xkv_gateway.card.superblock import Superblock

ZERO_BLOCK = bytes(4096)
LAST = superblock_1_offset(SIZE_BYTES)


def test_a_second_gateway_is_refused_by_name_while_the_first_lives() -> None:
    async def work(bench: Bench) -> None:
        first = await bench.open_owned("first")
        with pytest.raises(CardUnavailableError, match="lives: first"):
            await bench.open("second")
        assert await first.save(b"key", b"bytes") == "stored"
        assert await first.stop()

    Bench().play(work)


def test_an_owner_that_has_not_beaten_yet_is_seen_all_the_same() -> None:
    async def work(bench: Bench) -> None:
        first = await bench.open_owned("first")
        bench.overwrite(HEARTBEAT_OFFSET, ZERO_BLOCK)
        with pytest.raises(CardUnavailableError, match="lives"):
            await bench.open("second")
        await first.stop()

    Bench().play(work)


def test_after_a_takeover_the_first_writes_nothing_more_not_even_when_it_ends_in_order() -> None:
    async def work(bench: Bench) -> None:
        first = await bench.open_owned("first")
        assert await first.save(b"key", b"bytes") == "stored"
        taking = asyncio.create_task(bench.open("second", takeover=True))
        with pytest.raises(CardLost, match="taken over by second"):
            await first.task
        assert first.session.phase is Phase.CLOSED
        assert not first.store.online
        written = first.device.commands
        assert not await first.session.stop()
        assert first.device.commands == written
        second = await taking
        await second.owned()
        superblock: Superblock = await bench.superblock()
        assert superblock.stamp == second.session.superblock.stamp
        assert not superblock.clean
        assert await second.load(b"key") == b"bytes"
        assert await second.stop()
        await first.device.aclose()

    Bench().play(work)


def test_an_end_in_order_that_meets_a_takeover_leaves_the_card_to_the_new_owner() -> None:
    async def work(bench: Bench) -> None:
        first = await bench.open_owned("first")
        taking = asyncio.create_task(bench.open("second", takeover=True))
        while (await bench.superblock()).owner != "second":  # noqa: ASYNC110 - what is on the card has no event
            await asyncio.sleep(0.001)
        with pytest.raises(CardLost):
            await first.stop()
        second = await taking
        await second.owned()
        assert await second.save(b"key", b"bytes") == "stored"
        assert await second.stop()

    Bench().play(work)


def test_after_a_kill_lookups_are_served_at_once_and_writes_when_the_run_before_is_settled() -> None:
    async def work(bench: Bench) -> None:
        first = await bench.open_owned("first")
        await first.save(b"key", b"bytes")
        await first.kill()
        began_ns = bench.loop.clock()
        second = await bench.open("second")
        assert await second.load(b"key") == b"bytes"
        with pytest.raises(CardRecovering):
            second.store.require_writable()
        await second.owned()
        assert bench.loop.clock() - began_ns >= 3_000_000_000
        second.store.require_writable()
        assert await second.stop()

    Bench().play(work)


def test_an_owner_that_comes_back_while_another_one_waits_keeps_its_card() -> None:
    async def work(bench: Bench) -> None:
        first = await bench.open_owned("first")
        first.device.break_connection(6_200_000_000)
        second = await bench.open("second")
        # Its keep-alive is short and the watch is long: what is left of the wait is short, so that it is made longer.
        second.session.settled_at_ns += 10_000_000_000
        with pytest.raises(CardLost, match="lives after all: first"):
            await second.task
        assert await first.save(b"key", b"bytes") == "stored"
        assert await first.stop()

    Bench().play(work)


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("damage", [ZERO_BLOCK, b"\xff" * 4096], ids=["never written", "damaged"])
def test_one_copy_of_the_superblock_is_enough_and_the_other_is_repaired(copy: int, damage: bytes) -> None:
    async def work(bench: Bench) -> None:
        first = await bench.open_owned()
        await first.save(b"key", b"bytes")
        await first.stop()
        bench.overwrite((0, LAST)[copy], damage)
        second = await bench.open_owned()
        assert await second.load(b"key") == b"bytes"
        bench.overwrite((0, LAST)[1 - copy], ZERO_BLOCK)
        assert (await bench.superblock()).stamp == second.session.superblock.stamp
        await second.kill()

    Bench().play(work)


def test_the_card_may_go_away_while_the_next_owner_waits() -> None:
    async def work(bench: Bench) -> None:
        first = await bench.open_owned("first")
        await first.kill()
        second = await bench.open("second")
        second.session.settled_at_ns += 1_000_000_000
        await asyncio.sleep(0.5)
        second.device.break_connection(20_000_000_000)
        await second.owned()
        assert await second.save(b"key", b"bytes") == "stored"
        assert await second.stop()

    Bench().play(work)


def test_a_card_that_has_grown_keeps_its_second_copy_where_it_was() -> None:
    async def work(bench: Bench) -> None:
        first = await bench.open_owned()
        await first.save(b"key", b"bytes")
        await first.stop()
        bench.medium.size_bytes += 16 * MIB
        second = await bench.open_owned()
        assert second.session.superblock.layout.size_bytes == SIZE_BYTES
        assert await second.load(b"key") == b"bytes"
        await second.stop()
        third = await bench.open()
        assert third.session.recovery.objects == 1
        await third.kill()

    Bench().play(work)


def test_a_card_that_has_shrunk_is_refused() -> None:
    async def work(bench: Bench) -> None:
        await (await bench.open_owned()).stop()
        bench.medium.size_bytes -= 16 * MIB
        with pytest.raises(CardUnavailableError, match="size_bytes"):
            await bench.open()

    Bench().play(work)


def test_an_absurd_interval_in_the_heartbeat_keeps_nobody_waiting_for_days() -> None:
    async def work(bench: Bench) -> None:
        first = await bench.open_owned()
        await asyncio.sleep(0.5)
        beat = heartbeat_format.decode(
            bench.medium.read(HEARTBEAT_OFFSET, 4096), first.session.superblock.stamp.card_uuid
        )
        assert beat is not None
        await first.kill()
        bench.overwrite(HEARTBEAT_OFFSET, heartbeat_format.encode(replace(beat, interval_ms=0xFFFFFFFF)))
        began_ns = bench.loop.clock()
        second = await bench.open()
        assert bench.loop.clock() - began_ns < 60_000_000_000
        await second.kill()

    Bench().play(work)


@pytest.mark.parametrize("takeover", [False, True])
def test_of_gateways_that_open_a_card_at_the_same_moment_at_most_one_acknowledges(takeover: bool) -> None:
    async def one(bench: Bench, name: str, delay_s: float) -> bytes | None:
        await asyncio.sleep(delay_s)
        try:
            run = await bench.open(name, takeover=takeover)
        except CardUnavailableError:
            return None
        try:
            await run.owned()
            stored = asyncio.create_task(run.save(name.encode(), name.encode()))
            await asyncio.wait((stored, run.task), return_when=asyncio.FIRST_COMPLETED)
            if stored.done() and stored.result() == "stored":
                return name.encode()
            stored.cancel()
            await asyncio.gather(stored, return_exceptions=True)
        except CardLost:
            return None
        finally:
            await run.kill()
        return None

    async def work(bench: Bench) -> None:
        await (await bench.open_owned()).stop()
        delays = [bench.rng.random() * 0.004 for _ in range(3)]
        told = await asyncio.gather(*(one(bench, f"host {i}", delay) for i, delay in enumerate(delays)))
        last = await bench.open()
        for name in filter(None, told):
            assert await last.load(name) == name
        await last.kill()

    for seed in range(25):
        Bench(seed).play(work)


def test_a_ring_that_earlier_runs_have_filled_is_relieved_and_stores_go_on() -> None:
    async def work(bench: Bench) -> None:
        # Each life is too short for a checkpoint of its own accord; together they fill the ring.
        for life in range(40):
            run = await bench.open_owned()
            for number in range(20):
                assert await run.save(b"%d/%d" % (life, number), b"bytes") == "stored"
            await run.kill()
        last = await bench.open()
        assert last.session.recovery.objects == 800
        await last.kill()

    Bench().play(work)


def test_many_small_stores_at_a_time_never_fill_the_ring_beyond_what_a_checkpoint_needs() -> None:
    async def client(run: Run, number: int) -> None:
        for index in range(20):
            assert await run.save(b"%d/%d" % (number, index), b"bytes") == "stored"
            await asyncio.sleep(run.store.clock() % 7 / 1000)

    async def work(bench: Bench) -> None:
        run = await bench.open_owned()
        await asyncio.gather(*(client(run, number) for number in range(40)))
        assert run.session.checkpointer is not None
        assert run.session.checkpointer.completed > 1
        assert run.store.saves == 0
        assert await run.stop()

    for seed in range(5):
        Bench(seed).play(work)


@pytest.mark.parametrize(
    ("what", "words"), [("zeroed", "zeroed"), ("exchanged", "formatted anew"), ("overwritten", "overwritten")]
)
def test_a_card_that_changes_under_its_owner_ends_the_run_within_two_seconds(what: str, words: str) -> None:
    async def work(bench: Bench) -> None:
        run = await bench.open_owned()
        superblock = run.session.superblock
        other = replace(superblock, stamp=replace(superblock.stamp, card_uuid=b"\x05" * 16))
        blocks = {"zeroed": ZERO_BLOCK, "exchanged": encode(other, 0), "overwritten": b"\xff" * 4096}
        bench.overwrite(0, blocks[what])
        began_ns = bench.loop.clock()
        with pytest.raises(CardLost, match=words):
            await run.task
        assert bench.loop.clock() - began_ns < 2_000_000_000
        assert not await run.session.stop()
        assert bench.medium.read(0, 4096) == blocks[what]
        await run.device.aclose()

    Bench().play(work)


def test_a_damaged_copy_of_the_superblock_does_not_end_the_run_of_its_owner() -> None:
    async def work(bench: Bench) -> None:
        run = await bench.open_owned()
        block = bytearray(bench.medium.read(0, 4096))
        block[300] ^= 1
        bench.overwrite(0, bytes(block))
        await asyncio.sleep(5)
        assert await run.save(b"key", b"bytes") == "stored"
        taking = asyncio.create_task(bench.open("second", takeover=True))
        with pytest.raises(CardLost, match="taken over by second"):
            await run.task
        second = await taking
        await second.owned()
        assert await second.load(b"key") == b"bytes"
        await second.kill()
        await run.device.aclose()

    Bench().play(work)


def test_a_run_whose_superblocks_are_both_damaged_ends() -> None:
    async def work(bench: Bench) -> None:
        run = await bench.open_owned()
        for offset in (0, LAST):
            block = bytearray(bench.medium.read(offset, 4096))
            block[300] ^= 1
            bench.overwrite(offset, bytes(block))
        with pytest.raises(CardLost, match="both superblocks are damaged"):
            await run.task
        await run.device.aclose()

    Bench().play(work)


async def test_other_work_of_the_loop_goes_on_while_a_large_index_is_made_and_a_small_one_is_made_at_once() -> (
    None
):
    limits = EngineLimits(
        capacity_au=1,
        au_bytes=4096,
        max_objects=1,
        object_bytes_max=1,
        lease_ttl_max_ns=1,
        leases_per_scope_max=1,
        leased_bytes_per_scope_max=1,
    )
    recovery = Recovery(Restored(limits, 0), beginning(Stamp(bytes(16), 1, bytes(16))), 0)
    others = threading.Event()
    asyncio.get_running_loop().call_soon(others.set)
    assert not await made_of(recovery, others.is_set)
    others.clear()
    asyncio.get_running_loop().call_soon(others.set)
    recovery.objects = OBJECTS_AT_ONCE
    assert await made_of(recovery, lambda: others.wait(60))
