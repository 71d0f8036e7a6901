"""Several paths whose controllers differ in what they can: a command is made so that each of them takes it."""

from __future__ import annotations

import asyncio

import pytest

from tests.nvmeof.fake_target import FakeTarget, Script
from tests.nvmeof.hosts import eventually, pattern
from tests.nvmeof.test_multipath import connect


@pytest.mark.parametrize("last", ["the larger", "the smaller"])
async def test_controllers_that_differ_are_each_given_what_both_can(last: str) -> None:
    small = Script(mdts=1, nvm_commands=0b0100, volatile_write_cache=1)
    large = Script(mdts=5, nvm_commands=0b1100, volatile_write_cache=0)
    async with FakeTarget(large) as one, FakeTarget(small) as other:
        targets = [one, other] if last == "the larger" else [other, one]
        device = await connect(*(target.port for target in targets))
        await eventually(lambda: all(path.connected for path in device.paths))
        # Whichever was first, this one has the last word.
        for connection in list(targets[0].connections):
            connection.drop()
        await eventually(
            lambda: device.counters.reconnects == 1 and all(path.connected for path in device.paths)
        )
        assert device.geometry.preferred_io_bytes == 8192
        assert device.geometry.volatile_write_cache
        assert not device.geometry.can_write_zeroes
        await asyncio.gather(
            *(device.write_from(at * 65536, [memoryview(pattern(65536))]) for at in range(8))
        )
        written = {
            target: max(entry.sgl.length_bytes for qid, entry in target.seen.commands if qid)
            for target in targets
        }
        assert set(written.values()) == {8192}
        await device.aclose()
