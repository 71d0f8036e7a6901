"""What the upstream answers arrives as it was sent, at once, and a reply that broke off looks broken off."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest

from tests.frontend.fake_vllm import CHUNKED_HEAD, LAST_CHUNK, chunk, event, json_reply, reply
from tests.frontend.harness import HELLO, KEY_A, Running, raw_post, running_front, status_of, talk, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm, Recorded

BODY = json.dumps(HELLO).encode()
POST = raw_post(BODY, "Connection: close")


def answering(*pieces: bytes) -> Any:
    async def script(_: Recorded, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return script


def breaking_off(*pieces: bytes) -> Any:
    async def script(request: Recorded, writer: asyncio.StreamWriter) -> None:
        await answering(*pieces)(request, writer)
        writer.close()

    return script


def parts_of(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")[1:]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert len(headers) == len(lines)
    if headers.get("transfer-encoding") == "chunked":
        whole = b""
        while body:
            size, _, rest = body.partition(b"\r\n")
            whole += rest[: int(size, 16)]
            body = rest[int(size, 16) + 2 :]
        body = whole
    return status_of(answer), headers, body


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        ("200 OK", b'{"a": 1}', {"content-type": "application/json"}),
        (
            "200 OK",
            gzip.compress(b"x" * 999, mtime=0),
            {"content-type": "application/json", "content-encoding": "gzip"},
        ),
        ("200 OK", b"\x0b\x02\x80hello\x03", {"content-encoding": "br"}),
        ("200 OK", b"\x28\xb5\x2f\xfd", {"content-encoding": "zstd"}),
        ("200 OK", b'{"cut in the mid', {"content-type": "application/json"}),
        ("400 Bad Request", b'{"error": {"message": "no"}}', {"content-type": "application/json"}),
        ("413 Content Too Large", b"too large", {"content-type": "text/plain"}),
        ("429 Too Many Requests", b"later", {"retry-after": "7"}),
        ("500 Internal Server Error", b"<h1>oops</h1>", {"content-type": "text/html"}),
        ("502 Bad Gateway", b"<html>nginx</html>", {"content-type": "text/html; charset=utf-8"}),
        ("200 OK", b'{"error": "inside a 200"}', {"content-type": "application/json"}),
        ("200 OK", b"", {"content-type": "application/json"}),
    ],
)
async def test_status_bytes_and_type_arrive_unchanged(
    front: Running, fake: FakeVllm, status: str, body: bytes, headers: dict[str, str]
) -> None:
    own = [
        "Server: uvicorn",
        "X-Internal: 10.0.0.1",
        "Set-Cookie: a=b",
        "Via: x",
        "Keep-Alive: timeout=5",
        "Date: now",
    ]
    fake.script = answering(
        reply(status, body, *(f"{name}: {value}" for name, value in headers.items()), *own)
    )
    found_status, found, found_body = parts_of(await talk(front.port, POST))
    assert found_status == int(status.split(maxsplit=1)[0])
    assert found_body == body
    assert found["content-length"] == str(len(body))
    assert headers.items() <= found.items()
    assert found.keys() <= headers.keys() | {"content-length", "date", "x-request-id", "connection"}


@pytest.mark.parametrize("length", [b"", b"Content-Length: 0\r\n", b"Content-Length: 5\r\n"])
async def test_an_empty_204_is_passed(front: Running, fake: FakeVllm, length: bytes) -> None:
    fake.script = answering(b"HTTP/1.1 204 No Content\r\n" + length + b"\r\n")
    status, headers, body = parts_of(await talk(front.port, POST))
    assert (status, body) == (204, b"")
    assert not headers.keys() & {"content-length", "transfer-encoding"}


async def test_what_only_announces_the_answer_is_not_passed(front: Running, fake: FakeVllm) -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    fake.script = answering(early + json_reply({"x": 1}))
    status, headers, body = parts_of(await talk(front.port, POST))
    assert (status, json.loads(body)) == (200, {"x": 1})
    assert "link" not in headers


@pytest.mark.parametrize("reset", [True, False])
async def test_an_answer_without_a_length_ends_well_only_if_its_connection_does(
    front: Running, fake: FakeVllm, reset: bool
) -> None:
    async def script(_: Recorded, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{}")
        if reset:
            await passed.wait()
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    passed = asyncio.Event()
    fake.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(POST)
    answer = await reader.readuntil(b"{}")
    passed.set()
    answer += await reader.read()
    writer.close()
    assert answer.endswith(LAST_CHUNK) == (not reset)


async def test_a_hundred_megabytes_pass_without_being_held(front: Running, fake: FakeVllm) -> None:
    piece = bytes(range(256)) * 4096
    fake.script = answering(
        reply("200 OK", b"", "X: y").replace(b"Content-Length: 0", b"Content-Length: 104857600"),
        *[piece] * 100,
    )
    total = 0
    async with front.client.stream(
        "POST", "/v1/chat/completions", json=HELLO, headers={"authorization": f"Bearer {KEY_A}"}
    ) as answer:
        async for data in answer.aiter_raw():
            total += len(data)
    assert total == 100 << 20


STREAM = (
    b": comment\n\n" + event({"text": "ä" * 10}) + b"data: with\r\ndata: CRLF\r\n\r\n" + b"data:\n\n" + b"event: error\ndata: {}\n\n"
)  # fmt: skip


@pytest.mark.parametrize("done", [event(b"[DONE]"), b""])
async def test_a_stream_passes_byte_for_byte_wherever_it_is_cut(
    front: Running, fake: FakeVllm, done: bytes
) -> None:
    stream = STREAM + done
    fake.script = answering(CHUNKED_HEAD, *(chunk(bytes([byte])) for byte in stream), LAST_CHUNK)
    answer = await talk(front.port, POST)
    assert answer.endswith(LAST_CHUNK)
    status, headers, body = parts_of(answer)
    assert (status, body, headers["content-type"]) == (200, stream, "text/event-stream; charset=utf-8")


async def test_each_event_is_passed_on_before_the_next_one_is_there(front: Running, fake: FakeVllm) -> None:
    go_on = asyncio.Queue[None]()

    async def script(_: Recorded, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED_HEAD)
        for number in range(3):
            await go_on.get()
            writer.write(chunk(event({"n": number})))
        await go_on.get()
        writer.write(LAST_CHUNK)

    fake.script = script
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(POST)
    assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n"), (
        "the head comes before the first event"
    )
    for number in range(3):
        go_on.put_nowait(None)
        assert json.loads((await reader.readuntil(b"}"))[-8:]) == {"n": number}
    go_on.put_nowait(None)
    assert (await reader.read()).endswith(LAST_CHUNK)
    writer.close()


BROKEN = {
    "stream without its end": (CHUNKED_HEAD, *[chunk(event({"n": n})) for n in range(3)]),
    "half a chunk": (CHUNKED_HEAD, b"ff\r\ndata: half"),
    "nonsense for a chunk": (CHUNKED_HEAD, chunk(event({})), b"zz\r\n"),
    "less than announced": (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nfifty",),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_reply_that_broke_off_breaks_off(front: Running, fake: FakeVllm, name: str) -> None:
    fake.script = breaking_off(*BROKEN[name])
    answer = await talk(front.port, POST)
    assert status_of(answer) == 200
    assert not answer.endswith(LAST_CHUNK)
    assert b"[DONE]" not in answer
    if name == "less than announced":
        assert b"content-length: 100" in answer
        assert answer.endswith(b"fifty")
    await until(lambda: '"outcome": "truncated"' in "".join(front.log))


async def test_over_http_1_0_an_answer_that_broke_off_ends_with_a_reset_and_one_that_did_not_does_not(
    front: Running, fake: FakeVllm
) -> None:
    """Nothing else tells the two apart: nginx, for one, asks in HTTP/1.0."""
    old = POST.replace(b"HTTP/1.1", b"HTTP/1.0")
    for end in (LAST_CHUNK, b""):
        fake.script = breaking_off(CHUNKED_HEAD, chunk(event({"n": 1})), end)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(old)
        answer = await reader.readuntil(b"}\n\n")
        assert b"chunked" not in answer
        if end:
            assert await reader.read() == b""
        else:
            with pytest.raises(ConnectionResetError):
                await reader.read()
        writer.close()


async def test_more_than_announced_is_cut_at_what_was_announced(front: Running, fake: FakeVllm) -> None:
    fake.script = answering(
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfiveXHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    )
    assert (await front.post(HELLO)).content == b"fiveX"
    fake.script = None
    assert "usage" in (await front.post(HELLO)).json()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200",
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 999999 X\r\n\r\n",
        b"HTTP/1.1 600 X\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nhello",
        b"HTTP/1.1 102 Processing\r\n\r\n" * 1000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nhello",
        CHUNKED_HEAD.replace(b"\r\n", b"\r\nContent-Length: 3\r\n", 1) + chunk(b"hello") + LAST_CHUNK,
    ],
)
async def test_an_upstream_that_does_not_answer_in_http_is_a_502(
    front: Running, fake: FakeVllm, raw: bytes
) -> None:
    fake.script = breaking_off(raw)
    answer = await front.post(HELLO)
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "upstream_failed"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_of_the_upstream_goes_nowhere(front: Running, fake: FakeVllm, status: int) -> None:
    fake.script = answering(reply(f"{status} X", b"", f"Location: {fake.url}/invocations"))
    answer = await front.post(HELLO)
    assert answer.status_code == 502
    assert "location" not in answer.headers
    assert str(fake.port) not in answer.text


async def test_an_upstream_that_is_not_there_is_a_502_without_its_address(
    front: Running, fake: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    await fake.stop()
    answer = await front.post(HELLO)
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "upstream_unreachable"
    assert "127.0.0.1" not in answer.text
    assert str(fake.port) not in answer.text
    await fake.start()
    assert (await front.post(HELLO)).status_code == 200


async def test_the_upstream_gets_its_own_key_and_never_the_clients(fake: FakeVllm, tmp_path: Path) -> None:
    async with running_front(fake, tmp_path, authorization=b"Bearer of-the-upstream") as front:
        await front.post(HELLO)
        await front.client.get("/v1/models", headers={"authorization": f"Bearer {KEY_A}"})
    assert [request.header("authorization") for request in fake.requests] == ["Bearer of-the-upstream"] * 2
    assert all(KEY_A not in str(request) for request in fake.requests)


async def test_what_an_upstream_sends_too_much_is_nobodys_answer(front: Running, fake: FakeVllm) -> None:
    fake.script = answering(json_reply({"x": 1}) + json_reply({"evil": 1}) * 3)
    answers = await asyncio.gather(*(front.post(HELLO) for _ in range(20)))
    assert all(answer.json() == {"x": 1} for answer in answers)
    await fake.all_closed()
