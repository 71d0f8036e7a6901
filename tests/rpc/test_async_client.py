"""The asyncio client: many calls on one connection, each with its own reply, deadline and fate."""

from __future__ import annotations

import asyncio
import contextlib
import select
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from zmq.utils.garbage import gc as zero_copy

from tests.rpc.harness import HANG_S, LEASE, DictService, serving, wait_until
from tests.rpc.test_client import LASTING, PATIENT, QUICK, FakeGateway, unused_endpoint
from xkv_rpc.async_wire import AsyncWire, served
from xkv_rpc.client import AsyncClient
from xkv_rpc.errors import (
    BadReplyError,
    CallTimeoutError,
    CircuitOpenError,
    ClientClosedError,
    ConnectionLostError,
    ConnectionResetByClientError,
    ErrorCode,
    GatewayUnavailableError,
    GatewayUnreachableError,
    RpcError,
    TooManyCallsError,
)
from xkv_rpc.messages import LoadStatus, StoreStatus
from xkv_rpc.session import BreakerState, ClientOptions

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Any:
    """Run a coroutine on each kind of loop."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def runner(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as loop:
            loop.run(work)

    return runner


def test_every_operation_works_end_to_end(run: Any) -> None:
    async def work(endpoint: str) -> None:
        async with AsyncClient(endpoint, PATIENT) as client:
            assert (await client.hello("test")).server == "test"
            await client.ping()
            payloads = [b"one", bytearray(300_000)]
            assert await client.store("", b"", [b"1", b"2"], payloads) == [StoreStatus.STORED] * 2
            assert (await client.lookup("", b"", [b"1", b"2", b"3"], lease_ms=5)).hits == 2
            loaded = await client.load("", b"", [b"2", b"3", b"1"])
            assert loaded.statuses == [LoadStatus.OK, LoadStatus.MISS, LoadStatus.OK]
            assert [None if p is None else len(p) for p in loaded.payloads] == [300_000, None, 3]
            assert await client.delete("", b"", [b"1"]) == 1
            assert await client.renew(LEASE, 5) == 5
            await client.release(LEASE)
            with pytest.raises(RpcError) as caught:
                await client.release(b"?" * 16)
            assert caught.value.code is ErrorCode.UNKNOWN_LEASE

    with serving(DictService()) as served:
        run(work(served.endpoint))


def test_many_calls_in_flight_each_get_their_own_reply(run: Any) -> None:
    service = DictService()
    for number in range(500):
        service.objects["", b"", b"%d" % number] = bytes(number)

    async def work(endpoint: str) -> None:
        async with AsyncClient(endpoint, PATIENT) as client:
            replies = await asyncio.gather(*(client.lookup("", b"", [b"%d" % n]) for n in range(500)))
            assert [reply.sizes for reply in replies] == [[n] for n in range(500)]

    with serving(service) as served:
        run(work(served.endpoint))


def test_replies_that_overtake_each_other_find_their_calls(run: Any) -> None:
    service = DictService()
    service.hold = True

    async def work(served: Any) -> None:
        async with AsyncClient(served.endpoint, PATIENT) as client:
            calls = [asyncio.ensure_future(client.renew(LEASE, n + 1)) for n in range(50)]
            await asyncio.to_thread(wait_until, lambda: len(service.held) == 50, "calls are missing")
            assert [call.request.lease_ms for call in service.held] == list(range(1, 51))  # type: ignore[union-attr]
            served.run(lambda: [service.answer(call) for call in reversed(service.held)])
            assert await asyncio.gather(*calls) == list(range(1, 51))

    with serving(service) as served:
        run(work(served))


def test_a_gateway_that_is_not_there_opens_the_circuit(run: Any) -> None:
    async def work() -> None:
        with unused_endpoint() as endpoint:
            await refuses(endpoint)

    async def refuses(endpoint: str) -> None:
        async with AsyncClient(endpoint, LASTING) as client:
            with pytest.raises(GatewayUnreachableError):
                await client.ping(timeout_ms=300)
            with pytest.raises(CircuitOpenError):
                await client.ping()

    run(work())


def test_a_late_reply_is_dropped_and_the_connection_serves_on(run: Any) -> None:
    async def work(gateway: FakeGateway) -> None:
        async with AsyncClient(gateway.endpoint, PATIENT) as client:
            greeting = asyncio.ensure_future(client.ping())  # so that the next call has a connection
            first_peer, first = await asyncio.to_thread(gateway.take)
            gateway.answer(first_peer, id=first["id"])
            await greeting
            with pytest.raises(CallTimeoutError):
                await client.delete("", b"", [b"k"], timeout_ms=300)
            peer, late = await asyncio.to_thread(gateway.take)
            client._breaker.succeeded()
            call = asyncio.ensure_future(client.delete("", b"", [b"k"]))
            same_peer, request = await asyncio.to_thread(gateway.take)
            assert same_peer == peer
            gateway.answer(peer, id=late["id"], deleted=111)
            gateway.answer(peer, id=request["id"], deleted=1)
            assert await call == 1
            assert client.unmatched_replies == 1

    with FakeGateway() as gateway:
        run(work(gateway))


def test_a_reply_that_comes_twice_answers_one_call(run: Any) -> None:
    async def work(gateway: FakeGateway) -> None:
        async with AsyncClient(gateway.endpoint, PATIENT) as client:
            for number in (1, 2, 3):
                call = asyncio.ensure_future(client.delete("", b"", [b"k"]))
                peer, request = await asyncio.to_thread(gateway.take)
                gateway.answer(peer, id=request["id"], deleted=number)
                gateway.answer(peer, id=request["id"], deleted=99)
                assert await call == number
            last = asyncio.ensure_future(client.ping())
            peer, request = await asyncio.to_thread(gateway.take)
            gateway.answer(peer, id=request["id"])
            await last
            assert client.unmatched_replies == 3

    with FakeGateway() as gateway:
        run(work(gateway))


def test_the_circuit_closes_when_the_gateway_is_back(run: Any, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/c.sock"

    async def comes_back(client: AsyncClient) -> None:
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(GatewayUnavailableError):
                    await client.ping(timeout_ms=5000)
                    return
                await asyncio.sleep(0.001)

    async def work() -> None:
        async with AsyncClient(endpoint, QUICK) as client:
            for _ in range(2):
                with serving(DictService(), endpoints=[endpoint]):
                    await comes_back(client)
                    assert client._breaker.state is BreakerState.CLOSED
                with pytest.raises(GatewayUnavailableError):
                    await client.ping()

    run(work())


def test_a_gateway_that_comes_while_a_call_waits_for_a_connection_answers_it(
    run: Any, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/c.sock"

    async def work() -> None:
        async with AsyncClient(endpoint, PATIENT) as client:
            call = asyncio.ensure_future(client.ping())
            async with asyncio.timeout(HANG_S):
                while True:
                    await asyncio.sleep(0.001)
                    if isinstance(client._dealer, AsyncWire) and client._dealer._retry is not None:
                        break
            with serving(DictService(), endpoints=[endpoint]):
                await call

    run(work())


def test_names_are_looked_up_beside_the_loop() -> None:
    assert served("tcp://127.0.0.1:1")
    assert served("tcp://[::1]:1")
    assert served("ipc:///run/x.sock")
    assert not served("tcp://localhost:1")


def test_what_a_gateway_said_last_is_heard_though_the_connection_ended_before_anybody_looked(
    run: Any,
) -> None:
    async def work(gateway: FakeGateway) -> None:
        async with AsyncClient(gateway.endpoint, PATIENT) as client:
            calls = [asyncio.ensure_future(client.delete("", b"", [b"k"])) for _ in range(9)]
            taken = [await asyncio.to_thread(gateway.take) for _ in calls]
            # From here on the loop stands still until the end of the connection has arrived behind the replies.
            assert isinstance(client._dealer, AsyncWire)
            ended = select.poll()
            ended.register(client._dealer._sock, select.POLLRDHUP)
            for number, (peer, request) in enumerate(taken[:8]):  # the last one is never answered
                gateway.answer(peer, id=request["id"], deleted=number)
            gateway.socket.close(20_000)
            gateway.context.term()
            assert ended.poll(HANG_S * 1000)
            assert await asyncio.gather(*calls[:8]) == list(range(8))
            with pytest.raises(ConnectionLostError):
                await calls[8]

    with FakeGateway() as gateway:
        run(work(gateway))


def test_a_cancelled_store_takes_its_payload_back(run: Any) -> None:
    async def work(gateway: FakeGateway) -> None:
        async with AsyncClient(gateway.endpoint, PATIENT) as client:
            other = asyncio.ensure_future(client.ping())
            await asyncio.to_thread(gateway.take)
            store = asyncio.ensure_future(client.store("", b"", [b"k"], [bytes(48 << 20)]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            store.cancel()
            with pytest.raises(asyncio.CancelledError):
                await store
            assert zero_copy.refs == {}  # the transport refers to nothing that it has not copied
            # The connection had to be given up for that, and its other calls hear so.
            with pytest.raises(ConnectionResetByClientError):
                await other
            assert client._breaker.state is BreakerState.CLOSED

    with FakeGateway() as gateway:
        run(work(gateway))


def test_calls_beyond_the_bound_wait_no_longer_than_their_deadline(run: Any) -> None:
    async def work(gateway: FakeGateway) -> None:
        async with AsyncClient(gateway.endpoint, ClientOptions(20_000, 20_000, calls_max=1)) as client:
            call = asyncio.ensure_future(client.ping())
            peer, request = await asyncio.to_thread(gateway.take)
            with pytest.raises(TooManyCallsError):
                await client.ping(timeout_ms=20)
            gateway.answer(peer, id=request["id"])
            await call

    with FakeGateway() as gateway:
        run(work(gateway))


def test_a_reply_that_is_none_voids_the_connection(run: Any) -> None:
    async def work(gateway: FakeGateway) -> None:
        async with AsyncClient(gateway.endpoint, LASTING) as client:
            calls = [asyncio.ensure_future(client.ping()) for _ in range(2)]
            peer, _ = await asyncio.to_thread(gateway.take)
            gateway.socket.send_multipart([peer, b"nonsense"])
            for call in calls:
                with pytest.raises(BadReplyError):
                    await call
            with pytest.raises(CircuitOpenError):
                await client.ping()

    with FakeGateway() as gateway:
        run(work(gateway))


def test_closing_ends_the_calls_and_later_ones_are_refused(run: Any) -> None:
    async def work(gateway: FakeGateway) -> None:
        client = AsyncClient(gateway.endpoint, PATIENT)
        call = asyncio.ensure_future(client.ping())
        await asyncio.to_thread(gateway.take)
        await client.aclose()
        with pytest.raises(ClientClosedError):
            await call
        with pytest.raises(ClientClosedError):
            await client.ping()
        await client.aclose()

    with FakeGateway() as gateway:
        run(work(gateway))


def test_a_mistake_of_the_caller_does_not_open_the_circuit(run: Any) -> None:
    async def work(endpoint: str) -> None:
        async with AsyncClient(endpoint, PATIENT) as client:
            with pytest.raises(TypeError):
                await client.lookup("", b"", [object()])  # type: ignore[list-item]
            await client.ping()

    with serving(DictService()) as served:
        run(work(served.endpoint))
