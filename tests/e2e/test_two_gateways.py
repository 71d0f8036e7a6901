"""Two gateways and one card, over a target that neither of them started."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.commands import command
from tests.e2e.gateway import HANG_S, run, serve_arguments, serving
from tests.e2e.target import target
from xkv_gateway.errors import ExitCode
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from xkv_rpc.async_client import AsyncClient

SHORT = {"XKV_NVME__KEEP_ALIVE_MS": "2000", "XKV_NVME__COMMAND_TIMEOUT_MS": "2000"}
"""So that a run before is settled after four seconds."""
KEPT = 500
KEYS = [bytes([number]) * 32 for number in range(8)]
PAYLOADS = [bytes([number]) * 70_000 for number in range(8)]


@pytest.fixture(params=[True, False], ids=["reservations", "none"])
def reservations(request: pytest.FixtureRequest) -> bool:
    """Whether the card can be reserved."""
    return bool(request.param)


@pytest.fixture
async def card(home: Path, reservations: bool) -> AsyncIterator[str]:
    """A formatted card, as a URL."""
    async with target(home / "card.img", reservations=reservations) as url:
        formatted = await command(
            home, "card", "format", url, "--label", "shared", "--state-dir", str(home / "op")
        )
        assert formatted.code == ExitCode.OK, formatted.err
        yield url


def online(status: dict[str, Any]) -> bool:
    return bool(status["card"]["state"] == "online")


@contextlib.asynccontextmanager
async def client_of(gateway: Gateway) -> AsyncIterator[AsyncClient]:
    client = gateway.client()
    try:
        yield client
    finally:
        await client.aclose()


async def test_a_second_gateway_is_refused_while_the_first_lives_and_hears_who_that_is(
    home: Path, card: str
) -> None:
    async with serving(home / "first", "--card", card, card=None, **SHORT) as first:
        second = await run(home, *serve_arguments(home / "second", None), "--card", card, **SHORT)
        assert second.code == ExitCode.CARD
        assert f"lives: {socket.gethostname()}, process {first.process.pid}" in second.err
        assert "--takeover" in second.err
        await first.until(online)


async def test_a_takeover_ends_the_first_before_it_acknowledges_anything_more_and_loses_nothing(
    home: Path, card: str
) -> None:
    acknowledged: dict[bytes, bytes] = {}

    async def keep_storing(client: AsyncClient) -> None:
        for number in range(1_000_000):
            key, payload = b"%032d" % number, b"%d" % number * 5000
            with contextlib.suppress(RpcError):
                if await client.store("", b"", [key], [payload]) == ["stored"]:
                    acknowledged[key] = payload
                # However long the other takes to start, the card is never full, so that nothing is evicted.
                if acknowledged.pop(old := b"%032d" % (number - KEPT), None):
                    await client.delete("", b"", [old])

    async with (
        serving(home / "first", "--card", card, card=None, **SHORT) as first,
        client_of(first) as client,
    ):
        storing = asyncio.create_task(keep_storing(client))
        await first.until(lambda status: status["requests"].get("store", 0) > 20)
        async with serving(home / "second", "--takeover", "--card", card, card=None, **SHORT) as second:
            async with asyncio.timeout(HANG_S):
                code = await first.end(signal.SIGCONT)  # it has ended by itself, or will
            storing.cancel()
            await asyncio.gather(storing, return_exceptions=True)
            assert code == ExitCode.CARD_LOST
            assert f"taken over by {socket.gethostname()} (process {second.process.pid})" in first.log_text
            assert "Traceback" not in first.log_text
            await second.logged(f"taking the card from {socket.gethostname()} (process {first.process.pid})")
            assert "the last run on the card was of" not in second.log_text, "that would be this run itself"
            status = await second.status()
            assert status["warm"]
            assert status["card"]["run"]["epoch"] == 3
            await second.until(online)
            async with client_of(second) as heir:
                for key, payload in acknowledged.items():
                    loaded = await heir.load("", b"", [key])
                    assert loaded.statuses == ["ok"], key
                    assert bytes(loaded.payloads[0] or b"") == payload
                assert await heir.store("", b"", [b"new"], [b"bytes"]) == ["stored"]
            assert await second.end() == ExitCode.OK


@pytest.mark.parametrize("reservations", [True], indirect=True)
async def test_after_a_kill_the_gateway_of_another_host_has_the_card_at_once_where_it_can_be_reserved(
    home: Path, card: str
) -> None:
    longer = {**SHORT, "XKV_NVME__KEEP_ALIVE_MS": "30000"}
    async with serving(home / "first", "--card", card, card=None, **longer) as first:
        async with client_of(first) as client:
            assert set(await client.store("", b"", KEYS, PAYLOADS)) == {"stored"}
        assert (await first.status())["card"]["run"]["reservation"] == "held"
        await first.end(signal.SIGKILL)
    async with serving(home / "second", "--card", card, card=None, **SHORT) as second:
        await second.until(online)
        assert (await second.status())["card"]["run"]["reservation"] == "held"
        async with client_of(second) as client:
            loaded = await client.load("", b"", KEYS)
            assert [bytes(payload or b"") for payload in loaded.payloads] == PAYLOADS
            assert await client.store("", b"", [b"new"], [b"bytes"]) == ["stored"]
        assert await second.end() == ExitCode.OK


@pytest.mark.parametrize("reservations", [False], indirect=True)
async def test_after_a_kill_the_next_gateway_serves_lookups_at_once_and_writes_when_it_is_safe(
    home: Path, card: str
) -> None:
    async with serving(home / "first", "--card", card, card=None, **SHORT) as first:
        async with client_of(first) as client:
            assert set(await client.store("", b"", KEYS, PAYLOADS)) == {"stored"}
        await first.end(signal.SIGKILL)
    longer = {**SHORT, "XKV_NVME__KEEP_ALIVE_MS": "8000"}
    async with serving(home / "second", "--card", card, card=None, **longer) as second:
        await second.until(online)
        await second.end(signal.SIGKILL)
    async with serving(home / "third", "--card", card, card=None, **SHORT) as third:
        assert "writes in" in third.said_at("card")
        async with client_of(third) as client:
            status = await third.status()
            assert status["card"]["state"] == "recovering"
            assert 0 < status["card"]["run"]["writes_in_s"] <= 10
            assert (await client.hello("test")).card.state == "recovering"
            assert (await third.get("/readyz")).status_code == 503
            loaded = await client.load("", b"", KEYS)
            assert [bytes(payload or b"") for payload in loaded.payloads] == PAYLOADS
            for write in (client.store("", b"", [b"new"], [b"bytes"]), client.delete("", b"", KEYS)):
                with pytest.raises(RpcError) as caught:
                    await write
                assert caught.value.code is ErrorCode.RECOVERING
            await third.until(online)
            assert await client.store("", b"", [b"new"], [b"bytes"]) == ["stored"]
            assert await client.delete("", b"", KEYS[:1]) == 1
        assert await third.end() == ExitCode.OK
    async with serving(home / "fourth", "--card", card, card=None, **SHORT) as fourth:
        # After an end in order nobody has to wait.
        assert (await fourth.status())["card"]["state"] == "online"
        assert (await fourth.status())["usage"]["objects"] == len(KEYS)


async def test_a_card_that_moves_to_another_host_comes_up_warm_and_the_log_says_whose_it_was(
    home: Path, card: str
) -> None:
    async with serving(home / "first", "--card", card, card=None, **SHORT) as first:
        async with client_of(first) as client:
            await client.store("", b"", KEYS, PAYLOADS)
        assert await first.end() == ExitCode.OK
    nqn = "nqn.2014-08.com.example:other-host"
    identity = {"XKV_NVME__HOST_NQN": nqn, "XKV_NVME__HOST_ID": "6f1a2f0e-6c53-4a0b-8d34-0d8f2a9c1b7e"}
    async with serving(home / "second", "--card", card, card=None, **SHORT, **identity) as second:
        assert "warm: 8 objects" in second.said_at("card")
        await second.logged(f"the last run on the card was of {socket.gethostname()} (nqn.2014-08.org")
        await second.logged("ended in order")
