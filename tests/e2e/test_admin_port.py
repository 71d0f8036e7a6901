from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.e2e.gateway import run, serving
from xkv_gateway.errors import ExitCode
from xkv_rpc.async_client import AsyncClient

if TYPE_CHECKING:
    from pathlib import Path

MARKER = b"geheim-key-of-a-prompt"


async def test_status_metrics_and_the_command_tell_the_same_story_and_no_key(home: Path) -> None:
    async with serving(home / "state", XKV_LOG__LEVEL="debug") as gateway:
        client = AsyncClient(f"tcp://127.0.0.1:{gateway.control_port}")
        await client.store("ns", MARKER, [MARKER], [MARKER * 10])
        assert (await client.lookup("ns", MARKER, [MARKER, b"other"])).hits == 1
        await client.load("ns", MARKER, [MARKER])
        await client.aclose()
        status = await gateway.status()
        assert status["usage"]["objects"] == 1
        assert status["cache"]["stored"] == 1
        assert status["requests"]["store"] == 1
        assert status["device"]["write_bytes"] > 0
        usage = status["usage"]
        kinds = ("free", "reserved", "live", "doomed", "quarantined")
        assert sum(usage[f"{kind}_bytes"] for kind in kinds) == usage["capacity_bytes"]
        command = await run(home, "status", "--json", "--admin", gateway.admin)
        assert command.code == ExitCode.OK
        assert json.loads(command.out)["usage"] == usage
        people = await run(home, "status", "--admin", gateway.admin)
        metrics = (await gateway.get("/metrics")).text
        assert 'xkv_requests_total{op="store"} 1.0' in metrics
        card = await gateway.get("/v1/card")
        assert card.json()["state"] == "online"
        assert (await gateway.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        await gateway.end()
        for text in (json.dumps(status), metrics, people.out, gateway.log_text, "\n".join(gateway.said)):
            assert MARKER.decode() not in text
            assert MARKER.hex() not in text


async def test_a_running_gateway_tells_its_actual_ports(home: Path) -> None:
    async with serving(home / "state") as gateway:
        addresses = (await gateway.status())["addresses"]
        assert addresses["control"] == f"127.0.0.1:{gateway.control_port}"
        assert addresses["admin"] == gateway.admin
