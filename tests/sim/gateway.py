"""One run of the gateway inside the simulation: device, engine, journal, card store, control service."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import xxhash

from tests.sim.device import SimDevice
from tests.sim.journal import SimJournal
from xkv_gateway.card.direct import Direct
from xkv_gateway.card.runs import DataArea
from xkv_gateway.card.store import CardStore
from xkv_gateway.core.engine import Engine
from xkv_gateway.service.control import ControlService
from xkv_gateway.service.direct import DirectService
from xkv_nvmeof.blockdev import DeviceState
from xkv_rpc import messages as m
from xkv_rpc.calls import Call
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Sequence

    from tests.sim.faults import Faults
    from tests.sim.loop import SimLoop
    from tests.sim.medium import Medium
    from xkv_gateway.core.types import EngineLimits
    from xkv_rpc.calls import Buffer

SECRET: Final = bytes(range(32))
RESERVED_BYTES: Final = 64 << 10
"""In front of the data area."""


class GatewayGone(Exception):  # noqa: N818 - a fact for the client
    """The gateway ended before it answered."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of: a mutation replaces one of them."""

    engine: Callable[..., Engine] = Engine
    journal: type[SimJournal] = SimJournal
    service: type[ControlService] = ControlService


@dataclass(frozen=True, slots=True)
class Settings:
    """What the seed drew for the gateway."""

    limits: EngineLimits
    faults: Faults
    journal_delay_ns_max: int
    store_wait_ns: int
    inline_loads_bytes_max: int


class SimRegion:
    """Shared memory of a client, with guards around it."""

    GUARD: Final = b"\xa5" * 64

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.pins = 0
        self.memory = bytearray(self.GUARD + bytes(size_bytes) + self.GUARD)

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        assert offset_bytes + length_bytes <= self.size_bytes
        begin = len(self.GUARD) + offset_bytes
        return memoryview(self.memory)[begin : begin + length_bytes]

    def pin(self) -> None:
        self.pins += 1

    def unpin(self) -> None:
        assert self.pins > 0
        self.pins -= 1

    def guards_intact(self) -> bool:
        return self.memory.startswith(self.GUARD) and self.memory.endswith(self.GUARD)


class SimRegions:
    """All regions, by token."""

    def __init__(self) -> None:
        self.by_token: dict[bytes, SimRegion] = {}

    def find(self, token: bytes) -> SimRegion:
        region = self.by_token.get(token)
        if region is None:
            raise RpcError(ErrorCode.UNKNOWN_REGION, "no region has this token", field="region")
        return region


Answer = tuple[m.Reply | RpcError, list[bytes]]
Judge = "Callable[[m.Reply | RpcError], None]"


class _Sink:
    """Where answers go. `judge` sees each at the moment it is given."""

    def __init__(
        self, gateway: Gateway, future: asyncio.Future[Answer], judge: Callable[[Any], None] | None
    ) -> None:
        self._gateway = gateway
        self._future = future
        self._judge = judge

    def send_reply(self, call: Call, reply: m.Reply, payloads: Sequence[Buffer]) -> None:
        self._answer(reply, [bytes(payload) for payload in payloads])

    def send_error(self, call: Call, error: RpcError) -> None:
        if error.code is ErrorCode.INTERNAL:
            self._gateway.blame(f"a {type(call.request).__name__} failed internally")
        self._answer(error, [])

    def _answer(self, reply: m.Reply | RpcError, payloads: list[bytes]) -> None:
        if self._gateway.gone or self._future.done():
            return
        if self._judge is not None:
            self._judge(reply)
        self._future.set_result((reply, payloads))


class Gateway:
    """A gateway that serves a medium, until it is killed."""

    def __init__(
        self,
        loop: SimLoop,
        medium: Medium,
        rng: random.Random,
        settings: Settings,
        parts: Parts,
        blame: Callable[[str], None],
    ) -> None:
        self.blame = blame
        self.gone = False
        self.regions = SimRegions()
        self._loop = loop
        self._rng = rng
        self._requests = 0
        self._open: dict[asyncio.Future[Answer], None] = {}
        self.clock = loop.clock
        self.device = SimDevice(loop, medium, rng, settings.faults)
        limits = self.limits = settings.limits
        self.area = DataArea(RESERVED_BYTES, limits.au_bytes, medium.block_bytes)
        self.engine = parts.engine(limits, digest_secret=SECRET, entropy=rng.randbytes)
        self.journal = parts.journal(self.device, rng, blame, settings.journal_delay_ns_max)
        self.store = CardStore(self.engine, self.device, self.area, self.journal, loop.clock)
        self.service = parts.service(
            self.store,
            _hello,
            self.regions,
            m.Limits(object_bytes=limits.object_bytes_max),
            store_wait_ns=settings.store_wait_ns,
            inline_loads_bytes_max=settings.inline_loads_bytes_max,
            direct=direct_service(self.store, self.area, settings),
        )

    @property
    def online(self) -> bool:
        return self.device.state is DeviceState.ONLINE

    @property
    def read_faults(self) -> int:
        """Reads that the device falsified."""
        return self.device.injected.read_faults + self.device.injected.persistent_flips

    @staticmethod
    def checksum_of(payload: bytes) -> int:
        return xxhash.xxh3_64_intdigest(payload)

    def ask(
        self,
        peer: int,
        request: m.Request,
        payloads: Sequence[bytes] = (),
        judge: Callable[[Any], None] | None = None,
    ) -> asyncio.Future[Answer]:
        """Send a request; the future holds the answer, or GatewayGone."""
        if self.gone:
            raise GatewayGone
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._open[future] = None
        future.add_done_callback(self._open.pop)
        self._requests += 1
        call = Call(
            _Sink(self, future, judge),
            m.PeerId(peer.to_bytes(4, "big")),
            self._requests,
            request,
            [memoryview(payload) for payload in payloads],
            sum(map(len, payloads)),
            self.clock(),
        )
        self.service.handle(call)
        return future

    async def while_it_lives(self, command: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Carry out a command of a client to the card, on this gateway's association. Raises GatewayGone, DeviceError."""
        if self.gone:
            raise GatewayGone
        gone: asyncio.Future[Answer] = self._loop.create_future()
        self._open[gone] = None
        gone.add_done_callback(self._open.pop)
        task = asyncio.ensure_future(command())
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise GatewayGone
        gone.cancel()
        task.result()

    def cancel_one(self) -> None:
        """Cancel one request in the middle, as a drain does."""
        if self.service._tasks:
            self._rng.choice(list(self.service._tasks)).cancel()

    def after_this_turn(self, look: Callable[[], None]) -> None:
        """Call `look` when what was changed up to now has been submitted."""
        self._loop.call_soon(look)

    async def kill(self) -> None:
        """End at once. Nobody is answered; what the device does with commands in flight is its caller's affair."""
        self.gone = True
        self.store.close()
        await self.journal.aclose()
        await self._drop_requests()

    async def _drop_requests(self) -> None:
        await self.service.drain(0)
        self.store.close()
        for future in list(self._open):
            if not future.done():
                future.set_exception(GatewayGone())
                future.exception()  # whoever waits hears it; nobody else needs to


class LogTrap(logging.Handler):
    """Keeps what the product logs as errors, with its traceback."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter("%(levelname)s %(name)s: %(message)s").format(record))


def direct_service(store: CardStore, area: DataArea, settings: Settings) -> DirectService:
    """Return the operations of clients that write to the card themselves."""
    return DirectService(
        Direct(store, area),
        lambda: None,
        grace_ms=settings.limits.direct_grace_ns // 1_000_000,
        store_wait_ns=settings.store_wait_ns,
    )


def _hello() -> m.HelloReply:
    return m.HelloReply("simulated", m.CardInfo("", m.CardState.ONLINE, 512, 0), m.Limits())
