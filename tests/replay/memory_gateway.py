"""A gateway that keeps objects in a dict, behind the real server and the real sockets; it can be told to misbehave."""

from __future__ import annotations

import os
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xkv_rpc.errors import ErrorCode, RpcError
from xkv_rpc.messages import (
    CardInfo,
    CardState,
    Hello,
    HelloReply,
    Limits,
    Load,
    LoadReply,
    Lookup,
    LookupReply,
    Ping,
    PingReply,
    Release,
    ReleaseReply,
    Store,
    StoreReply,
)
from xkv_rpc.regions import RegionServer
from xkv_rpc.server import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from xkv_rpc.calls import Call


@dataclass
class MemoryGateway:
    """The handler. What it saw is in `seen`, one entry a request."""

    limits: Limits = field(default_factory=Limits)
    state: CardState = CardState.ONLINE
    capacity_objects: int | None = None
    grant_leases: bool = True
    before: Callable[[Call], RpcError | None] = lambda _: None
    """Called with each request; an error that it returns is the answer."""
    mute: Callable[[Call], bool] = lambda _: False
    """Requests that are never answered."""
    spoil: Callable[[bytes, bytes], bytes | None] = lambda _, data: data
    """Called with key and bytes of each load; returns what is answered, None: `corrupt`."""
    write_regions: bool = True
    """False: loads into a region are answered `ok`, and not a byte is written."""
    objects: dict[tuple[str, bytes, bytes], bytes] = field(default_factory=dict)
    seen: list[Call] = field(default_factory=list)
    leases: set[bytes] = field(default_factory=set)
    leases_granted: int = 0
    port: int = 0
    regions: RegionServer | None = None

    def handle(self, call: Call) -> None:
        self.seen.append(call)
        if self.mute(call):
            return
        error = self.before(call)
        if error is not None:
            raise error
        match call.request:
            case Hello():
                card = CardInfo("", self.state, 4096, 1 << 30)
                path = None if self.regions is None else self.regions.path
                call.reply(HelloReply(server="memory", card=card, limits=self.limits, regions=path))
            case Ping():
                call.reply(PingReply())
            case Lookup() as request:
                self._lookup(call, request)
            case Load() as request:
                self._load(call, request)
            case Store() as request:
                self._store(call, request)
            case Release() as request:
                if request.lease not in self.leases:
                    raise RpcError(ErrorCode.UNKNOWN_LEASE, "no such lease")
                self.leases.remove(request.lease)
                call.reply(ReleaseReply())
            case other:
                raise AssertionError(f"a replay does not send {other}")

    def _lookup(self, call: Call, request: Lookup) -> None:
        sizes: list[int | None] = []
        for key in request.keys:
            data = self.objects.get((request.ns, request.scope, key))
            if data is None:
                break
            sizes.append(len(data))
        lease = None
        if sizes and request.lease_ms and self.grant_leases:
            self.leases_granted += 1
            lease = self.leases_granted.to_bytes(16, "big")
            self.leases.add(lease)
        call.reply(LookupReply(len(sizes), sizes, lease, request.lease_ms if lease else 0))

    def _load(self, call: Call, request: Load) -> None:
        results: list[str] = []
        payloads: list[bytes] = []
        for key in request.keys:
            held = self.objects.get((request.ns, request.scope, key))
            data = None if held is None else self.spoil(key, held)
            results.append("miss" if held is None else "corrupt" if data is None else "ok")
            if data is not None:
                payloads.append(data)
        lengths = iter(payloads)
        sizes = [len(next(lengths)) if result == "ok" else None for result in results]
        if request.region is None:
            call.reply(LoadReply(results, sizes), payloads)
            return
        assert self.regions is not None
        found = self.regions.find(request.region)
        loaded = iter(payloads)
        for result, offset, length in zip(results, request.offsets, request.lengths, strict=True):
            data = next(loaded) if result == "ok" else bytes(length)
            if self.write_regions:
                found.view(offset, len(data))[:] = data
        call.reply(LoadReply(results, sizes))

    def _store(self, call: Call, request: Store) -> None:
        results: list[str] = []
        payloads = call.payloads
        if request.region is not None:
            assert self.regions is not None
            region = self.regions.find(request.region)
            ranges = zip(request.offsets, request.sizes, strict=True)
            payloads = [region.view(offset, size) for offset, size in ranges]
        for key, payload in zip(request.keys, payloads, strict=True):
            identity = (request.ns, request.scope, key)
            if identity in self.objects:
                results.append("exists")
            elif self.capacity_objects is not None and len(self.objects) >= self.capacity_objects:
                results.append("no_space")
            else:
                self.objects[identity] = bytes(payload)
                results.append("stored")
        call.reply(StoreReply(results))

    def requests(self, kind: type) -> list[Call]:
        return [call for call in self.seen if isinstance(call.request, kind)]


@asynccontextmanager
async def serving(gateway: MemoryGateway, regions_path: Path | None = None) -> AsyncIterator[Server]:
    if regions_path is not None:
        gateway.regions = RegionServer(str(regions_path), entropy=os.urandom)
        await gateway.regions.start()
    server = Server(gateway, gateway.limits, clock=time.monotonic_ns)
    (endpoint,) = await server.bind(["tcp://127.0.0.1:0"])
    gateway.port = int(endpoint.rpartition(":")[2])
    try:
        yield server
    finally:
        await server.aclose(grace_ms=0, linger_ms=0)
        if gateway.regions is not None:
            await gateway.regions.aclose()
