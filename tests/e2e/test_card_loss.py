from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.gateway import alive, run, serving, take_away
from xkv_gateway.errors import ExitCode
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [bytes([number]) * 32 for number in range(8)]
PAYLOADS = [bytes([number]) * 70_000 for number in range(8)]


async def test_a_killed_soft_card_turns_the_card_offline_and_comes_back_with_its_bytes(home: Path) -> None:
    async with serving(home / "state") as gateway:
        client = gateway.client()
        assert set(await client.store("", b"", KEYS, PAYLOADS)) == {"stored"}
        soft_card = (await gateway.status())["card"]["soft_card"]["pid"]
        # Stopped first: the next start waits for the lock, so that the card is certainly seen offline.
        os.kill(soft_card, signal.SIGKILL)
        offline = await gateway.until(lambda status: status["card"]["soft_card"]["pid"] != soft_card)
        assert not alive(soft_card)
        assert offline["state"] == "serving"
        back = await gateway.until(
            lambda status: status["card"]["state"] == "online" and status["card"]["soft_card"]["pid"]
        )
        assert back["card"]["soft_card"]["restarts"] == 1
        loaded = await client.load("", b"", KEYS)
        assert [bytes(payload or b"") for payload in loaded.payloads] == PAYLOADS
        await client.aclose()
        assert await gateway.end() == ExitCode.OK


async def test_while_the_card_is_away_lookups_miss_and_writes_are_refused(home: Path) -> None:
    async with serving(home / "state") as gateway:
        client = gateway.client()
        await client.store("", b"", KEYS, PAYLOADS)
        card = home / "state.img"
        soft_card = (await gateway.status())["card"]["soft_card"]["pid"]
        away = take_away(card)
        os.kill(soft_card, signal.SIGKILL)
        await gateway.until(lambda status: status["card"]["state"] == "offline")
        assert (await gateway.get("/healthz")).status_code == 200
        assert (await gateway.get("/readyz")).status_code == 503
        assert (await run(home, "status", "--admin", gateway.admin)).code == ExitCode.DEGRADED
        assert (await client.lookup("", b"", KEYS)).hits == 0
        assert set((await client.load("", b"", KEYS)).statuses) == {"miss"}
        with pytest.raises(RpcError) as caught:
            await client.store("", b"", [b"new"], [b"bytes"])
        assert caught.value.code is ErrorCode.CARD_OFFLINE
        with pytest.raises(RpcError) as caught:
            await client.delete("", b"", KEYS)
        assert caught.value.code is ErrorCode.CARD_OFFLINE
        away.replace(card)
        await gateway.until(lambda status: status["card"]["state"] == "online")
        assert (await client.lookup("", b"", KEYS)).hits == len(KEYS)
        assert set((await client.load("", b"", KEYS)).statuses) == {"ok"}
        await client.aclose()


async def test_a_card_that_hangs_does_not_hold_up_the_end_and_every_store_is_answered(home: Path) -> None:
    async with (
        serving(home / "state") as gateway,
        gateway.client() as client,
    ):
        soft_card = (await gateway.status())["card"]["soft_card"]["pid"]
        os.kill(soft_card, signal.SIGSTOP)
        stores = [
            asyncio.create_task(client.store("", b"", [key], [PAYLOADS[0]], timeout_ms=30_000))
            for key in KEYS
        ]
        await gateway.until(lambda status: status["requests"].get("store", 0) == len(KEYS))
        assert await gateway.end() == ExitCode.OK
        assert not alive(soft_card)
        outcomes = await asyncio.gather(*stores, return_exceptions=True)
        assert all(
            outcome == ["io_error"] or (isinstance(outcome, RpcError) and outcome.code is ErrorCode.DRAINING)
            for outcome in outcomes
        ), outcomes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_what_was_stored_is_there_after_a_restart_whichever_way_it_ended(
    home: Path, number: signal.Signals
) -> None:
    async with serving(home / "state") as gateway:
        client = gateway.client()
        assert set(await client.store("", b"", KEYS, PAYLOADS)) == {"stored"}
        await client.delete("", b"", KEYS[:1])
        await client.aclose()
        await gateway.end(number)
    async with serving(home / "state") as gateway:
        assert "warm: 7 objects" in gateway.said_at("card")
        client = gateway.client()
        loaded = await client.load("", b"", KEYS)
        assert loaded.statuses == ["miss", *["ok"] * 7]
        assert [bytes(payload or b"") for payload in loaded.payloads[1:]] == PAYLOADS[1:]
        await client.aclose()
