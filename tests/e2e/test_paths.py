"""A gateway whose card has two addresses, and keys: one address is lost in mid-load."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.e2e.gateway import PATIENT, run, serving
from tests.e2e.target import target
from tests.nvmeof.relay import Relay
from xkv_gateway.errors import ExitCode
from xkv_rpc.async_client import AsyncClient

if TYPE_CHECKING:
    from pathlib import Path

SHORT = {"XKV_NVME__KEEP_ALIVE_MS": "4000", "XKV_NVME__COMMAND_TIMEOUT_MS": "30000"}
"""So long what was lost may still arrive, and so long what has to wait for that may wait, on a machine that is busy."""
CLIENTS = 4
ROUNDS = 12
PAYLOAD_BYTES = 300_000


def key_of(client: int, round_: int) -> bytes:
    return bytes([client, round_]) * 16


def payload_of(client: int, round_: int) -> bytes:
    return bytes([1 + client, 1 + round_]) * (PAYLOAD_BYTES // 2)


async def test_an_address_that_is_lost_in_mid_load_is_no_clients_error(home: Path) -> None:
    async with target(home / "card.img") as url:
        port = int(url.split(":")[2].split("/")[0])
        async with Relay(port) as one, Relay(port) as two:
            path = url.partition("/nqn")[2]
            card = f"nvme+tcp://127.0.0.1:{one.port},127.0.0.1:{two.port}/nqn{path}"
            formatted = await run(home, "card", "format", card, "--state-dir", str(home / "op"), **SHORT)
            assert formatted.code == ExitCode.OK, formatted.err
            async with serving(home / "state", "--card", card, card=None, **SHORT) as gateway:
                await _load(gateway.control_port, one)
                status = await gateway.status()
                assert status["card"]["state"] == "online"
                assert [each["connected"] for each in status["card"]["connection"]["paths"]] == [False, True]
                assert status["device"]["errors"] == 0
                await one.mend()
                await gateway.until(
                    lambda now: all(each["connected"] for each in now["card"]["connection"]["paths"])
                )
                assert "the card is offline" not in gateway.log_text


async def _load(control_port: int, one: Relay) -> None:
    """Store and load from several clients; break the first way in the middle of it."""

    async def work(client: AsyncClient, number: int) -> None:
        for round_ in range(ROUNDS):
            key, payload = key_of(number, round_), payload_of(number, round_)
            assert await client.store("", b"", [key], [payload]) == ["stored"]
            loaded = await client.load("", b"", [key])
            assert bytes(loaded.payloads[0] or b"") == payload
            if (number, round_) == (0, 3):
                one.cut()

    clients = [AsyncClient(f"tcp://127.0.0.1:{control_port}", PATIENT) for _ in range(CLIENTS)]
    await asyncio.gather(*(work(client, number) for number, client in enumerate(clients)))
    for number, client in enumerate(clients):
        keys = [key_of(number, round_) for round_ in range(ROUNDS)]
        loaded = await client.load("", b"", keys)
        expected = [payload_of(number, round_) for round_ in range(ROUNDS)]
        assert [bytes(payload or b"") for payload in loaded.payloads] == expected
        await client.aclose()
