"""What tests of tenants and wipes on a card share: runs with an operator, and a power failure at any command."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.card.runs import Bench, Run
from tests.sim.medium import SECTOR_BYTES
from xkv_gateway.card.load import Load
from xkv_gateway.card.operator import Operator
from xkv_gateway.card.save import Save
from xkv_gateway.core.types import BeginLoad, BeginStore, LoadStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from tests.sim.device import SimDevice
    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.wipe import WipeJob

A, B, OTHER = b"tenant-a", b"tenant-b", b"other"
MARK = b"\xa5" * 64


@dataclass(eq=False)
class Served:
    """A run that owns its card, and its operator."""

    run: Run
    operator: Operator

    @property
    def layout(self) -> Layout:
        return self.run.session.superblock.layout

    async def save(
        self, keys: Sequence[bytes], payload: bytes, scope: bytes = A, ns: str = "ns"
    ) -> list[str]:
        request = BeginStore(ns, scope, list(keys), [len(payload)] * len(keys))
        save = Save(
            self.run.store, request, [memoryview(payload)] * len(keys), self.run.store.clock() + 5 * 10**9
        )
        return [status.value for status in await save.run()]

    async def load(self, keys: Sequence[bytes], scope: bytes = A, ns: str = "ns") -> list[bytes | None]:
        loaded = await Load(self.run.store, BeginLoad(ns, scope, list(keys), None), None).run()
        return [bytes(each.payload or b"") if each.status is LoadStatus.OK else None for each in loaded]

    async def wiped(self, namespace: str, scope: bytes | None) -> WipeJob:
        job = self.operator.wipe(namespace, scope)
        await job.run()
        return job

    async def kill(self) -> None:
        await self.run.kill()

    async def stop(self) -> bool:
        return await self.run.stop()


async def serve(bench: Bench, device: SimDevice | None = None) -> Served:
    """Open the card and wait until it is ours."""
    run = await bench.open(device=device)
    await run.owned()
    return Served(run, Operator(run.session, run.store))


class Failing:
    """Plays a history on a card again and again, and lets the power fail at each of its commands in turn.

    Args:
        before: what is on the card before; ends in order.
        during: what is cut.
        after: what must hold on each survivor, told how much of `during` had been acknowledged.
    """

    def __init__(
        self,
        before: Callable[[Served], Coroutine[Any, Any, None]],
        during: Callable[[Served, list[str]], Coroutine[Any, Any, None]],
        after: Callable[[Served, list[str]], Coroutine[Any, Any, None]],
    ) -> None:
        self._before, self._during, self._after = before, during, after
        self.cuts = 0

    def play(self, *, step: int, survivors: int) -> None:
        """Cut at every `step`-th command."""
        at = 1
        while self._cut(at, survivors):
            at += step
            self.cuts += 1

    def _cut(self, at: int, survivors: int) -> bool:
        """Cut at the command; tell whether there was one."""
        finished = True
        for seed in range(survivors):
            bench = Bench()
            told: list[str] = []

            ends: list[bool] = []

            async def history(bench: Bench) -> None:
                served = await serve(bench)
                await self._before(served)
                assert await served.stop()
                ends.append(await self._one(bench, told, at, seed))  # noqa: B023 - played at once

            bench.play(history)
            finished = ends[0]
        return not finished

    async def _one(self, bench: Bench, told: list[str], at: int, seed: int) -> bool:
        device = bench.device()
        served = await serve(bench, device)
        lost = asyncio.Event()
        device._on_power_loss = lost.set
        device._power_loss_at = device.commands + at
        work = asyncio.ensure_future(self._during(served, told))
        dark = asyncio.ensure_future(lost.wait())
        await asyncio.wait((work, dark), return_when=asyncio.FIRST_COMPLETED)
        finished = work.done()
        for task in (work, dark):
            task.cancel()
        await asyncio.gather(work, dark, return_exceptions=True)
        if finished:
            work.result()
        image = bench.medium.draw_survivor(random.Random(seed))
        if not lost.is_set():
            device.lose_power()
        await served.kill()
        bench.medium.lose_power(image)
        again = await serve(bench)
        await self._after(again, told)
        again.run.session.engine.audit()
        await again.kill()
        return finished


def damage(bench: Bench, offset_bytes: int) -> None:
    """Flip a bit for good."""
    bench.medium.damage(offset_bytes // SECTOR_BYTES, 13)


def holds(bench: Bench, what: bytes) -> bool:
    """Whether these bytes are anywhere on the medium, at the start of a sector."""
    image = bench.medium.current()
    return any(data.startswith(what) for data in image.values())
