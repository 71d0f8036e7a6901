"""A target that falls silent without ending its connections: deadlines end the wait, and lookups never wait at all."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

from tests.e2e.gateway import HANG_S, run, serving
from tests.e2e.target import target
from tests.nvmeof.relay import Relay
from xkv_gateway.errors import ExitCode
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from xkv_rpc.async_client import AsyncClient

SHORT = {"XKV_NVME__KEEP_ALIVE_MS": "4000", "XKV_NVME__COMMAND_TIMEOUT_MS": "3000"}
KEYS = [bytes([number]) * 16 for number in range(8)]
PAYLOADS = [bytes([number]) * 100_000 for number in range(8)]


async def outcome(client: AsyncClient) -> str:
    """Return what becomes of a store whose card says nothing."""
    try:
        (status,) = await client.store("", b"", [b"late"], [bytes(100_000)])
    except RpcError as error:
        return error.code
    return status


@contextlib.asynccontextmanager
async def served_through_a_relay(home: Path) -> AsyncIterator[tuple[Relay, Gateway, AsyncClient]]:
    """A gateway that reaches its card through a relay, and holds KEYS."""
    async with target(home / "card.img") as url:
        port = int(url.split(":")[2].split("/")[0])
        async with Relay(port) as relay:
            card = url.replace(f":{port}/", f":{relay.port}/")
            assert (await run(home, "card", "format", card, **SHORT)).code == ExitCode.OK
            async with serving(home / "state", "--card", card, card=None, **SHORT) as gateway:
                client = gateway.client()
                assert set(await client.store("", b"", KEYS, PAYLOADS)) == {"stored"}
                yield relay, gateway, client


async def test_stores_end_and_lookups_go_on_while_the_target_says_nothing(home: Path) -> None:
    async with served_through_a_relay(home) as (relay, gateway, client):
        relay.silence()
        store = asyncio.create_task(outcome(client))
        lookups = 0
        async with asyncio.timeout(HANG_S):
            while not store.done():
                await client.lookup("", b"", KEYS)
                lookups += 1
        assert store.result() in {"io_error", ErrorCode.CARD_OFFLINE}
        assert lookups > 20, "none of them waited for the card"
        await gateway.until(lambda status: status["card"]["state"] == "offline")
        assert (await client.lookup("", b"", KEYS)).hits == 0
        assert await outcome(client) == ErrorCode.CARD_OFFLINE
        assert (await gateway.get("/readyz")).status_code == 503
        relay.speak()
        await gateway.until(lambda status: status["card"]["state"] == "online")
        loaded = await client.load("", b"", KEYS)
        assert [bytes(payload or b"") for payload in loaded.payloads] == PAYLOADS
        await client.aclose()
        assert await gateway.end() == ExitCode.OK


async def test_a_gateway_that_was_stopped_for_longer_than_its_keep_alive_time_connects_anew(
    home: Path,
) -> None:
    async with served_through_a_relay(home) as (relay, gateway, client):
        before = (await gateway.status())["device"]["reconnects"]
        gateway.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(HANG_S):
            while relay.connections:  # noqa: ASYNC110 - the target ends them, another process
                await asyncio.sleep(0.05)
        gateway.process.send_signal(signal.SIGCONT)
        await gateway.until(
            lambda now: now["device"]["reconnects"] > before and now["card"]["state"] == "online"
        )
        loaded = await client.load("", b"", KEYS)
        assert [bytes(payload or b"") for payload in loaded.payloads] == PAYLOADS
        await client.aclose()
        assert await gateway.end() == ExitCode.OK
