"""Serve a handler that does nothing, to measure what the protocol itself costs: `python -m tests.rpc.serve_dummy [TCP port]`.

A lookup hits every key with a lease; a load of n keys answers n objects of 64 KiB; a store forgets what it was given.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import uvloop

from xkv_rpc.messages import (
    CardInfo,
    CardState,
    Delete,
    DeleteReply,
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
    Renew,
    RenewReply,
    Store,
    StoreReply,
)
from xkv_rpc.server import Server

if TYPE_CHECKING:
    from xkv_rpc.calls import Call

OBJECT = bytes(65536)


class DummyHandler:
    """Answers at once, always with success."""

    def handle(self, call: Call) -> None:
        match call.request:
            case Lookup() as request:
                count = len(request.keys)
                call.reply(LookupReply(count, [len(OBJECT)] * count, b"L" * 16, request.lease_ms))
            case Load() as request:
                count = len(request.keys)
                payloads = [OBJECT] * count if request.region is None else []
                call.reply(LoadReply(["ok"] * count, [len(OBJECT)] * count), payloads)
            case Store() as request:
                call.reply(StoreReply(["stored"] * len(request.keys)))
            case Delete() as request:
                call.reply(DeleteReply(len(request.keys)))
            case Hello():
                call.reply(HelloReply("dummy", CardInfo("", CardState.ONLINE, 4096, 1 << 40), Limits()))
            case Renew() as request:
                call.reply(RenewReply(request.lease_ms))
            case Ping():
                call.reply(PingReply())
            case Release():
                call.reply(ReleaseReply())


async def serve(port: int) -> None:
    server = Server(DummyHandler(), Limits(), clock=time.monotonic_ns)
    [endpoint] = await server.bind([f"tcp://127.0.0.1:{port}"])
    sys.stdout.write(f"{endpoint}\n")
    sys.stdout.flush()
    try:
        await asyncio.Event().wait()
    finally:
        await server.aclose()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
