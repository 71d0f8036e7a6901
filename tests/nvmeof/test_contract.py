"""The block device contract on our initiator: against the soft card, and against SPDK where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from xkv_nvmeof.host_settings import ConnectionLost
from xkv_nvmeof.initiator import TcpInitiator
from xkv_nvmeof.initiator_discovery import discover
from xkv_nvmeof.logpages import SUBTYPE_NVM

from .contract import BlockDeviceContract
from .hosts import connect, options
from .spdk_target import spdk_target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from xkv_nvmeof.blockdev import BlockDevice


@pytest.fixture(scope="module")
def card() -> Iterator[dict[str, Any]]:
    """A soft card process for all tests of this module; what it says of itself."""
    command = (
        sys.executable,
        "-m",
        "xkv_nvmeof.softcard",
        "--memory",
        "--size",
        "16MiB",
        "--exit-with-stdin",
    )
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.terminate()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "digests": {"header_digest": "required", "data_digest": "required"},
    "flow control": {"sq_flow_control": True, "queue_depth": 3},
    "one queue": {"io_queues": 1, "max_transfer_bytes": 65_536},
}


class InitiatorContract(BlockDeviceContract):
    async def lose_connection(self, device: BlockDevice) -> None:
        assert isinstance(device, TcpInitiator)
        association = device._keeper.association
        assert association is not None
        association.end(ConnectionLost("cut by the test"))


class TestSoftCard(InitiatorContract):
    @pytest.fixture(params=list(OPTIONS))
    async def device(
        self, request: pytest.FixtureRequest, card: dict[str, Any]
    ) -> AsyncIterator[TcpInitiator]:
        device = await connect(card["port"], card["nqn"], **OPTIONS[request.param])
        yield device
        await device.aclose()


@pytest.fixture(scope="module")
def spdk() -> Iterator[tuple[int, str]]:
    """An SPDK target process for all tests of this module."""
    if "XKV_SPDK_TGT" not in os.environ:
        pytest.skip("XKV_SPDK_TGT names no nvmf_tgt binary")
    with spdk_target() as target:
        yield target


@pytest.mark.spdk
class TestSpdk(InitiatorContract):
    @pytest.fixture(params=list(OPTIONS))
    async def device(
        self, request: pytest.FixtureRequest, spdk: tuple[int, str]
    ) -> AsyncIterator[TcpInitiator]:
        device = await connect(*spdk, **OPTIONS[request.param])
        yield device
        await device.aclose()


async def test_discovery_names_the_soft_card(card: dict[str, Any]) -> None:
    entries = await discover("127.0.0.1", card["port"], options(), clock=time.monotonic_ns)
    found = [entry for entry in entries if entry.subsystem_type == SUBTYPE_NVM]
    assert [(entry.subnqn, entry.address, entry.service) for entry in found] == [
        (card["nqn"], "127.0.0.1", str(card["port"]))
    ]
