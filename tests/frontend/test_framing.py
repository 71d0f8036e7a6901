"""What is read as one request is sent on as one request, whatever its frame claims. Raw bytes over real sockets."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.frontend.harness import (
    CHAT,
    DEADLINE_S,
    HELLO,
    KEY_A,
    Running,
    raw_post,
    running_front,
    salt_of,
    status_of,
    talk,
    until,
)
from xkv_frontend.core.policy import Policy
from xkv_frontend.protocol import FrontProtocol

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm

BODY = json.dumps(HELLO).encode()
SMUGGLED = b"POST /reset_prefix_cache HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY_A}\r\nContent-Type: application/json\r\n".encode()
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
CLOSE = "Connection: close"


def nothing_smuggled(fake: FakeVllm, at_most: int = 1) -> None:
    assert len(fake.requests) <= at_most
    assert not fake.bad_bytes
    for request in fake.requests:
        assert request.target == CHAT
        assert request.header("content-length") == str(len(request.body))
        assert request.json["cache_salt"] == salt_of("acme")


REFUSED = {
    "both lengths": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS + SMUGGLED,
    "both lengths, other order": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + CHUNKS,
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 500\r\n\r\n" + BODY,
    "list of lengths": HEAD + b"Content-Length: 5, 6\r\n\r\n" + BODY,
    "signed length": HEAD + b"Content-Length: +5\r\n\r\n" + BODY,
    "vertical tab before chunked": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS,
    "unknown coding": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "coding twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + CHUNKS,
    "blank before colon": HEAD + b"Content-Length : 5\r\n\r\n" + BODY,
    "name with NUL": HEAD + b"Content-\0Length: 5\r\n\r\n" + BODY,
    "value with NUL": HEAD + b"X: a\0b\r\nContent-Length: 5\r\n\r\n" + BODY,
    "bad chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nabcde\r\n0\r\n\r\n",
    "huge chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    "chunk longer than said": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "no host": HEAD.replace(b"Host: x\r\n", b"") + b"Content-Length: 2\r\n\r\n{}",
    "two hosts": HEAD + b"Host: y\r\nContent-Length: 2\r\n\r\n{}",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_frames_that_two_readers_could_read_differently_are_refused_and_closed(
    front: Running, fake: FakeVllm, name: str
) -> None:
    answer = await talk(front.port, REFUSED[name])
    assert status_of(answer) in (400, 501)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert fake.connections == 0


REFRAMED = {
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + CHUNKS,
    "chunk extensions": HEAD
    + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    + CHUNKS.replace(b"\r\n", b";a=b\r\n", 1),
    "trailers": HEAD
    + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    + CHUNKS.removesuffix(b"\r\n")
    + b"Content-Length: 3\r\nX: y\r\n\r\n",
    "folded header": HEAD
    + b"X-Fold: a\r\n b\r\nConnection: close\r\n"
    + b"Content-Length: %d\r\n\r\n" % len(BODY)
    + BODY,
    "bare LF": (HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)).replace(b"\r\n", b"\n")
    + BODY,
    "lengths that agree": HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "headers that name others": HEAD
    + b"Connection: close, x-salt\r\nX-Salt: 1\r\nCache_Salt: 1\r\nContent_Length: 3\r\nX-Request-Id: mine\r\n"
    + b"X-Forwarded-For: 1.2.3.4\r\nForwarded: for=1\r\nTE: trailers\r\nKeep-Alive: 1\r\nProxy-Authorization: x\r\n"
    + b"X-Data-Parallel-Rank: 3\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nCookie: a=b\r\nContent-Length: %d\r\n\r\n"
    % len(BODY)
    + BODY,
}


@pytest.mark.parametrize("name", REFRAMED)
async def test_other_frames_are_written_anew(front: Running, fake: FakeVllm, name: str) -> None:
    answer = await talk(front.port, REFRAMED[name])
    assert status_of(answer) == 200
    nothing_smuggled(fake)
    assert {key for key, _ in fake.requests[0].headers} == {
        "host", "accept", "accept-encoding", "user-agent", "x-request-id", "content-type", "content-length",
        "connection",
    }  # fmt: skip
    assert fake.requests[0].header("x-request-id") != "mine"


async def test_what_follows_a_body_never_becomes_a_request_to_the_upstream(
    front: Running, fake: FakeVllm
) -> None:
    answer = await talk(front.port, raw_post(BODY) + SMUGGLED + raw_post(BODY))
    assert status_of(answer) == 200
    assert answer.count(b"HTTP/1.1 ") == 1, "the connection ends with the first answer"
    nothing_smuggled(fake)


async def test_a_body_longer_than_announced_is_cut_and_what_is_left_is_dropped(
    front: Running, fake: FakeVllm
) -> None:
    answer = await talk(front.port, raw_post(BODY + b"x" * 495 + SMUGGLED, length=5))
    assert status_of(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1
    assert fake.connections == 0


async def test_a_body_shorter_than_announced_is_no_request(front: Running, fake: FakeVllm) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(raw_post(BODY, length=len(BODY) + 10))
    await writer.drain()
    await until(lambda: front.front.running == 1)
    writer.close()
    await until(lambda: front.front.running == 0)
    assert fake.connections == 0


async def test_a_client_that_asks_to_continue_is_told_to_only_when_its_head_is_accepted(
    front: Running, fake: FakeVllm
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(raw_post(b"", "Expect: 100-continue", CLOSE, length=len(BODY)))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    writer.write(BODY)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert fake.requests[0].header("expect") is None
    refused = await talk(front.port, raw_post(b"", "Expect: 100-continue", key="wrong", length=len(BODY)))
    assert status_of(refused) == 401


async def test_a_body_on_a_route_without_one_is_refused(front: Running, fake: FakeVllm) -> None:
    head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY_A}\r\nContent-Length: {len(SMUGGLED)}\r\n\r\n"
    answer = await talk(front.port, head.encode() + SMUGGLED)
    assert status_of(answer) == 400
    assert fake.connections == 0


@pytest.mark.parametrize("headers", [10_000, 101])
async def test_too_many_headers_are_refused(front: Running, fake: FakeVllm, headers: int) -> None:
    answer = await talk(front.port, raw_post(BODY, *(f"X-{n}: y" for n in range(headers))))
    assert status_of(answer) in (400, 431)
    assert fake.connections == 0


@pytest.mark.parametrize("size", [33 << 10, 64 << 10, 1 << 20])
async def test_a_head_that_is_too_large_is_refused(front: Running, fake: FakeVllm, size: int) -> None:
    answer = await talk(front.port, raw_post(BODY, "X: " + "y" * size))
    assert status_of(answer) in (400, 431)
    assert fake.connections == 0


async def test_a_head_that_never_ends_costs_its_connection(fake: FakeVllm, tmp_path: Path) -> None:
    class Hasty(FrontProtocol):
        head_timeout_s = 0.05

    class LessHasty(FrontProtocol):
        head_timeout_s = 1.0

    async with running_front(fake, tmp_path, protocol=Hasty) as front:
        for first in (b"", b"POST /v1/chat", raw_post(BODY)[:-60].partition(b"\r\n\r\n")[0]):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(first)
            async with asyncio.timeout(DEADLINE_S):
                with suppress(ConnectionError):
                    while not reader.at_eof():
                        # One byte at a time does not help: the clock runs from the first.
                        writer.write(b"x")
                        await writer.drain()
                        with suppress(TimeoutError):
                            assert await asyncio.wait_for(reader.read(100), 0.01) == b""
            writer.close()
    # The second head of a connection has the same clock as the first.
    async with running_front(fake, tmp_path, protocol=LessHasty) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(raw_post(BODY))
        await reader.readuntil(b"}")
        writer.write(b"P")
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionError):
                await reader.read()
        writer.close()


async def test_a_body_over_the_limit_is_refused_before_it_is_read(fake: FakeVllm, tmp_path: Path) -> None:
    async with running_front(fake, tmp_path, policy=Policy(body_bytes_max=1000)) as front:
        answer = await talk(front.port, raw_post(b"", "Expect: 100-continue", length=10**12))
        assert status_of(answer) == 413
        assert b"100 Continue" not in answer
        assert status_of(await talk(front.port, raw_post(b" " * 100_000))) == 413
        chunks = b"400\r\n" + b" " * 1024 + b"\r\n"
        answer = await talk(
            front.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks * 2 + b"0\r\n\r\n"
        )
        assert status_of(answer) == 413
        assert fake.connections == 0
