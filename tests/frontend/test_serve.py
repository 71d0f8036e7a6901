"""The program itself, as a process: ready, serving, ending."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.frontend.fake_vllm import CHUNKED_HEAD, LAST_CHUNK, FakeVllm, Recorded, chunk, event
from tests.frontend.harness import CHAT, DEADLINE_S, HELLO, KEY_A, SECRET, auth, salt_of, sample_keys, until
from xkv_frontend.core.keys import format_keys
from xkv_frontend.errors import ExitCode
from xkv_frontend.notify import keep_alive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@dataclass(slots=True)
class Served:
    process: asyncio.subprocess.Process
    front: str
    metrics: str
    notified: list[str]
    """What it has told its service manager."""

    async def ended(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()


@asynccontextmanager
async def served(fake: FakeVllm, folder: Path, *more: str, drain: str = "20") -> AsyncIterator[Served]:
    keys, secret = folder / "keys", folder / "secret"
    keys.write_text(format_keys(sample_keys()))
    secret.write_text(SECRET.hex())
    secret.chmod(0o600)
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    notified.bind("\0xkv-frontend-test-" + os.urandom(6).hex())
    seen: list[str] = []
    loop = asyncio.get_running_loop()
    loop.add_reader(notified, lambda: seen.append(notified.recv(1000).decode()))
    arguments = [
        "serve",
        "--upstream",
        fake.url,
        "--bind-address",
        "127.0.0.1",
        "--port",
        "0",
        "--metrics-port",
        "0",
    ]
    arguments += [
        "--deployment",
        "prod",
        "--secret-file",
        str(secret),
        "--keys-file",
        str(keys),
        "--drain-seconds",
        drain,
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "xkv_frontend", *arguments, *more,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "NOTIFY_SOCKET": "@" + notified.getsockname()[1:].decode(), "WATCHDOG_USEC": "200000"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            lines = [(await process.stdout.readline()).decode() for _ in range(3)]
        urls = [re.search(r"http://[\d.]+:\d+", line) for line in lines]
        assert urls[0] is not None
        assert urls[2] is not None
        yield Served(process, urls[0][0], urls[2][0], seen)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        loop.remove_reader(notified)
        notified.close()


async def told(served: Served, wanted: str) -> None:
    await until(lambda: wanted in served.notified)


async def test_it_serves_says_so_and_ends_with_zero(fake: FakeVllm, tmp_path: Path) -> None:
    async with (
        served(fake, tmp_path) as program,
        httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client,
    ):
        await told(program, "READY=1")
        await told(program, "WATCHDOG=1")
        answer = await client.post(program.front + CHAT, json=HELLO, headers=auth(KEY_A))
        assert answer.status_code == 200
        assert fake.requests[0].json["cache_salt"] == salt_of("acme")
        page = (await client.get(program.metrics + "/metrics")).text
        assert 'xkv_frontend_requests_total{route="chat",status="2xx",tenant="acme"} 1.0' in page
        assert (await client.get(program.metrics + "/healthz")).json()["status"] == "ok"
        assert (await client.get(program.front + "/metrics")).status_code == 404
        program.process.send_signal(signal.SIGHUP)
        assert (await client.post(program.front + CHAT, json=HELLO, headers=auth(KEY_A))).status_code == 200
        program.process.send_signal(signal.SIGTERM)
        await told(program, "STOPPING=1")
        assert await program.ended() == ExitCode.OK


async def streaming(fake: FakeVllm, release: asyncio.Event) -> None:
    async def script(_: Recorded, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED_HEAD + chunk(event({"n": 1})))
        await release.wait()
        writer.write(chunk(event(b"[DONE]")) + LAST_CHUNK)

    fake.script = script


async def read_stream(url: str) -> bytes:
    client = httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S)
    async with client, client.stream("POST", url + CHAT, json=HELLO, headers=auth(KEY_A)) as answer:
        return b"".join([piece async for piece in answer.aiter_raw()])


async def test_streams_that_run_are_finished_before_it_ends(fake: FakeVllm, tmp_path: Path) -> None:
    release = asyncio.Event()
    await streaming(fake, release)
    async with (
        served(fake, tmp_path) as program,
        httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client,
    ):
        streams = [asyncio.create_task(read_stream(program.front)) for _ in range(50)]
        await until(lambda: len(fake.requests) == 50)
        program.process.send_signal(signal.SIGTERM)
        await told(program, "STOPPING=1")
        refused = await client.post(program.front + CHAT, json=HELLO, headers=auth(KEY_A))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        assert (await client.get(program.front + "/healthz")).json() == {"status": "draining"}
        release.set()
        assert all(one.endswith(b"[DONE]\n\n") for one in await asyncio.gather(*streams))
        assert await program.ended() == ExitCode.OK


@pytest.mark.parametrize("signals", [1, 2])
async def test_streams_that_never_end_do_not_hold_it_up(fake: FakeVllm, tmp_path: Path, signals: int) -> None:
    await streaming(fake, asyncio.Event())
    async with served(fake, tmp_path, drain="1" if signals == 1 else "600") as program:
        streams = [asyncio.create_task(read_stream(program.front)) for _ in range(50)]
        await until(lambda: len(fake.requests) == 50)
        for _ in range(signals):
            program.process.send_signal(signal.SIGTERM)
            await told(program, "STOPPING=1")
        assert await program.ended() == (ExitCode.OK if signals == 1 else ExitCode.FORCED)
        for one in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(one, httpx.RemoteProtocolError | httpx.ReadError), (
                "cut off, and not as if it had ended well"
            )
        await fake.all_closed()


async def test_a_port_that_is_taken_ends_the_start(fake: FakeVllm, tmp_path: Path) -> None:
    async with served(fake, tmp_path) as program:
        for option, url in (("--port", program.front), ("--metrics-port", program.metrics)):
            taken = url.rpartition(":")[2]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "xkv_frontend", "serve", "--upstream", fake.url, "--port", "0", "--metrics-port", "0",
                option, taken, "--deployment", "prod", "--secret-file", str(tmp_path / "secret"),
                "--keys-file", str(tmp_path / "keys"), stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, errors = await process.communicate()
            assert process.returncode == ExitCode.ADDRESS_IN_USE
            assert option.encode() in errors


@pytest.mark.parametrize(("usec", "pid"), [("", ""), ("0", ""), ("-5", ""), ("soon", ""), ("1000", "1")])
async def test_no_sign_of_life_is_given_where_none_is_expected_of_this_process(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: str
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    said: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        await keep_alive(said.append)
    assert said == []
