from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx

from tests.e2e.gateway import run, serving
from xkv_gateway.errors import ExitCode
from xkv_rpc import messages as m
from xkv_rpc import scope_of

if TYPE_CHECKING:
    from pathlib import Path

MARKER = b"geheim-key-of-a-prompt"


async def test_status_metrics_and_the_command_tell_the_same_story_and_no_key(home: Path) -> None:
    async with serving(home / "state", XKV_LOG__LEVEL="debug") as gateway:
        client = gateway.client()
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


async def test_tokens_and_reuse_of_a_named_tenant_are_counted_and_a_salt_is_not_logged(home: Path) -> None:
    salt = "salt-of-somebody-Zq81"
    async with serving(home / "state", XKV_LOG__LEVEL="debug") as gateway:
        host, port = gateway.admin.split(":")
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", trust_env=False, timeout=30) as admin:
            body = {"scope": scope_of(salt).hex(), "limit_bytes": 1 << 30}
            assert (await admin.put("/v1/tenants/acme", json=body)).status_code == 200
            answers = [
                await admin.put(f"/quota/{salt}", json={"limit_gb": 0.5}),
                await admin.get(f"/quota/{salt}"),
                await admin.put(f"/quota/{salt}", json={"limit_gb": salt}),
                await admin.put(f"/quota/{salt}@", json={"limit_gb": 1}),
                await admin.get(f"/v1/{salt}"),
            ]
            assert [answer.status_code for answer in answers] == [200, 200, 422, 422, 404]
            async with gateway.client() as client:
                await client.call(m.Hello("connector", "llama", 16))
                await client.store("ns", scope_of(salt), [b"a", b"b"], [b"x", b"y"])
                await client.lookup("ns", scope_of(salt), [b"a", b"b", b"c"])
                await client.load("ns", scope_of(salt), [b"a"])
            metrics = (await admin.get("/metrics")).text
            listed = (await admin.get("/quota")).text
        await gateway.end()
    labels = 'namespace="ns",tenant="acme",model="llama"'
    for line in (
        f"xkv_lookup_requested_tokens_total{{{labels}}} 48.0",
        f"xkv_lookup_hit_tokens_total{{{labels}}} 32.0",
        f"xkv_lookup_requested_keys_total{{{labels}}} 3.0",
        'xkv_real_reuse_gap_seconds_count{tenant="acme"} 1.0',
        'xkv_tenant_objects{tenant="acme"} 2.0',
        'xkv_tenant_limit_bytes{tenant="acme"} 536870912.0',
        'xkv_request_duration_seconds_count{op="store"} 1.0',
    ):
        assert line in metrics
    assert '"acme":{"limit_gb":0.5' in listed
    for text in (metrics, listed, gateway.log_text, *(answer.text for answer in answers)):
        assert salt not in text
