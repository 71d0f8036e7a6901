"""The card's own structures, written over connections that break: whatever lands late, the last bytes that were written stay."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

import pytest

from tests.sim.device import SimDevice
from tests.sim.faults import Faults
from tests.sim.loop import SimLoop
from tests.sim.medium import Medium
from xkv_gateway.card.blocks import CardBlocks, CardFailed
from xkv_gateway.card.echoes import Echoes
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_nvmeof.blockdev import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

SETTLE_NS: Final = 4_000_000_000
OFFLINE_NS: Final = 50_000_000
LATENCY_S: Final = 0.000_15
"""What a write takes, about."""
SEEDS: Final = 40
OLD: Final = b"o" * BLOCK_BYTES
NEW: Final = b"n" * BLOCK_BYTES


class Card:
    """A card whose connection breaks when it is told to."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.loop = SimLoop(self.rng)
        self.medium = Medium(1 << 20, 512)
        self.device = SimDevice(self.loop, self.medium, self.rng, Faults(settle_ns=SETTLE_NS))
        self.blocks = CardBlocks(self.device, self.loop.clock)

    def play(self, work: Callable[[Card], Coroutine[None, None, None]]) -> None:
        async def until_settled() -> None:
            await work(self)
            await asyncio.sleep(2 * SETTLE_NS / 1e9)
            assert await self.blocks.read(0, BLOCK_BYTES) == NEW

        try:
            self.loop.run(until_settled())
        finally:
            self.loop.close()

    async def lose(self) -> None:
        """Break the connection while a write is on its way, as a rule."""
        await asyncio.sleep(self.rng.random() * LATENCY_S)
        self.device.break_connection(OFFLINE_NS)


async def written_again(card: Card) -> None:
    writing = asyncio.create_task(card.blocks.write(0, [OLD], flush=True))
    await card.lose()
    await writing
    await card.blocks.write(0, [NEW], flush=True)


async def in_a_draft(card: Card) -> None:
    draft = card.blocks.draft()
    writing = asyncio.create_task(draft.write(0, OLD))
    await card.lose()
    await writing
    await draft.flush()
    await card.blocks.write(0, [NEW], flush=False)


async def cut_short(card: Card) -> None:
    writing = asyncio.create_task(card.blocks.write(0, [OLD], flush=True))
    await card.lose()
    writing.cancel()
    await asyncio.wait([writing])
    await card.blocks.write(0, [NEW], flush=True)


async def a_part_of_it(card: Card) -> None:
    writing = asyncio.create_task(card.blocks.write(0, [OLD, OLD], flush=True))
    await card.lose()
    await writing
    await card.blocks.write(BLOCK_BYTES, [OLD], flush=True)
    await card.blocks.write(0, [NEW], flush=True)


@pytest.mark.parametrize("work", [written_again, in_a_draft, cut_short, a_part_of_it])
def test_a_write_that_lands_late_changes_nothing_that_was_written_since(
    work: Callable[[Card], Coroutine[None, None, None]],
) -> None:
    for seed in range(SEEDS):
        Card(seed).play(work)


def test_only_other_bytes_in_the_same_place_wait() -> None:
    echoes = Echoes()
    assert not echoes
    echoes.add(4096, [b"abcd", b"efgh"], 100)
    assert echoes
    assert echoes.settled_at_ns(4096, [b"abcdefgh"], 10) == 10
    assert echoes.settled_at_ns(4098, [b"cd", b"e"], 10) == 10
    assert echoes.settled_at_ns(4098, [b"cd", b"E"], 10) == 100
    assert echoes.settled_at_ns(4090, [b"123456abX"], 10) == 100
    assert echoes.settled_at_ns(4088, [b"12345678"], 10) == 10, "ends where it begins"
    assert echoes.settled_at_ns(4104, [b"x"], 10) == 10, "begins where it ends"


def test_it_waits_for_the_last_of_several_and_forgets_what_has_settled() -> None:
    echoes = Echoes()
    echoes.add(0, [b"old"], 100)
    echoes.add(0, [b"mid"], 200)
    assert echoes.settled_at_ns(0, [b"mid"], 10) == 100
    assert echoes.settled_at_ns(0, [b"new"], 10) == 200
    assert echoes.settled_at_ns(0, [b"new"], 200) == 200
    assert not echoes


class Refusing(SimDevice):
    """Refuses everything until a moment, and says whether trying again may help."""

    until_ns = 0
    do_not_retry = False

    def _judge(self, what: str) -> None:
        if self._loop.clock() < self.until_ns:
            raise CommandFailed(
                f"{what}: NAMESPACE_NOT_READY",
                status_code_type=0,
                status_code=0x82,
                do_not_retry=self.do_not_retry,
            )

    async def write_from(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        self._judge("WRITE")
        await super().write_from(offset_bytes, buffers)

    async def read_into(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        self._judge("READ")
        await super().read_into(offset_bytes, buffers)

    async def flush(self) -> None:
        self._judge("FLUSH")
        await super().flush()


PIECES: Final[dict[str, Callable[[CardBlocks], Awaitable[object]]]] = {
    "write": lambda blocks: blocks.write(0, [NEW], flush=True),
    "read": lambda blocks: blocks.read_surely(0, BLOCK_BYTES),
    "flush": lambda blocks: blocks.flush(),
}


@pytest.mark.parametrize("what", PIECES)
@pytest.mark.parametrize(
    ("lasts_s", "do_not_retry", "fails_after_s"),
    [(8, False, None), (60, False, 10), (60, True, 0), (0.06, True, None)],
    ids=["passes", "does not pass", "is final", "is not repeated"],
)
def test_what_may_pass_is_waited_for_and_what_is_final_is_not(
    what: str, lasts_s: float, do_not_retry: bool, fails_after_s: int | None
) -> None:
    rng = random.Random(1)
    loop = SimLoop(rng)
    device = Refusing(loop, Medium(1 << 20, 512), rng, Faults(settle_ns=SETTLE_NS))
    blocks = CardBlocks(device, loop.clock)
    device.until_ns, device.do_not_retry = loop.clock() + int(lasts_s * 1e9), do_not_retry

    async def work() -> None:
        began_ns = loop.clock()
        if fails_after_s is None:
            await PIECES[what](blocks)
            return
        with pytest.raises(CardFailed, match="NAMESPACE_NOT_READY"):
            await PIECES[what](blocks)
        assert fails_after_s <= (loop.clock() - began_ns) / 1e9 < fails_after_s + 1

    try:
        loop.run(work())
    finally:
        loop.close()
