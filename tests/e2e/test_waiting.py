"""A start whose card is not there yet: it is waited for where somebody manages the service, and whoever asks is answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.gateway import COMMAND, HANG_S, PATIENT, environment, run, serve_arguments
from tests.e2e.notify import Manager
from tests.e2e.target import target
from tests.ports import held_port
from xkv_gateway.daemon import waiting
from xkv_gateway.errors import CardAwayError, ExitCode
from xkv_rpc.async_client import AsyncClient
from xkv_rpc.errors import ErrorCode, RpcError
from xkv_rpc.messages import CardInfo, CardState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from xkv_gateway.target.attach import AttachedCard

KEYS = [b"a" * 16, b"b" * 16]
NQN = "nqn.2014-08.com.example:late"


@contextlib.asynccontextmanager
async def starting(
    home: Path, manager: Manager, card: str, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a gateway under a service manager; it is not expected to serve yet."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *serve_arguments(home / "state", None),
        *("--card", card, *arguments),
        env=environment(
            home,
            NOTIFY_SOCKET=str(manager.path),
            XKV_CONTROL__SOCKET=str(home / "control.sock"),
            XKV_ADMIN__SOCKET=str(home / "admin.sock"),
        ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        manager.close()


async def ask(home: Path, path: str) -> httpx.Response:
    """Ask the admin port, by its Unix socket."""
    transport = httpx.AsyncHTTPTransport(uds=str(home / "admin.sock"))
    async with httpx.AsyncClient(transport=transport, timeout=HANG_S) as client:
        return await client.get(f"http://localhost{path}")


async def test_a_target_that_comes_later_than_the_gateway_is_waited_for(home: Path) -> None:
    manager = Manager(home / "notify")
    with held_port() as port, held_port() as admin:
        listens = ("--listen", f"127.0.0.1:{port}", "--nqn", NQN)
        async with target(home / "card.img", arguments=listens) as url:
            assert (await run(home, "card", "format", url)).code == ExitCode.OK
        async with starting(home, manager, url, "--admin-port", str(admin)) as gateway:
            await manager.until("STATUS=waiting for the card: ")
            await manager.until("EXTEND_TIMEOUT_USEC=", 2)
            client = AsyncClient(f"ipc://{home}/control.sock", PATIENT)
            await client.ping()
            assert (await client.lookup("", b"", KEYS)).hits == 0
            assert (await client.load("", b"", KEYS)).statuses == ["miss", "miss"]
            for refused in (client.store("", b"", KEYS, [b"x", b"y"]), client.delete("", b"", KEYS)):
                with pytest.raises(RpcError) as caught:
                    await refused
                assert caught.value.code is ErrorCode.CARD_OFFLINE
            for unknown in (client.renew(b"l" * 16, 1000), client.release(b"l" * 16)):
                with pytest.raises(RpcError) as caught:
                    await unknown
                assert caught.value.code is ErrorCode.UNKNOWN_LEASE
            early = await client.hello("early")
            assert early.card == CardInfo("", CardState.OFFLINE, 0, 0)
            region = await client.attach_region(1 << 20)
            region.view[:2] = b"xy"
            assert (await ask(home, "/healthz")).status_code == httpx.codes.OK
            not_ready = await ask(home, "/readyz")
            assert not_ready.status_code == httpx.codes.SERVICE_UNAVAILABLE
            assert str(port) in not_ready.json()["reason"]
            metrics = (await ask(home, "/metrics")).text
            assert "xkv_ready 0.0" in metrics
            assert 'xkv_card_state{state="offline"} 1.0' in metrics
            status = await run(home, "status", "--admin", f"127.0.0.1:{admin}")
            assert (status.code, status.out) == (ExitCode.DEGRADED, "")
            assert "waits for its card" in status.err
            assert "READY=1" not in manager.said
            async with target(home / "card.img", None, arguments=listens):
                await manager.until("READY=1")
                hello = await client.hello("early")
                assert hello.card.state is CardState.ONLINE
                assert hello.card.uuid
                assert replace(hello, card=early.card) == early
                stored = await client.store_from("", b"", KEYS, [1, 1], region.token, [0, 1])
                assert set(stored) == {"stored"}
                assert (await client.load("", b"", KEYS)).payloads == [b"x", b"y"]
                region.close()
                assert (await ask(home, "/readyz")).status_code == httpx.codes.OK
                await client.aclose()
                gateway.send_signal(signal.SIGTERM)
                async with asyncio.timeout(HANG_S):
                    assert await gateway.wait() == ExitCode.OK


async def test_a_signal_ends_a_start_that_waits(home: Path) -> None:
    manager = Manager(home / "notify")
    with held_port() as port:
        async with starting(home, manager, f"nvme+tcp://127.0.0.1:{port}/{NQN}") as gateway:
            await manager.until("STATUS=waiting for the card: ")
            gateway.send_signal(signal.SIGTERM)
            async with asyncio.timeout(HANG_S):
                assert await gateway.wait() == ExitCode.OK
            await manager.until("STOPPING=1")
            assert "READY=1" not in manager.said


async def test_a_device_that_is_not_there_yet_is_waited_for(home: Path) -> None:
    manager = Manager(home / "notify")
    async with starting(home, manager, "/dev/disk/by-id/nvme-not-there", "--card-wait", "always"):
        await manager.until("STATUS=waiting for the card: ")


@pytest.mark.parametrize("why", ["another name", "another namespace", "a host that it does not know"])
async def test_a_card_that_answers_and_refuses_is_not_waited_for(home: Path, why: str) -> None:
    known = ("--allow-host", "nqn.2014-08.com.example:somebody") if "host" in why else ()
    async with target(home / "card.img", arguments=known) as url:
        match why:
            case "another name":
                card = url.replace("nqn.", "nqn.2000-01.other:")
            case "another namespace":
                card = url.replace("nsid=1", "nsid=2")
            case _:
                card = url
        arguments = serve_arguments(home / "state", None)
        finished = await run(home, *arguments, "--card", card, "--card-wait", "always")
    assert finished.code == ExitCode.CARD
    assert "cannot use the card" in finished.err


@pytest.mark.parametrize("how", ["auto", "never"])
async def test_in_a_terminal_a_start_without_card_ends_and_says_how_to_wait(home: Path, how: str) -> None:
    with held_port() as port:
        card = f"nvme+tcp://127.0.0.1:{port}/{NQN}"
        arguments = serve_arguments(home / "state", None)
        finished = await run(home, *arguments, "--card", card, "--card-wait", how)
    assert finished.code == ExitCode.CARD
    assert "--card-wait always" in finished.err


async def test_an_attempt_that_takes_for_ever_is_given_up_and_another_one_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "ATTEMPT_S", 0.01)
    ended = asyncio.Event()

    async def slow() -> AttachedCard:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    with pytest.raises(CardAwayError, match="too slow"):
        await waiting._bounded(slow)
    assert ended.is_set()
