"""The block device contract on the simulated device, in virtual time: what the simulation relies on is what there is."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.contract import BlockDeviceContract
from tests.sim.device import SimDevice
from tests.sim.faults import Faults
from tests.sim.loop import SimLoop
from tests.sim.medium import Medium

if TYPE_CHECKING:
    from xkv_nvmeof.blockdev import BlockDevice


class Contract(BlockDeviceContract):
    async def lose_connection(self, device: BlockDevice) -> None:
        assert isinstance(device, SimDevice)
        device.break_connection(1_000_000)


CASES = sorted(name for name in vars(BlockDeviceContract) if name.startswith("test_"))


@pytest.mark.parametrize("block_bytes", [512, 4096])
@pytest.mark.parametrize("case", CASES)
def test_the_simulated_device_keeps_the_contract(case: str, block_bytes: int) -> None:
    loop = SimLoop(random.Random(1))
    faults = Faults(break_on_cancel_probability=0.0)
    device = SimDevice(loop, Medium(8 << 20, block_bytes), random.Random(2), faults)
    loop.run(getattr(Contract(), case)(device))
    loop.close()
