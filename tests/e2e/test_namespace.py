"""The namespace changes under a gateway that serves: it grows twice, goes, and comes back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.e2e.gateway import run, serving
from tests.e2e.target import obedient_target
from xkv_gateway.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.gateway import Gateway

MIB = 1 << 20
KEYS = [bytes([number]) * 16 for number in range(4)]
PAYLOADS = [bytes([number]) * 50_000 for number in range(4)]


async def gauge(gateway: Gateway, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", (await gateway.get("/metrics")).text, re.MULTILINE)
    assert found
    return float(found[1])


async def test_each_growth_is_told_and_a_namespace_that_goes_and_returns_is_used_again(home: Path) -> None:
    async with obedient_target(home / "card.img", "128MiB") as (url, tell):
        assert (
            await run(home, "card", "format", url, "--state-dir", str(home / "state"))
        ).code == ExitCode.OK
        async with serving(home / "state", "--card", url, card=None) as gateway:
            client = gateway.client()
            assert set(await client.store("", b"", KEYS, PAYLOADS)) == {"stored"}
            capacity_bytes = (await gateway.status())["usage"]["capacity_bytes"]
            for size in (256, 384):
                tell(f"resize {size}MiB")
                await gateway.until(lambda status, size=size: status["card"]["size_bytes"] == size * MIB)  # type: ignore[misc]
                assert await gauge(gateway, "xkv_card_size_bytes") == size * MIB
            assert (await gateway.status())["usage"]["capacity_bytes"] == capacity_bytes
            tell("detach")
            await gateway.until(lambda status: status["card"]["state"] == "offline")
            commands = (await gateway.status())["device"]["read_commands"]
            assert (await client.lookup("", b"", KEYS)).hits == 0
            assert set((await client.load("", b"", KEYS)).statuses) == {"miss"}
            assert (await gateway.status())["device"]["read_commands"] == commands
            tell("attach")
            await gateway.until(lambda status: status["card"]["state"] == "online")
            loaded = await client.load("", b"", KEYS)
            assert [bytes(payload or b"") for payload in loaded.payloads] == PAYLOADS
            await client.aclose()
            assert await gateway.end() == ExitCode.OK
