"""A service of dicts behind the real server in a thread of its own, and a raw DEALER that can send anything."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import msgpack
import uvloop
import zmq

from xkv_rpc.errors import ErrorCode, RpcError
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
    LookupMode,
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
from xkv_rpc.server import Call, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from xkv_rpc.doors import Door, Doorkeeper
    from xkv_rpc.regions import RegionServer
    from xkv_rpc.server import Handler
    from xkv_rpc.session import ServerBounds

HANG_S = 60.0
"""Nothing here takes so long; a test that does hangs."""
LEASE = b"L" * 16


class DictService:
    """Answers every operation from a dict; regions where it is given a region server."""

    def __init__(self, limits: Limits | None = None, regions: RegionServer | None = None) -> None:
        self.limits = limits or Limits()
        self.objects: dict[tuple[str, bytes, bytes], bytes] = {}
        self.regions = regions
        self.handled = 0
        self.held: list[Call] = []
        self.hold = False
        """Keep calls in `held` instead of answering them."""

    def handle(self, call: Call) -> None:
        self.handled += 1
        if self.hold:
            self.held.append(call)
        else:
            self.answer(call)

    def answer(self, call: Call) -> None:
        match call.request:
            case Hello():
                card = CardInfo("", CardState.ONLINE, 4096, 1 << 30)
                path = self.regions.path if self.regions is not None else None
                call.reply(HelloReply("test", card, self.limits, ["region"], path))
            case Ping():
                call.reply(PingReply())
            case Lookup() as request:
                self._lookup(call, request)
            case Load() as request:
                self._load(call, request)
            case Store() as request:
                self._store(call, request)
            case Delete() as request:
                known = [self.objects.pop((request.ns, request.scope, key), None) for key in request.keys]
                call.reply(DeleteReply(sum(value is not None for value in known)))
            case Renew() as request:
                call.reply(RenewReply(request.lease_ms))
            case Release(lease):
                if lease != LEASE:
                    raise RpcError(ErrorCode.UNKNOWN_LEASE, "no such lease", field="lease")
                call.reply(ReleaseReply())

    def _lookup(self, call: Call, request: Lookup) -> None:
        found = [self.objects.get((request.ns, request.scope, key)) for key in request.keys]
        sizes = [None if value is None else len(value) for value in found]
        hits = len(sizes) - sizes.count(None)
        if request.mode is LookupMode.PREFIX:
            hits = sizes.index(None) if None in sizes else len(sizes)
            sizes = sizes[:hits]
        leased = bool(request.lease_ms and hits)
        call.reply(LookupReply(hits, sizes, LEASE if leased else None, request.lease_ms if leased else 0))

    def _load(self, call: Call, request: Load) -> None:
        found = [self.objects.get((request.ns, request.scope, key)) for key in request.keys]
        sizes = [None if value is None else len(value) for value in found]
        results = ["miss" if value is None else "ok" for value in found]
        held = [value for value in found if value is not None]
        if request.region is None:
            call.reply(LoadReply(results, sizes), held)
            return
        assert self.regions is not None
        region = self.regions.find(request.region)
        views = [region.view(*span) for span in zip(request.offsets, request.lengths, strict=True)]
        for view, value in zip(views, found, strict=True):
            if value is not None:
                view[: len(value)] = value
        call.reply(LoadReply(results, sizes))

    def _store(self, call: Call, request: Store) -> None:
        payloads = call.payloads
        if request.region is not None:
            assert self.regions is not None
            region = self.regions.find(request.region)
            payloads = [region.view(*span) for span in zip(request.offsets, request.sizes, strict=True)]
        results = []
        for key, payload in zip(request.keys, payloads, strict=True):
            identity = (request.ns, request.scope, key)
            results.append("exists" if identity in self.objects else "stored")
            self.objects.setdefault(identity, bytes(payload))
        call.reply(StoreReply(results))


class Served:
    """A server that runs in a thread."""

    def __init__(self) -> None:
        self.endpoints: list[str] = []
        self.server: Server
        self.loop: asyncio.AbstractEventLoop
        self.error: BaseException | None = None

    @property
    def endpoint(self) -> str:
        return self.endpoints[0]

    def run(self, function: Callable[[], Any]) -> Any:
        """Call something on the server's loop and wait for its result."""

        async def call() -> Any:
            return function()

        return self.await_(call())

    def await_(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(HANG_S)


@contextlib.contextmanager
def serving(
    handler: Handler,
    *,
    endpoints: Sequence[str | Door] = ("tcp://127.0.0.1:0",),
    limits: Limits | None = None,
    bounds: ServerBounds | None = None,
    fast_loop: bool = True,
    doorkeeper: Doorkeeper | None = None,
) -> Iterator[Served]:
    served = Served()
    ready = threading.Event()
    stop = threading.Event()

    async def main() -> None:
        served.loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        served.server = Server(
            handler, limits or Limits(), clock=time.monotonic_ns, bounds=bounds, doorkeeper=doorkeeper
        )
        try:
            served.endpoints = await served.server.bind(endpoints)
        except BaseException as error:
            served.error = error
            raise
        finally:
            ready.set()
        waiter = served.loop.run_in_executor(None, stop.wait)
        waiter.add_done_callback(lambda _: stopped.set())
        await stopped.wait()
        await served.server.aclose(grace_ms=50, linger_ms=50)

    def target() -> None:
        factory = uvloop.new_event_loop if fast_loop else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner, contextlib.suppress(Exception):
            runner.run(main())

    thread = threading.Thread(target=target)
    thread.start()
    try:
        assert ready.wait(HANG_S)
        if served.error is not None:
            raise served.error
        yield served
    finally:
        stop.set()
        thread.join(HANG_S)
        assert not thread.is_alive()


class RawClient:
    """A DEALER that sends frames as they are."""

    def __init__(self, endpoint: str, identity: bytes | None = None, **options: int | bytes) -> None:
        self.context = zmq.Context(io_threads=1)
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.set(getattr(zmq, name), value)
        if identity is not None:
            self.socket.set(zmq.IDENTITY, identity)
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def request(self, payloads: Sequence[bytes] = (), **fields: Any) -> None:
        self.send(msgpack.packb({"v": 1, "id": 1, **fields}), *payloads)

    def receive_frames(self, timeout_s: float = HANG_S) -> list[bytes] | None:
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        return self.socket.recv_multipart()

    def receive(self) -> dict[str, Any]:
        frames = self.receive_frames()
        assert frames is not None, "no reply"
        header = msgpack.unpackb(frames[0])
        assert isinstance(header, dict)
        return header

    def ask(self, *frames: bytes) -> dict[str, Any]:
        self.send(*frames)
        return self.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(0)
        self.context.term()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition of another thread or process; the deadline only finds hangs."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.002)
