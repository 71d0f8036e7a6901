"""Several gateways on one card, and cards that change behind a gateway's back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.crash.bench import AU_BYTES, OBJECTS_MAX, CrashBench, Life
from tests.crash.hosts import Hosts
from tests.crash.scenarios import SCENARIOS
from tests.sim.medium import ZEROES, Image, Medium, Written
from xkv_gateway.card import ownership
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.layout import plan
from xkv_gateway.card.session import Phase
from xkv_gateway.card.store import CardOffline
from xkv_gateway.card.superblock import Chosen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.crash.bench import Base

SEEDS = 8
SEEDS_SLOW = 150


def base() -> Base:
    return next(scenario for scenario in SCENARIOS if scenario.name == "store").base()


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


def overwrite(medium: Medium, offset_bytes: int, data: bytes) -> None:
    write = Written(offset_bytes, data)
    number = medium.send(write)
    medium.execute(number)
    write.returned = True
    medium.flush({id(write)})


def content(medium: Medium) -> Image:
    """What reads see."""
    return {sector: data for sector, data in medium.current().items() if data != ZEROES}


async def zeroed(bench: CrashBench) -> None:
    layout = plan(bench.medium.size_bytes, bench.medium.block_bytes, AU_BYTES, OBJECTS_MAX)
    for offset_bytes in layout.superblock_offsets:
        overwrite(bench.medium, offset_bytes, bytes(4096))


async def formatted_anew(bench: CrashBench) -> None:
    device = bench.device()
    layout = plan(bench.medium.size_bytes, bench.medium.block_bytes, AU_BYTES, OBJECTS_MAX)
    facts = ownership.facts_of(device)
    await ownership.format_card(
        CardBlocks(device, bench.loop.clock),
        layout,
        facts,
        label="",
        sequence=99,
        wall_ns=1,
        entropy=bench.rng.randbytes,
    )


async def taken(bench: CrashBench) -> None:
    device = bench.device()
    found = await ownership.read_superblocks(CardBlocks(device, bench.loop.clock), device.geometry.size_bytes)
    assert isinstance(found, Chosen)
    stamp = found.superblock.stamp
    owner = bench.options("thief").owner
    theirs = ownership.owned(found.superblock, owner, epoch=stamp.epoch + 1, run_id=bytes(16), wall_ns=1)
    await ownership.write_both(CardBlocks(device, bench.loop.clock), theirs, first_copy=0)


async def overwritten(bench: CrashBench) -> None:
    overwrite(bench.medium, 0, b"somebody else's data".ljust(4096, b"."))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (zeroed, "zeroed"),
        (formatted_anew, "formatted anew"),
        (taken, "taken over by thief"),
        (overwritten, "overwritten"),
    ],
)
@pytest.mark.parametrize("break_at_us", [0, 150, 300, 450, 600, 800])
def test_a_run_that_finds_another_card_behind_its_connection_ends_and_writes_nothing(
    change: Callable[[CrashBench], Awaitable[None]], reason: str, break_at_us: int
) -> None:
    async def storing(life: Life) -> None:
        for number in range(10):
            with contextlib.suppress(CardOffline):
                await life.save(b"%d" % number, size_bytes=9000)

    async def work(bench: CrashBench) -> None:
        life = await bench.open_owned()
        task = asyncio.create_task(storing(life))
        await asyncio.sleep(break_at_us / 1e6)
        life.device.break_connection(5_000_000_000)
        await asyncio.sleep(1)
        await change(bench)
        before, told = content(bench.medium), bench.told.copy()
        await asyncio.sleep(10)
        assert isinstance(life.task.exception(), CardLost)
        assert reason in str(life.task.exception())
        assert life.session.phase is Phase.CLOSED
        assert content(bench.medium) == before, "it wrote to a card that is not its own"
        await asyncio.sleep(60)
        assert task.done()
        assert all(bench.told.may[key] >= may for key, may in told.may.items()), "something was acknowledged"
        assert not await life.session.stop()
        assert content(bench.medium) == before
        await life.kill()

    assert base().bench().run(work)
