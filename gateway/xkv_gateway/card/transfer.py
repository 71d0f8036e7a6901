"""Moves the payloads of a batch between memory and the card, and says for each object how that went."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from xkv_gateway.card.runs import plan_runs
from xkv_nvmeof.blockdev import CommandFailed, DataCorrupted, DeviceError, DeviceOffline, OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from xkv_gateway.card.runs import DataArea, Run
    from xkv_gateway.core.types import Extent
    from xkv_nvmeof.blockdev import BlockDevice

    Move = Callable[[int, Sequence[memoryview]], Awaitable[None]]

Placed = tuple[int, "Sequence[Extent]", memoryview]
"""(index in the batch, extents, payload buffer)."""

RUN_BYTES_MAX = 1 << 20
"""Long enough to amortise a command, short enough to keep several queues busy with one batch."""

RUNS_IN_FLIGHT_MAX = 256
"""Over all requests. The device queues behind its own bound; this keeps that queue short and its deadlines honest."""


class Transfer:
    """Batched reads and writes of whole objects."""

    def __init__(self, device: BlockDevice, area: DataArea) -> None:
        self._device = device
        self._area = area
        self._zeroes = memoryview(bytes(area.block_bytes))
        # What a read brings beyond the end of a payload lands here, and is never looked at.
        self._discard = memoryview(bytearray(area.block_bytes))
        self._gate = asyncio.Semaphore(RUNS_IN_FLIGHT_MAX)

    async def read(self, objects: Sequence[Placed]) -> dict[int, DeviceError]:
        """Fill each object's buffer. Returns the failure of each object that failed, by its index."""
        return await self._move(objects, self._device.read_into, self._discard)

    async def write(self, objects: Sequence[Placed]) -> dict[int, DeviceError]:
        """Write each object's buffer. Returns the failure of each object that failed, by its index.

        Where several commands of one object failed, the failure is the one that binds its space the longest.
        """
        return await self._move(objects, self._device.write_from, self._zeroes)

    async def _move(self, objects: Sequence[Placed], move: Move, pad: memoryview) -> dict[int, DeviceError]:
        runs = plan_runs(objects, self._area, pad, RUN_BYTES_MAX)
        failures, shared = await self._carry_out(runs, move)
        # A run shared by several objects failed as a whole: find out which of them is to blame.
        again = [placed for placed in objects if placed[0] in shared]
        if again:
            for placed in again:
                single, _ = await self._carry_out(plan_runs([placed], self._area, pad, RUN_BYTES_MAX), move)
                failures.pop(placed[0], None)
                failures.update(single)
        return failures

    async def _carry_out(self, runs: Sequence[Run], move: Move) -> tuple[dict[int, DeviceError], set[int]]:
        """Return the failures by object, and which of these objects may only have shared another's fate."""
        if len(runs) == 1:
            results = [await self._one(runs[0], move)]
        else:
            results = await asyncio.gather(*(self._one(run, move) for run in runs))
        failures: dict[int, DeviceError] = {}
        shared: set[int] = set()
        for run, error in zip(runs, results, strict=True):
            if error is None:
                continue
            for member in run.members:
                failures[member] = _longest_binding(failures.get(member), error)
            if len(run.members) > 1:
                shared.update(run.members)
        # Only what is certainly over may be sent once more.
        shared = {m for m in shared if isinstance(failures[m], CommandFailed | DataCorrupted)}
        return failures, shared

    async def _one(self, run: Run, move: Move) -> DeviceError | None:
        async with self._gate:
            try:
                await move(run.offset_bytes, run.buffers)
            except DeviceError as error:
                return error
        return None


def settles_at_ns(error: DeviceError) -> int | None:
    """Until when the target may still execute the failed write; None: it is certainly over."""
    return error.settles_at_ns if isinstance(error, OutcomeUnknown) else None


def _longest_binding(one: DeviceError | None, other: DeviceError) -> DeviceError:
    """Return the failure that says the most about what may still happen."""
    if one is None:
        return other
    ranked = sorted((one, other), key=lambda e: (settles_at_ns(e) or 0, not isinstance(e, DeviceOffline)))
    return ranked[-1]
