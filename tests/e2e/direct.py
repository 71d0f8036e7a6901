"""A client that reads and writes the card itself, with an initiator of its own."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from xkv_nvmeof.initiator import InitiatorOptions, TargetAddress, TcpInitiator
from xkv_rpc.messages import LookupMode, StoreStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from xkv_rpc.async_client import AsyncClient

HOST_NQN = "nqn.2026-01.org.example:direct"
NS = "direct"
SCOPE = b"tenant"
LEASE_MS = 60_000
Ranges = list[list[int]]


@dataclass(frozen=True)
class DirectClient:
    """Speaks to the gateway for leases and tickets, and to the card for bytes."""

    gateway: AsyncClient
    device: TcpInitiator

    async def read(self, keys: list[bytes]) -> list[bytes]:
        """Read leading hits from the card; every one is verified."""
        reply = await self.gateway.lookup(NS, SCOPE, keys, lease_ms=LEASE_MS, extents=True)
        assert reply.extents is not None
        assert reply.checksums is not None
        found = []
        for ranges, size, checksum in zip(reply.extents, reply.sizes, reply.checksums, strict=True):
            assert size is not None
            buffers = [memoryview(bytearray(length)) for _, length in ranges]
            for (offset, _), buffer in zip(ranges, buffers, strict=True):
                await self.device.read_into(offset, [buffer])
            payload = b"".join(buffers)[:size]
            assert xxhash.xxh3_64_intdigest(payload) == checksum
            found.append(payload)
        if reply.lease is not None:
            await self.gateway.release(reply.lease)
        return found

    async def write(self, ranges: Ranges, payload: bytes) -> None:
        """Write a payload into its ranges, without a flush."""
        rest = payload.ljust(sum(length for _, length in ranges), b"\0")
        for offset, length in ranges:
            await self.device.write_from(offset, [memoryview(rest[:length])])
            rest = rest[length:]

    async def store(
        self, objects: dict[bytes, bytes], *, told: bool = True, ttl_ms: int = 60_000
    ) -> list[StoreStatus]:
        """Store objects; with `told`, the gateway is told their checksums."""
        keys, payloads = list(objects), list(objects.values())
        reply = await self.gateway.reserve(NS, SCOPE, keys, list(map(len, payloads)), ttl_ms=ttl_ms)
        assert reply.results == [StoreStatus.RESERVED] * len(keys)
        assert reply.ticket is not None
        for ranges, payload in zip(reply.extents, payloads, strict=True):
            assert ranges is not None
            await self.write(ranges, payload)
        await self.device.flush()
        sums = [xxhash.xxh3_64_intdigest(payload) if told else None for payload in payloads]
        return await self.gateway.commit(reply.ticket, sums)

    async def held(self, keys: list[bytes]) -> list[int | None]:
        """Sizes of what is held."""
        return (await self.gateway.lookup(NS, SCOPE, keys, mode=LookupMode.EACH)).sizes


@contextlib.asynccontextmanager
async def direct_client(gateway: AsyncClient) -> AsyncIterator[DirectClient]:
    """Connect to where `hello` says, as whom it says."""
    hello = await gateway.hello("direct")
    assert "direct" in hello.features
    assert hello.target is not None
    assert hello.target.host_id is not None
    host, _, port = hello.target.addresses[0].rpartition(":")
    device = await TcpInitiator.connect(
        TargetAddress(host, int(port), hello.target.nqn, hello.target.nsid),
        InitiatorOptions(HOST_NQN, hello.target.host_id),
        clock=time.monotonic_ns,
        entropy=os.urandom,
    )
    try:
        yield DirectClient(gateway, device)
    finally:
        await device.aclose()
