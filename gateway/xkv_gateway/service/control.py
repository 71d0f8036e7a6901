"""The control service: requests of the control protocol, carried out on the card store.

What a request changes, it changes while `handle` runs, in the order of arrival; only the I/O happens later, in a task.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol, assert_never, cast

from xkv_gateway.card.load import Load
from xkv_gateway.card.save import DURABLE_WAIT_NS, Save
from xkv_gateway.core.types import BeginLoad, BeginStore, LeaseId, LoadStatus
from xkv_gateway.core.types import Delete as DeleteKeys
from xkv_gateway.core.types import Lookup as LookupKeys
from xkv_gateway.core.types import LookupMode as CountMode
from xkv_gateway.service.meter import Meter
from xkv_gateway.service.order import ConnectionOrder, Footprint
from xkv_gateway.service.refusals import BUSY_RETRY_AFTER_MS, REFUSED, refusal_of
from xkv_rpc import messages as m
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from xkv_gateway.card.direct import Commit
    from xkv_gateway.card.store import CardStore
    from xkv_gateway.core.types import DeleteOutcome
    from xkv_gateway.service.direct import DirectService
    from xkv_rpc.calls import Call
    from xkv_rpc.messages import PeerId

_log = logging.getLogger(__name__)

NS_PER_MS = 1_000_000
CORE_MODE = {m.LookupMode.PREFIX: CountMode.PREFIX, m.LookupMode.EACH: CountMode.EACH}
SIZED = frozenset({LoadStatus.OK, LoadStatus.TOO_SMALL})
"""Of a key with another status the size is not known, or means nothing any more."""


class Region(Protocol):
    """Shared memory of a client, kept mapped while it is pinned."""

    @property
    def size_bytes(self) -> int:
        """Length of the region."""
        ...

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Return that range, writable."""
        ...

    def pin(self) -> None:
        """Keep the mapping until `unpin`, also if the client goes away."""
        ...

    def unpin(self) -> None:
        """Undo one `pin`."""
        ...


class Regions(Protocol):
    """Who knows the regions."""

    def find(self, token: bytes) -> Region:
        """Return the region of this token. Raises RpcError: there is none (any more)."""
        ...


class ControlService:
    """The handler behind the control port.

    Args:
        store: the card store.
        hello: makes the reply to `hello`.
        regions: the regions that clients have attached.
        limits: the limits told in `hello`.
        store_wait_ns: how long a store waits for room before it is `no_space`.
        inline_loads_bytes_max: payload bytes that all inline loads together may hold in memory while they are read.
        meter: counts what is done.
        direct: the operations of the feature `direct`, None where it is not offered.
    """

    def __init__(
        self,
        store: CardStore,
        hello: Callable[[], m.HelloReply],
        regions: Regions,
        limits: m.Limits,
        *,
        store_wait_ns: int,
        inline_loads_bytes_max: int,
        meter: Meter | None = None,
        direct: DirectService | None = None,
    ) -> None:
        self._store = store
        self._direct = direct
        self._writing: dict[Call, Footprint] = {}
        self._meter = meter or Meter()
        self._hello = hello
        self._regions = regions
        self._limits = limits
        self._store_wait_ns = store_wait_ns
        self._inline_loads_bytes_max = inline_loads_bytes_max
        self._inline_loads_bytes = 0
        self._orders: dict[PeerId, ConnectionOrder[Call]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order of their start
        self._draining = False

    # --- arrival --------------------------------------------------------------------------------------------

    def handle(self, call: Call) -> None:
        """Take a request (see `xkv_rpc.calls.Handler`)."""
        request = call.request
        if isinstance(request, m.Hello):
            hello = self._hello()
            call.reply(hello if self._direct is None or not call.grant.direct else self._direct.hello(hello))
            self._meter.hello(call.peer, request)
            return
        if isinstance(request, m.Ping):
            call.reply(m.PingReply())
            return
        order = self._orders.get(call.peer)
        if order is None and not isinstance(request, m.Store | m.Reserve | m.Commit):
            self._start(call)
            return
        footprint = _footprint(request, self._direct)
        if order is None:
            if footprint is None or not footprint.keys:
                self._start(call)
                return
            order = self._orders[call.peer] = ConnectionOrder()
        if footprint is not None and footprint.writes and footprint.keys:
            self._writing[call] = footprint
        if order.arrive(call, footprint):
            self._start(call)

    def _start(self, call: Call) -> None:
        if self._draining:
            self._refuse(call, _draining())
            return
        try:
            self._dispatch(call)
        except RpcError as error:
            self._refuse(call, error)
        except REFUSED as error:
            self._refuse(call, refusal_of(error))
        except Exception:  # noqa: BLE001 - the boundary of a control request (with `_guarded`, its asynchronous half)
            self._refuse(call, _internal(call))

    def _dispatch(self, call: Call) -> None:
        request = call.request
        match request:
            case m.Lookup():
                self._lookup(call, request)
            case m.Load():
                self._load(call, request)
            case m.Store():
                self._save(call, request)
            case m.Delete():
                self._delete(call, request)
            case m.Renew():
                granted_ns = self._store.renew(LeaseId(request.lease), request.lease_ms * NS_PER_MS)
                call.reply(m.RenewReply(granted_ns // NS_PER_MS))
                self._meter.took(call, self._store.clock())
            case m.Release():
                self._store.release(LeaseId(request.lease))
                call.reply(m.ReleaseReply())
                self._meter.took(call, self._store.clock())
            case m.Reserve() | m.Commit() | m.Abort():
                assert self._direct is not None, "the decoder lets it through where it is offered"
                work = self._direct.start(call, request)
                if work is not None:
                    self._spawn(call, *work, None)
                else:
                    self._meter.took(call, self._store.clock())
            case m.Hello() | m.Ping():
                raise AssertionError("answered on arrival")
            case _:
                assert_never(request)

    def _refuse(self, call: Call, error: RpcError) -> None:
        call.fail(error)
        self._finished(call)

    def _finished(self, call: Call) -> None:
        """Note that what writes has taken effect (or never will) and start what waited for it."""
        footprint = self._writing.pop(call, None)
        if footprint is None:
            return  # nothing waits for it
        order = self._orders[call.peer]
        for waiting in order.finished(footprint):
            self._start(waiting)
        if order.idle:
            self._orders.pop(call.peer, None)

    # --- operations -----------------------------------------------------------------------------------------

    def _lookup(self, call: Call, request: m.Lookup) -> None:
        if request.extents:
            assert self._direct is not None, "the decoder lets it through where it is offered"
            hits = self._direct.lookup(call, request, CORE_MODE[request.mode])
            self._meter.lookup(call, request, hits, self._store.clock())
            return
        outcome = self._store.lookup(
            LookupKeys(
                request.ns, request.scope, request.keys, CORE_MODE[request.mode], request.lease_ms * NS_PER_MS
            )
        )
        call.reply(
            m.LookupReply(outcome.hits, outcome.sizes_bytes, outcome.lease, outcome.lease_ttl_ns // NS_PER_MS)
        )
        if outcome.lease is not None:
            # The lease is entered behind the reply: the client reads it meanwhile.
            self._store.arm_timer()
        self._meter.lookup(call, request, outcome.hits, self._store.clock())

    def _delete(self, call: Call, request: m.Delete) -> None:
        outcome = self._store.delete(DeleteKeys(request.ns, request.scope, request.keys))
        self._spawn(call, None, self._finish_delete(call, outcome), None)

    async def _finish_delete(self, call: Call, outcome: DeleteOutcome) -> None:
        if await self._store.durable(outcome.lsn, self._store.clock() + DURABLE_WAIT_NS):
            call.reply(m.DeleteReply(outcome.deleted))
        else:
            message = "the keys are forgotten, but the card went away before that was durable"
            call.fail(RpcError(ErrorCode.CARD_OFFLINE, message))

    def _load(self, call: Call, request: m.Load) -> None:
        lease = None if request.lease is None else LeaseId(request.lease)
        keys = BeginLoad(request.ns, request.scope, request.keys, lease)
        if request.region is not None:
            region = self._regions.find(request.region)
            rooms = views_of(region, request.offsets, request.lengths)
            load = Load(self._store, keys, rooms)
            region.pin()
            self._spawn(call, load, self._finish_load(call, load), region.unpin)
            return
        load = Load(self._store, keys, None)
        try:
            self._admit_inline(load.payload_bytes)
        except RpcError:
            load.give_up()
            raise
        self._spawn(call, load, self._finish_load(call, load), partial(self._give_back, load.payload_bytes))

    async def _finish_load(self, call: Call, load: Load) -> None:
        results = await load.run()
        payloads = [r.payload for r in results if r.status is LoadStatus.OK and r.payload is not None]
        sizes = [r.size_bytes if r.status in SIZED else None for r in results]
        request = cast("m.Load", call.request)
        statuses = [r.status.value for r in results]
        call.reply(m.LoadReply(statuses, sizes), payloads if request.region is None else ())
        self._meter.loaded(request, statuses, self._store.clock())

    def _admit_inline(self, payload_bytes: int) -> None:
        if payload_bytes > self._limits.inline_bytes:
            raise RpcError(
                ErrorCode.TOO_LARGE,
                f"the objects have {payload_bytes} bytes, and {self._limits.inline_bytes} fit into one message:"
                " ask for fewer, or use a region",
                field="keys",
            )
        if self._inline_loads_bytes + payload_bytes > self._inline_loads_bytes_max:
            raise RpcError(
                ErrorCode.BUSY, "too many inline loads are being read", retry_after_ms=BUSY_RETRY_AFTER_MS
            )
        self._inline_loads_bytes += payload_bytes

    def _give_back(self, payload_bytes: int) -> None:
        self._inline_loads_bytes -= payload_bytes

    def _save(self, call: Call, request: m.Store) -> None:
        region: Region | None = None
        payloads = call.payloads
        if request.region is not None:
            region = self._regions.find(request.region)
            payloads = views_of(region, request.offsets, request.sizes)
        keys = BeginStore(request.ns, request.scope, request.keys, request.sizes)
        save = Save(self._store, keys, payloads, self._store.clock() + self._store_wait_ns)
        done: Callable[[], None] | None = None
        if region is not None:
            region.pin()
            done = region.unpin
        self._spawn(call, save, self._finish_save(call, save), done)

    async def _finish_save(self, call: Call, save: Save) -> None:
        results = [status.value for status in await save.run()]
        call.reply(m.StoreReply(results))
        self._meter.stored(cast("m.Store", call.request), results, self._store.clock())

    # --- tasks ----------------------------------------------------------------------------------------------

    def _spawn(
        self,
        call: Call,
        job: Load | Save | Commit | None,
        work: Coroutine[None, None, None],
        done: Callable[[], None] | None,
    ) -> None:
        task = asyncio.create_task(self._guarded(call, work))
        self._tasks[task] = None
        # A task that is cancelled before its first step runs none of its code: what must happen happens here.
        task.add_done_callback(partial(self._ended, call, job, work, done))

    async def _guarded(self, call: Call, work: Coroutine[None, None, None]) -> None:
        """Run the work of one request."""
        try:
            await work
        except Exception:  # noqa: BLE001 - the boundary of a control request: one of them must not end the daemon
            error = _internal(call)
            if not call.answered:
                call.fail(error)

    def _ended(
        self,
        call: Call,
        job: Load | Save | Commit | None,
        work: Coroutine[None, None, None],
        done: Callable[[], None] | None,
        task: asyncio.Task[None],
    ) -> None:
        """Whatever happened, the request is answered once and its resources go back."""
        del self._tasks[task]
        if task.cancelled() and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()
            if job is not None:
                job.give_up()
        if not call.answered:
            call.fail(_draining())
        self._meter.took(call, self._store.clock())
        if done is not None:
            done()
        self._finished(call)

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the requests in flight; cancel what is left after `timeout_s`. True: nothing had to be cancelled.

        From then on whatever still waits for its turn is refused, so that no new work begins.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._tasks and (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._tasks, timeout=left_s)
        self._draining = True
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return not left


def _draining() -> RpcError:
    return RpcError(ErrorCode.DRAINING, "the gateway is shutting down")


def _internal(call: Call) -> RpcError:
    """Log the exception that is being handled; return what the client hears of it."""
    _log.exception("a %s request failed", type(call.request).__name__.lower())
    return RpcError(ErrorCode.INTERNAL, "the gateway failed on this request; its log says why")


def _footprint(request: m.Request, direct: DirectService | None) -> Footprint | None:
    match request:
        case m.Lookup() | m.Load() | m.Delete():
            return Footprint(request.ns, request.scope, request.keys, writes=False)
        case m.Store() | m.Reserve():
            return Footprint(request.ns, request.scope, request.keys, writes=True)
        case m.Commit() if direct is not None:
            return direct.footprint(request)
        case _:
            return None


def views_of(region: Region, offsets: list[int], lengths: list[int]) -> list[memoryview]:
    """Return those ranges of a region. Raises RpcError: one is not within it."""
    size_bytes = region.size_bytes
    for offset_bytes, length_bytes in zip(offsets, lengths, strict=True):
        if offset_bytes + length_bytes > size_bytes:
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"the range {offset_bytes}+{length_bytes} ends beyond the region of {size_bytes} bytes",
                field="offsets",
            )
    return list(map(region.view, offsets, lengths))
