"""While a start waits for its card: every operation is answered as by the service whose card is offline, and what comes after fits."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.service.test_drain import LIMITS, SETTINGS, UNIT
from tests.sim.gateway import RESERVED_BYTES, Gateway, Parts, SimRegion, SimRegions
from tests.sim.loop import SimLoop
from tests.sim.medium import Medium
from xkv_gateway.cardurl import parse_card_url
from xkv_gateway.daemon.report import NO_CARD_YET, hello_of
from xkv_gateway.service.gate import Gate
from xkv_gateway.service.meter import Meter
from xkv_gateway.service.waiting import RETRY_AFTER_MS, NoCardYet
from xkv_rpc import messages as m
from xkv_rpc.calls import Call
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_rpc.calls import Buffer

KEYS = [b"a", b"b", b"c"]
REGION, NO_REGION, TOKEN = b"r" * 16, b"n" * 16, b"t" * 16
REGION_BYTES = 4 * UNIT
NQN = "nqn.2014-08.com.example:card0"
HELLO = hello_of(
    NO_CARD_YET, parse_card_url(f"nvme+tcp://127.0.0.1:4420/{NQN}?nsid=2"), m.Limits(keys=7), "/regions.sock"
)


class Sink:
    """Keeps what a call is answered with."""

    def __init__(self) -> None:
        self.answers: list[m.Reply | RpcError] = []

    def send_reply(self, call: Call, reply: m.Reply, payloads: Sequence[Buffer]) -> None:
        assert not payloads
        self.answers.append(reply)

    def send_error(self, call: Call, error: RpcError) -> None:
        self.answers.append(error)


class Waiting:
    """The stand-in behind a gate, as the daemon puts them together."""

    def __init__(self) -> None:
        self.regions = SimRegions()
        self.regions.by_token[REGION] = SimRegion(REGION_BYTES)
        self.meter = Meter()
        self.gate = Gate()
        self.stand_in = NoCardYet(lambda: HELLO, self.regions, self.meter, lambda: 2_000)
        self.gate.stand_in(self.stand_in)

    def ask(self, request: m.Request, sink: Sink | None = None) -> m.Reply | RpcError:
        sink = sink or Sink()
        payloads = [memoryview(bytes(size)) for size in getattr(request, "sizes", [])]
        self.gate.handle(Call(sink, m.PeerId(b"peer"), 1, request, payloads, 0, 1_000))
        (answer,) = sink.answers
        return answer


REQUESTS: dict[str, m.Request] = {
    "ping": m.Ping(),
    "lookup by prefix": m.Lookup("", b"", KEYS),
    "lookup of each, with a lease": m.Lookup("n", b"s", KEYS, m.LookupMode.EACH, 1000),
    "lookup of nothing": m.Lookup("", b"", []),
    "load": m.Load("", b"", KEYS),
    "load under a lease": m.Load("", b"", KEYS, TOKEN),
    "load of nothing": m.Load("", b"", []),
    "load into a region": m.Load("", b"", KEYS, None, REGION, [0, UNIT, 3 * UNIT], [UNIT, 7, UNIT]),
    "load into a region that is not there": m.Load("", b"", KEYS[:1], None, NO_REGION, [0], [UNIT]),
    "load beyond the region": m.Load("", b"", KEYS[:1], None, REGION, [REGION_BYTES], [1]),
    "store": m.Store("", b"", KEYS, [UNIT] * 3),
    "store of nothing": m.Store("", b"", [], []),
    "store from a region": m.Store("", b"", KEYS[:1], [UNIT], REGION, [UNIT]),
    "store from a region that is not there": m.Store("", b"", KEYS[:1], [UNIT], NO_REGION, [0]),
    "store from beyond the region": m.Store("", b"", KEYS[:1], [UNIT], REGION, [REGION_BYTES]),
    "delete": m.Delete("", b"", KEYS),
    "delete of nothing": m.Delete("", b"", []),
    "renew": m.Renew(TOKEN, 1000),
    "release": m.Release(TOKEN),
    "lookup with extents": m.Lookup("", b"", KEYS, lease_ms=1000, extents=True),
    "lookup of each with extents": m.Lookup("", b"", KEYS, m.LookupMode.EACH, 1000, extents=True),
    "reserve": m.Reserve("", b"", KEYS, [UNIT] * 3, 1000),
    "commit": m.Commit(TOKEN, [None]),
    "abort": m.Abort(TOKEN, settled=True),
}


def told(answer: m.Reply | RpcError) -> Any:
    """What a client acts on: the words of an error, and when to try again, are not part of it."""
    return (answer.code, answer.field) if isinstance(answer, RpcError) else answer


def offline(request: m.Request) -> tuple[m.Reply | RpcError, bytes]:
    """Ask a gateway whose card is offline; return its answer, and the region afterwards."""
    loop, outcome = SimLoop(random.Random(1)), []

    async def run() -> None:
        medium = Medium(RESERVED_BYTES + LIMITS.capacity_au * UNIT, 512)
        gateway = Gateway(loop, medium, random.Random(1), SETTINGS, Parts(), lambda _: None)
        region = gateway.regions.by_token[REGION] = SimRegion(REGION_BYTES)
        region.view(0, REGION_BYTES)[:] = b"\xff" * REGION_BYTES
        gateway.device.break_connection(10**12)
        payloads = [bytes(size) for size in getattr(request, "sizes", [])]
        answer, _ = await gateway.ask(1, request, payloads)
        outcome.append((answer, bytes(region.memory)))
        await gateway.kill()

    loop.run(run())
    loop.close()
    return outcome[0]


@pytest.mark.parametrize("name", REQUESTS)
def test_every_operation_is_answered_as_by_a_gateway_whose_card_is_offline(name: str) -> None:
    request, waiting = REQUESTS[name], Waiting()
    region = waiting.regions.by_token[REGION]
    region.view(0, REGION_BYTES)[:] = b"\xff" * REGION_BYTES
    answer = waiting.ask(request)
    expected, memory = offline(request)
    assert told(answer) == told(expected)
    assert region.memory == memory


def test_no_operation_is_left_out() -> None:
    assert {type(request) for request in REQUESTS.values()} | {m.Hello} == set(m.OPS.values())


def test_hello_says_what_is_known_without_a_card() -> None:
    assert Waiting().ask(m.Hello("a client")) == m.HelloReply(
        server=HELLO.server,
        card=m.CardInfo("", m.CardState.OFFLINE, 0, 0),
        limits=m.Limits(keys=7),
        features=["region"],
        regions="/regions.sock",
        target=m.TargetInfo(NQN, 2, ["127.0.0.1:4420"]),
    )
    assert hello_of(NO_CARD_YET, parse_card_url("soft:/card.img"), m.Limits(), "/r").target is None


@pytest.mark.parametrize("request_", [REQUESTS["store"], REQUESTS["delete"]])
def test_what_writes_hears_when_to_try_again(request_: m.Request) -> None:
    answer = Waiting().ask(request_)
    assert isinstance(answer, RpcError)
    assert (answer.code, answer.retry_after_ms) == (ErrorCode.CARD_OFFLINE, RETRY_AFTER_MS)


def test_what_has_waited_is_answered_in_its_order() -> None:
    gate, sink = Gate(), Sink()
    for request in (m.Ping(), REQUESTS["store"], REQUESTS["lookup by prefix"]):
        gate.handle(Call(sink, m.PeerId(b"peer"), 1, request, [], 0, 0))
    assert not sink.answers
    gate.stand_in(Waiting().stand_in)
    assert [type(answer) for answer in sink.answers] == [m.PingReply, RpcError, m.LookupReply]


def test_whoever_said_hello_before_the_card_came_is_counted_under_it() -> None:
    waiting = Waiting()
    waiting.ask(m.Hello("a client", "a model", 16))
    waiting.ask(REQUESTS["lookup by prefix"])
    (cell,) = waiting.meter.lookups["_default", "other", "a model"].values()
    assert (cell.tokens_per_key, cell.requested_keys, cell.hit_keys) == (16, 3, 0)
    assert waiting.meter.latencies[m.Lookup].total == 1_000
    for name in ("load", "store", "delete", "renew", "release"):
        waiting.ask(REQUESTS[name])
        assert waiting.meter.latencies[type(REQUESTS[name])].total == 1_000


def test_once_the_card_is_there_the_same_connection_is_served_from_it() -> None:
    loop = SimLoop(random.Random(1))

    async def run() -> None:
        waiting = Waiting()
        assert told(waiting.ask(REQUESTS["store from a region"])) == (ErrorCode.CARD_OFFLINE, None)
        medium = Medium(RESERVED_BYTES + LIMITS.capacity_au * UNIT, 512)
        gateway = Gateway(loop, medium, random.Random(1), SETTINGS, Parts(), lambda _: None)
        gateway.regions.by_token = waiting.regions.by_token
        assert waiting.ask(m.Lookup("", b"", KEYS)) == m.LookupReply(0, [])  # until the gate is open
        waiting.gate.open(gateway.service)
        sink = Sink()
        for request in (
            REQUESTS["store from a region"],
            m.Lookup("", b"", KEYS, lease_ms=1000),
            m.Hello("a client"),
        ):
            waiting.gate.handle(Call(sink, m.PeerId(b"peer"), 1, request, [], 0, loop.clock()))
        await asyncio.sleep(1)
        await gateway.kill()
        hello, found, stored = sorted(sink.answers, key=lambda answer: type(answer).__name__)
        assert isinstance(hello, m.HelloReply)
        assert hello.card.state is m.CardState.ONLINE
        assert isinstance(found, m.LookupReply)
        assert (found.hits, found.lease is not None) == (1, True)
        assert stored == m.StoreReply(["stored"])

    loop.run(run())
    loop.close()
