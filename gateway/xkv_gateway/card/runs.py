"""Which device transfers a batch of objects needs: pure planning, no I/O.

Neighbouring objects of a batch usually lie side by side on the card, since a store allocates them together. They
travel as one transfer (a *run*) with one buffer for each object: fewer commands, and no task for each key.

    batch   |  object 0  |  object 1  |   object 2   |        object 3 (two extents)
    card    |====== run 0, one transfer ======|            |== run 1 ==|      |== run 2 ==|
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xkv_gateway.core.types import Extent


@dataclass(frozen=True, slots=True)
class DataArea:
    """Where the allocation units lie on the namespace."""

    start_bytes: int
    """Offset of unit 0; a multiple of the block size."""
    au_bytes: int
    block_bytes: int

    def __post_init__(self) -> None:
        """Check what every transfer relies on."""
        assert self.au_bytes % self.block_bytes == 0
        assert self.start_bytes % self.block_bytes == 0


@dataclass(slots=True)
class Run:
    """One transfer: `buffers` lie one after the other from `offset_bytes` on."""

    offset_bytes: int
    length_bytes: int = 0
    buffers: list[memoryview] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    """Which objects of the batch have bytes in this run, by index, ascending."""


def plan_runs(
    objects: Iterable[tuple[int, Sequence[Extent], memoryview]],
    area: DataArea,
    pad: memoryview,
    run_bytes_max: int,
) -> list[Run]:
    """Plan the transfers of a batch.

    Args:
        objects: (index, extents, payload buffer) for each object. The payload fills the extents in order.
        area: the geometry of the data area.
        pad: at least one block; stands for the rest of an object's last block (zeroes for a write, a place to
            throw away for a read).
        run_bytes_max: a run stops growing beyond this; a single extent may be longer.

    Returns:
        The runs, in the order of the objects. Their lengths are multiples of the block size.
    """
    runs: list[Run] = []
    run: Run | None = None
    for index, extents, payload in objects:
        position, size_bytes = 0, len(payload)
        for extent in extents:
            offset_bytes = area.start_bytes + extent.start_au * area.au_bytes
            take = min(extent.count_au * area.au_bytes, size_bytes - position)
            if take <= 0:
                break
            pad_bytes = -take % area.block_bytes
            length_bytes = take + pad_bytes
            if (
                run is None
                or run.offset_bytes + run.length_bytes != offset_bytes
                or run.length_bytes + length_bytes > run_bytes_max
            ):
                run = Run(offset_bytes)
                runs.append(run)
            run.buffers.append(payload if take == size_bytes else payload[position : position + take])
            if pad_bytes:
                run.buffers.append(pad[:pad_bytes])
            run.length_bytes += length_bytes
            if not run.members or run.members[-1] != index:
                run.members.append(index)
            position += take
        assert position == size_bytes, "the extents of an object hold all of its payload"
    return runs
