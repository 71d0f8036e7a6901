"""Two hosts and one namespace that can be reserved, over real connections: the soft card's process, and SPDK's target."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.card_process import HOST_NQN, running_card
from tests.nvmeof.spdk_target import spdk_target
from xkv_gateway.card.reservation import Reservation, key_of
from xkv_nvmeof.blockdev import ReservationConflict, ReservationType
from xkv_nvmeof.initiator import InitiatorOptions, TargetAddress, TcpInitiator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from xkv_nvmeof.blockdev import Reservations

BLOCK = memoryview(bytearray(4096))
FIRST, SECOND = bytes([7]) * 16, bytes([8]) * 16
TARGETS = ["soft card", pytest.param("SPDK", marks=pytest.mark.spdk)]


@pytest.fixture(params=TARGETS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TargetAddress]:
    if request.param == "SPDK":
        if "XKV_SPDK_TGT" not in os.environ:
            pytest.skip("XKV_SPDK_TGT does not name a target")
        with spdk_target() as (port, nqn):
            yield TargetAddress("127.0.0.1", port, nqn)
    else:
        with running_card("--file", str(tmp_path / "card"), "--size", "16MiB") as card:
            yield card.address


@contextlib.asynccontextmanager
async def host(address: TargetAddress, host_id: bytes) -> AsyncIterator[tuple[TcpInitiator, Reservations]]:
    options = InitiatorOptions(host_nqn=HOST_NQN, host_id=host_id, keep_alive_ms=10_000)
    device = await TcpInitiator.connect(address, options, clock=time.monotonic_ns, entropy=os.urandom)
    assert device.reservations is not None
    try:
        yield device, device.reservations
    finally:
        await device.aclose()


async def test_only_who_is_registered_writes_and_a_taker_ends_that(address: TargetAddress) -> None:
    async with host(address, FIRST) as (one, ones), host(address, SECOND) as (two, twos):
        first, second = Reservation(ones, key_of(FIRST)), Reservation(twos, key_of(SECOND))
        assert not (await first.take(insist=False)).ended
        await first.hold()
        await one.write_from(0, [BLOCK])
        with pytest.raises(ReservationConflict):
            await two.write_from(0, [BLOCK])
        with pytest.raises(ReservationConflict):
            await two.write_from(0, [BLOCK] * 8)
        await two.read_into(0, [memoryview(bytearray(4096))])
        taken = await second.take(insist=False)
        assert taken.ended == {first.key}
        with pytest.raises(ReservationConflict):
            await one.write_from(0, [BLOCK])
        status = await ones.report()
        assert status.kind is ReservationType.WRITE_EXCLUSIVE_REGISTRANTS_ONLY
        assert [(each.host_id, each.key, each.holds) for each in status.registrants] == [
            (SECOND, second.key, True)
        ]
        await two.write_from(0, [BLOCK])
        await first.give_up()
        await second.hold()
        await second.give_up()
        status = await ones.report()
        assert (status.kind, status.registrants) == (None, ())
        await one.write_from(0, [BLOCK])


async def test_a_registration_outlives_its_association_and_the_next_run_of_the_host_replaces_its_key(
    address: TargetAddress,
) -> None:
    async with host(address, FIRST) as (_, ones):
        await Reservation(ones, key_of(FIRST)).take(insist=False)
    async with host(address, FIRST) as (one, ones):
        again = Reservation(ones, key_of(SECOND))
        assert not (await again.take(insist=False)).ended
        await one.write_from(0, [BLOCK])
        status = await ones.report()
        assert [(each.key, each.holds) for each in status.registrants] == [(again.key, True)]
        await again.give_up()


async def test_writes_under_way_are_over_when_their_host_was_preempted(address: TargetAddress) -> None:
    async with host(address, FIRST) as (one, ones), host(address, SECOND) as (two, twos):
        first, second = Reservation(ones, key_of(FIRST)), Reservation(twos, key_of(SECOND))
        await first.take(insist=False)
        old, new = memoryview(b"1" * 4096), memoryview(b"2" * 4096)
        for _ in range(20):
            writes = [asyncio.ensure_future(one.write_from(0, [old])) for _ in range(16)]
            await asyncio.sleep(0)
            await second.take(insist=False)
            await two.write_from(0, [new])
            await asyncio.gather(*writes, return_exceptions=True)
            found = bytearray(4096)
            await two.read_into(0, [memoryview(found)])
            assert found == new
            await second.give_up()
            await first.take(insist=False)
        await first.give_up()
