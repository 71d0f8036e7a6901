"""Reads of a simulated medium, and what may go wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.medium import SECTOR_BYTES, Medium
from xkv_nvmeof.blockdev import CommandFailed, DataCorrupted
from xkv_nvmeof.spec import Status

if TYPE_CHECKING:
    import asyncio
    import random

    from tests.sim.faults import Faults, Injected


def faulty_read(
    medium: Medium,
    faults: Faults,
    rng: random.Random,
    injected: Injected,
    offset_bytes: int,
    length_bytes: int,
) -> bytes:
    """What a read brings: now and then another place's bytes, a flipped bit, or a wrong digest (`DataCorrupted`)."""
    if rng.random() < faults.misdirect_probability:
        injected.read_faults += 1
        blocks = (medium.size_bytes - length_bytes) // medium.block_bytes
        return medium.read(rng.randrange(blocks + 1) * medium.block_bytes, length_bytes)
    if rng.random() < faults.persistent_flip_probability:
        injected.persistent_flips += 1
        sector = offset_bytes // SECTOR_BYTES + rng.randrange(length_bytes // SECTOR_BYTES)
        medium.damage(sector, rng.randrange(SECTOR_BYTES * 8))
    data = medium.read(offset_bytes, length_bytes)
    if rng.random() < faults.transient_flip_probability:
        injected.read_faults += 1
        flipped = bytearray(data)
        flipped[rng.randrange(length_bytes)] ^= 1 << rng.randrange(8)
        data = bytes(flipped)
    if rng.random() < faults.digest_probability:
        injected.read_faults += 1
        raise DataCorrupted("simulated")
    return data


def is_work(medium: Medium, offset_bytes: int, length_bytes: int) -> bool:
    """Whether there is anything to do. A caller that breaks the contract fails; one that goes too far hears it."""
    assert offset_bytes % medium.block_bytes == 0, "an offset within a block"
    assert length_bytes % medium.block_bytes == 0, "a length that is not whole blocks"
    if offset_bytes + length_bytes > medium.size_bytes:
        raise CommandFailed(
            "beyond the end",
            status_code_type=Status.LBA_OUT_OF_RANGE.code_type,
            status_code=Status.LBA_OUT_OF_RANGE.code,
            do_not_retry=True,
        )
    return length_bytes > 0


def look_at(future: asyncio.Future[None]) -> None:
    """A command whose caller was cancelled may still fail: nobody else looks at that."""
    if not future.cancelled():
        future.exception()
