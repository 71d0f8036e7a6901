"""Nonsense at both ports, from one seed: the gateway stays up and small, and a good client is served all the time.

TEST_FUZZ_INPUTS in the environment asks for more inputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgpack

from tests.e2e.gateway import HANG_S, Gateway, serving
from xkv_rpc import zmtp

if TYPE_CHECKING:
    from collections.abc import Callable

INPUTS: Final = int(os.environ.get("TEST_FUZZ_INPUTS", "400"))
SEED: Final = 6
SERVED_WITHIN_S: Final = 0.05
GROWTH_BYTES_MAX: Final = 48 << 20
GOOD: Final = {"v": 1, "id": 7, "op": "lookup", "ns": "", "scope": b"", "keys": [b"k"]}
CONSTANTS: Final = (
    b"",
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 100_000 + b"\xc0",
    b"\x91" * 500 + b"\xc0",
    b"\x80\x80",
    b"\xa1\xff",
    b"cos\nsystem\n(S'true'\ntR.",
)
ANSWER_S: Final = 0.01
"""How long the rest of an input waits for an answer to its beginning; most get none."""
HANDSHAKE_BYTES: Final = len(zmtp.GREETING + zmtp.ready(b"DEALER"))
VALUES: Final = (
    None,
    True,
    -1,
    2**64 - 1,
    1.5,
    "",
    "x" * 2000,
    b"",
    b"x" * 300,
    [],
    [[]],
    {},
    {"a": {"b": 1}},
)


def mutated(rng: random.Random) -> bytes:
    """Return a request with something wrong about it, or just bytes."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(CONSTANTS)
    if kind == 1:
        return rng.randbytes(rng.randrange(200))
    request = dict(
        GOOD, op=rng.choice(["hello", "lookup", "load", "store", "delete", "renew", "release", "x"])
    )
    for _ in range(rng.randrange(1, 4)):
        request[rng.choice([*GOOD, "lease", "sizes", "region", "offsets", "mode", "?"])] = rng.choice(VALUES)
    raw = bytearray(msgpack.packb(request))
    if kind == 3:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def message_input(rng: random.Random) -> bytes:
    """Return a connection's bytes: a handshake and messages, now and then broken at any level."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(1, 400))
    greeting = bytearray(zmtp.GREETING)
    if rng.random() < 0.1:
        greeting[rng.randrange(64)] ^= 1 << rng.randrange(8)
    parts = [bytes(greeting), zmtp.ready(rng.choice([b"DEALER", b"REQ", b"PUB", b"ROUTER"]))]
    for _ in range(rng.randrange(1, 5)):
        frames = [mutated(rng) for _ in range(rng.choice([1, 1, 1, 2, 7]))]
        parts += [bytes(part) for part in zmtp.message(frames[0], frames[1:])]
    raw = b"".join(parts)
    return raw[: rng.randrange(len(raw))] if rng.random() < 0.1 else raw


def http_input(rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(1, 400))
    method = rng.choice(["GET", "PUT", "DELETE", "POST", "HEAD", "BREW", "G\0T", "GET " * 50])
    paths = [
        "/",
        "/v1/status",
        "/v1/namespaces/" + "%2F" * 20,
        "/quota/%00",
        "/quota/" + "x" * 3000,
        "//",
        "/%ff",
        "*",
    ]
    lines = [f"{method} {rng.choice(paths)} HTTP/{rng.choice(['1.1', '1.0', '9.9', 'x'])}"]
    headers = [
        "Host: 127.0.0.1",
        "Host: evil.example",
        "Content-Length: 5",
        "Content-Length: -1",
        "Content-Length: 99999999999999999999",
        "Transfer-Encoding: chunked",
        "Authorization: Bearer " + "x" * 500,
        "X: " + "y" * 20_000,
        "broken",
    ]
    lines += rng.choices(headers, k=rng.randrange(0, 5))
    body = rng.choice(["", "{}", '{"limit_gb": NaN}', '{"limit_gb": 1e999}', "[" * 5000, "5\r\nabc"])
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode("latin-1")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def loop_spent_s(pid: int) -> float:
    """Return the processor time of the thread that serves: unlike the time of a clock, other processes add nothing to it."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def throw(address: tuple[str, int], inputs: list[bytes]) -> None:
    """Send each on a connection of its own, take what comes back, and go away."""
    for data in inputs:
        with socket.create_connection(address, timeout=HANG_S) as connection:
            try:
                # In two parts, so that a handshake can be answered before the rest arrives.
                connection.sendall(data[:HANDSHAKE_BYTES])
                connection.settimeout(ANSWER_S)
                with contextlib.suppress(TimeoutError):
                    while (answer := connection.recv(4096)) and b"READY" not in answer:
                        continue
                connection.settimeout(HANG_S)
                connection.sendall(data[HANDSHAKE_BYTES:])
                # The gateway has taken it all in when it hangs up in its turn.
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    continue
            except TimeoutError:
                raise
            except OSError:
                continue


async def survives(gateway: Gateway, port: int, make: Callable[[random.Random], bytes]) -> None:
    rng = random.Random(SEED)
    pid = gateway.process.pid
    address = ("127.0.0.1", port)
    await asyncio.to_thread(throw, address, [make(rng) for _ in range(INPUTS // 4)])
    before = rss_bytes(pid)
    inputs = [make(rng) for _ in range(INPUTS)]
    throwing = asyncio.get_running_loop().run_in_executor(None, throw, address, inputs)
    spent_s = []
    async with gateway.client() as client:
        while not throwing.done():
            since_s = loop_spent_s(pid)
            assert (await client.lookup("", b"", [b"good"])).hits == 1
            spent_s.append(loop_spent_s(pid) - since_s)
            await asyncio.sleep(0.01)
        await throwing
    assert rss_bytes(pid) - before < GROWTH_BYTES_MAX
    # What a good client waits for, were the gateway alone on its machine: whatever nonsense it deals with first, and the answer.
    assert max(spent_s) < SERVED_WITHIN_S
    assert "Traceback" not in gateway.log_text


async def test_nonsense_at_both_ports_changes_nothing(home: Path) -> None:
    async with serving(home / "state", XKV_LOG__LEVEL="debug") as gateway:
        async with gateway.client() as client:
            await client.store("", b"", [b"good"], [b"bytes"])
        start = descriptors(gateway.process.pid)
        await survives(gateway, gateway.control_port, message_input)
        await survives(gateway, int(gateway.admin.rpartition(":")[2]), http_input)
        bad = (await gateway.status())["transport"]["bad_messages"]
        assert bad > INPUTS // 4
        async with asyncio.timeout(HANG_S):
            while descriptors(gateway.process.pid) > start + 5:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        assert await gateway.end() == 0
