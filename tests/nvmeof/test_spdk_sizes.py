"""With SPDK's target: what its transport grants, and how it ends reads, is what the initiator goes by."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.nvmeof.hosts import connect
from tests.nvmeof.spdk_target import NQN, UUID, Spdk, spdk_process

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.spdk
KIB = 1 << 10
BLOCK = 4096


@pytest.fixture
def spdk() -> Iterator[Spdk]:
    if "XKV_SPDK_TGT" not in os.environ:
        pytest.skip("XKV_SPDK_TGT names no nvmf_tgt binary")
    with spdk_process() as process:
        yield process


@pytest.mark.parametrize("success", [True, False], ids=["success with the data", "a response of its own"])
@pytest.mark.parametrize(
    ("limit_bytes", "how"),
    [
        (32 * KIB, {"in_capsule_data_size": 8 * KIB, "io_unit_size": 32 * KIB}),
        (128 * KIB, {"in_capsule_data_size": 4 * KIB}),
        (1024 * KIB, {"in_capsule_data_size": 16 * KIB}),
    ],
    ids=["32 KiB", "128 KiB", "1 MiB"],
)
async def test_every_size_comes_back(
    spdk: Spdk, success: bool, limit_bytes: int, how: dict[str, Any]
) -> None:
    spdk.transport(limit_bytes, c2h_success=success, **how)
    spdk.call("bdev_malloc_create", name="m0", num_blocks=4096, block_size=BLOCK, uuid=UUID)
    spdk.subsystem("m0", allow_any_host=True)
    device = await connect(spdk.listen(), nqn=NQN)
    assert device.negotiated is not None
    assert device.negotiated.mdts_bytes == limit_bytes
    assert device.negotiated.in_capsule_bytes == how["in_capsule_data_size"]
    in_capsule_bytes = how["in_capsule_data_size"]
    for size in sorted(
        {
            BLOCK,
            in_capsule_bytes,
            in_capsule_bytes + BLOCK,
            64 * KIB,
            1024 * KIB,
            limit_bytes - BLOCK,
            limit_bytes,
            limit_bytes + BLOCK,
            10 * limit_bytes,
        }
    ):
        data = Random(size).randbytes(size)
        await device.write_from(BLOCK, [memoryview(data)])
        found = bytearray(size)
        await device.read_into(BLOCK, [memoryview(found)])
        assert found == data
    assert device.counters.reconnects == 0
    await device.aclose()
