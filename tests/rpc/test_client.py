"""The blocking client: deadlines, late replies, the circuit breaker, threads, forks and restarts."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgpack
import pytest
import zmq

from tests.ports import held_port
from tests.rpc.harness import HANG_S, LEASE, DictService, RawClient, serving, wait_until
from tests.rpc.test_codec import packed
from xkv_rpc.client import Client
from xkv_rpc.errors import (
    BadEndpointError,
    BadReplyError,
    CallTimeoutError,
    CircuitOpenError,
    ClientClosedError,
    ErrorCode,
    GatewayUnavailableError,
    GatewayUnreachableError,
    RpcError,
    TooManyCallsError,
)
from xkv_rpc.messages import LoadStatus, LookupMode, StoreStatus
from xkv_rpc.session import BreakerState, ClientOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENT = ClientOptions(timeout_ms=20_000, connect_timeout_ms=20_000)
LASTING = replace(PATIENT, backoff_min_ms=3_600_000, backoff_max_ms=3_600_000)
"""A client whose circuit stays open once it is."""
QUICK = ClientOptions(
    timeout_ms=300, connect_timeout_ms=20_000, probe_timeout_ms=5000, backoff_min_ms=10, backoff_max_ms=20
)


class FakeGateway:
    """A ROUTER that is scripted by the test."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def take(self) -> tuple[bytes, dict[str, Any]]:
        assert self.socket.poll(HANG_S * 1000)
        frames = self.socket.recv_multipart()
        return frames[0], msgpack.unpackb(frames[1])

    def answer(self, peer: bytes, *frames: bytes, **fields: Any) -> None:
        self.socket.send_multipart([peer, msgpack.packb({"v": 1, "ok": True, **fields}), *frames])

    def greet(self, client: Client) -> None:
        """Answer a ping of the client, so that its next call has a connection, however slowly one is made."""
        thread = in_thread(lambda: client.ping(timeout_ms=20_000))
        peer, request = self.take()
        self.answer(peer, id=request["id"])
        thread.join(HANG_S)
        assert not thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(0)
        self.context.term()


@contextlib.contextmanager
def unused_endpoint() -> Iterator[str]:
    """An endpoint where nobody listens."""
    with held_port() as port:
        yield f"tcp://127.0.0.1:{port}"


def in_thread(function: Any) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_every_operation_works_end_to_end(kind: str, tmp_path: Path) -> None:
    endpoint = "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{tmp_path}/c.sock"
    with serving(DictService(), endpoints=[endpoint]) as served, Client(served.endpoint, PATIENT) as client:
        hello = client.hello("test", model="m", tokens_per_key=16)
        assert (hello.server, hello.regions) == ("test", None)
        client.ping()
        payloads = [b"one", bytearray(b"two"), memoryview(b"x" * 300_000)]
        assert client.store("n", b"s", [b"1", b"2", b"3"], payloads) == [StoreStatus.STORED] * 3
        assert client.store("n", b"s", [b"1"], [b"other"]) == [StoreStatus.EXISTS]
        lookup = client.lookup("n", b"s", [b"1", b"2", b"0", b"3"], lease_ms=50)
        assert (lookup.hits, lookup.sizes, lookup.lease, lookup.lease_ms) == (2, [3, 3], LEASE, 50)
        each = client.lookup("n", b"s", [b"1", b"0", b"3"], mode=LookupMode.EACH)
        assert (each.hits, each.sizes, each.lease) == (2, [3, None, 300_000], None)
        loaded = client.load("n", b"s", [b"1", b"0", b"3"], lease=LEASE)
        assert loaded.statuses == [LoadStatus.OK, LoadStatus.MISS, LoadStatus.OK]
        assert [None if p is None else bytes(p) for p in loaded.payloads] == [b"one", None, b"x" * 300_000]
        assert client.lookup("n", b"other", [b"1"]).hits == 0
        assert client.delete("n", b"s", [b"1", b"0"]) == 1
        assert client.renew(LEASE, 77) == 77
        client.release(LEASE)
        with pytest.raises(RpcError) as caught:
            client.release(b"?" * 16)
        assert caught.value.code is ErrorCode.UNKNOWN_LEASE
        client.ping()


def test_an_error_reply_does_not_open_the_circuit() -> None:
    with serving(DictService()) as served, Client(served.endpoint, PATIENT) as client:
        served.run(served.server.stop_accepting)
        for _ in range(3):
            with pytest.raises(RpcError) as caught:
                client.ping()
            assert caught.value.code is ErrorCode.DRAINING
        assert client._breaker.state is BreakerState.CLOSED


def test_a_gateway_that_is_not_there_costs_one_deadline_and_then_nothing() -> None:
    now = itertools.count(time.monotonic_ns())
    frozen_ns: list[int] = []

    def clock() -> int:
        return frozen_ns[0] if frozen_ns else time.monotonic_ns() + 0 * next(now)

    with unused_endpoint() as endpoint, Client(endpoint, QUICK, clock=clock) as client:
        with pytest.raises(GatewayUnreachableError):
            client.ping()
        frozen_ns.append(clock())  # so that no probe comes due
        started = time.perf_counter()
        for _ in range(100):
            with pytest.raises(CircuitOpenError) as caught:
                client.lookup("", b"", [b"k"])
        assert time.perf_counter() - started < 10, "one deadline each would be thirty seconds"
        assert isinstance(caught.value, GatewayUnavailableError)
        assert 0 < caught.value.retry_after_ns <= 20_000_000


def test_a_gateway_that_is_silent_times_out_and_its_late_reply_is_never_taken_for_another() -> None:
    with FakeGateway() as gateway, Client(gateway.endpoint, QUICK) as client:
        gateway.greet(client)
        with pytest.raises(CallTimeoutError):
            client.delete("", b"", [b"k"])
        late_peer, late = gateway.take()

        def serve() -> None:
            with contextlib.suppress(zmq.ZMQError):
                gateway.answer(late_peer, id=late["id"], deleted=111)
            while True:
                peer, request = gateway.take()
                gateway.answer(peer, id=late["id"], deleted=222)
                gateway.answer(peer, id=request["id"] + 1, deleted=333)
                gateway.answer(peer, id=request["id"], deleted=1)
                if request["op"] == "delete":
                    return

        thread = in_thread(serve)

        def deleted() -> int | None:
            try:
                return client.delete("", b"", [b"k"], timeout_ms=20_000)
            except CircuitOpenError:
                return None

        results: list[int | None] = []
        wait_until(lambda: results.append(deleted()) or results[-1] is not None, "the circuit stays open")
        assert results[-1] == 1
        thread.join(HANG_S)


def test_the_circuit_closes_when_the_gateway_is_back(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/c.sock"
    with Client(endpoint, QUICK) as client:
        for _ in range(2):
            with serving(DictService(), endpoints=[endpoint]):

                def answered() -> bool:
                    with contextlib.suppress(GatewayUnavailableError):
                        client.ping(timeout_ms=5000)
                        return True
                    return False

                wait_until(answered, "the client does not come back")
            with pytest.raises(GatewayUnavailableError):
                client.ping()


def test_what_answers_but_does_not_speak_the_protocol_is_a_bad_reply() -> None:
    with FakeGateway() as gateway, Client(gateway.endpoint, LASTING) as client:

        def serve() -> None:
            peer, _ = gateway.take()
            gateway.socket.send_multipart([peer, b"HTTP/1.1 400 Bad Request"])

        thread = in_thread(serve)
        with pytest.raises(BadReplyError):
            client.ping()
        with pytest.raises(CircuitOpenError):
            client.ping()
        thread.join(HANG_S)


def test_a_mistake_of_the_caller_does_not_open_the_circuit() -> None:
    with serving(DictService()) as served, Client(served.endpoint, PATIENT) as client:
        with pytest.raises(TypeError):
            client.lookup("", b"", [object()])  # type: ignore[list-item]
        with pytest.raises(OverflowError):
            client.renew(LEASE, 2**64)
        client.ping()


def test_threads_share_a_client_and_never_see_each_others_replies() -> None:
    service = DictService()
    for number in range(8):
        service.objects["", b"", b"%d" % number] = bytes(number)
    with (
        serving(service) as served,
        Client(served.endpoint, ClientOptions(20_000, 20_000, connections_max=3)) as client,
    ):
        wrong: list[Any] = []

        def work(number: int) -> None:
            for _ in range(100):
                sizes = client.lookup("", b"", [b"%d" % number]).sizes
                if sizes != [number]:
                    wrong.append(sizes)

        threads = [in_thread(lambda number=number: work(number)) for number in range(8)]
        for thread in threads:
            thread.join(HANG_S)
        assert wrong == []
        assert len(client._pool) <= 3


def test_a_call_waits_for_a_free_connection_no_longer_than_its_deadline() -> None:
    with (
        FakeGateway() as gateway,
        Client(gateway.endpoint, ClientOptions(20_000, 20_000, connections_max=1)) as client,
    ):
        thread = in_thread(client.ping)
        peer, request = gateway.take()
        with pytest.raises(TooManyCallsError):
            client.ping(timeout_ms=20)
        gateway.answer(peer, id=request["id"])
        thread.join(HANG_S)
        assert client._breaker.state is BreakerState.CLOSED


def test_closing_interrupts_the_calls_of_other_threads_and_later_ones_are_refused() -> None:
    with FakeGateway() as gateway:
        client = Client(gateway.endpoint, PATIENT)
        outcome: list[Exception] = []

        def work() -> None:
            try:
                client.ping()
            except ClientClosedError as error:
                outcome.append(error)

        thread = in_thread(work)
        gateway.take()
        client.close()
        thread.join(HANG_S)
        assert len(outcome) == 1
        with pytest.raises(ClientClosedError):
            client.ping()
        client.close()


def test_payloads_of_a_call_that_failed_belong_to_the_caller_again() -> None:
    with FakeGateway() as gateway, Client(gateway.endpoint, QUICK) as client:
        payload = bytearray(32 << 20)
        gateway.greet(client)
        with pytest.raises(CallTimeoutError):
            client.store("", b"", [b"k"], [payload])
        payload.append(1)  # fails with BufferError while anything still refers to it


def test_a_signal_does_not_stretch_a_deadline() -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are for the main thread")
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        with FakeGateway() as gateway, Client(gateway.endpoint, QUICK) as client:
            gateway.greet(client)
            with pytest.raises(CallTimeoutError):
                client.ping()  # without an end where each signal begins the wait anew
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("endpoint", ["", "nowhere", "inproc://x", "tcp://127.0.0.1", "ipc://"])
def test_an_endpoint_that_cannot_be_one_is_named(endpoint: str) -> None:
    with Client(endpoint, QUICK) as client, pytest.raises(BadEndpointError) as caught:
        client.ping()
    assert caught.value.address == endpoint


FORKING = """
import os, sys
from xkv_rpc import Client, ClientOptions
client = Client(sys.argv[1], ClientOptions(timeout_ms=20000, connect_timeout_ms=20000))
client.ping()
child = os.fork()
if child == 0:
    for _ in range(20):
        assert client.delete("", b"", [b"k"]) == 0
    client.close()
    os._exit(0)
for _ in range(20):
    assert client.delete("", b"", [b"k"]) == 0
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
client.ping()
client.close()
print("done")
"""


def test_a_client_survives_a_fork_on_both_sides() -> None:
    with serving(DictService()) as served:
        command = [sys.executable, "-W", "error", "-c", FORKING, served.endpoint]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("done\n", "", 0)


CRASHING = """
import os, sys, signal
from xkv_rpc import Client
client = Client(sys.argv[1])
client.ping(timeout_ms=20000)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_client_that_is_killed_and_started_again_is_served_each_time() -> None:
    with serving(DictService()) as served:
        with RawClient(served.endpoint) as client:
            assert client.ask(packed("ping", {}))["ok"]

        def descriptors() -> int:
            return len(list(Path("/proc/self/fd").iterdir()))

        before = descriptors()
        for _ in range(3):
            command = [sys.executable, "-c", CRASHING, served.endpoint]
            ended = subprocess.run(command, capture_output=True, timeout=HANG_S, check=False)
            assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, b"")
        wait_until(lambda: descriptors() <= before + 5, "descriptors leak")
        assert os.getpid()
