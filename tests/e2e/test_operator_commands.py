from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.commands import Commands
from tests.e2e.gateway import HANG_S, run, serving
from xkv_gateway.errors import ExitCode
from xkv_rpc import scope_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from xkv_rpc.async_client import AsyncClient

SALT = "salt-that-nobody-may-see-7Qx"
UNIT = 64 << 10


@pytest.fixture
async def gateway(home: Path) -> AsyncIterator[Gateway]:
    async with serving(home / "state", XKV_LOG__LEVEL="debug") as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncClient]:
    async with gateway.client() as client:
        yield client


async def test_tenants_and_quotas_from_the_command_line(
    home: Path, gateway: Gateway, client: AsyncClient
) -> None:
    do = Commands(home, gateway)
    scope = do("salt", "tag", stdin=SALT.encode() + b"\n").out.strip()
    assert scope == scope_of(SALT).hex()
    assert do("salt", "tag", stdin=b"").out == "_default\n"
    done = do("tenant", "set", "acme", "--scope", scope, "--limit", "5GB")
    assert (done.code, done.err) == (ExitCode.OK, "")
    assert do.json("tenant", "show", "acme")["limit_bytes"] == 5_000_000_000
    # Exactly the bytes that were typed, through a route whose unit is 2^30.
    assert do.json("quota", "set", "-", "1234567891", stdin=SALT.encode())["limit_bytes"] == 1_234_567_891
    assert do.json("quota", "set", "acme", "5GiB")["limit_bytes"] == 5 << 30
    assert do.json("quota", "set", f"scope:{'ab' * 16}", "0")["limit_bytes"] == 0
    assert do.json("quota", "set", "_default", "1MiB")["scope"] == ""
    await client.store("ns", bytes.fromhex(scope), [b"k"], [b"x" * 100])
    listed = {entry["name"] or entry["scope"]: entry for entry in do.json("quota", "list")}
    assert listed["acme"]["charged_bytes"] == UNIT
    assert listed["acme"]["limit_bytes"] == 5 << 30
    assert set(listed) == {"acme", "ab" * 16, ""}
    assert do.json("quota", "rm", "_default")["limit_bytes"] is None
    assert do.json("tenant", "show", f"scope:{scope}")["name"] == "acme"
    tables = do("tenant", "list").out + do("quota", "list").out + do("tenant", "show", "acme").out
    assert "acme" in tables
    assert "5 GiB" in tables
    assert do("tenant", "rm", "acme").code == ExitCode.OK
    assert do.json("tenant", "list")["total"] == 1
    await gateway.end()
    assert SALT not in gateway.log_text


async def test_lifetimes_from_the_command_line(home: Path, gateway: Gateway, client: AsyncClient) -> None:
    do = Commands(home, gateway)
    await client.store("m/1", b"", [b"k"], [b"x"])
    await client.store("n", b"", [b"k"], [b"x"])
    assert do.json("ns", "set", "m/1", "--ttl-idle", "1h", "--ttl-total", "7d")["ttl_total_s"] == 7 * 86_400
    assert do.json("ns", "set", "m/1", "--ttl-idle", "none")["ttl_idle_s"] == 0
    assert "7d" in do("ns", "list").out
    assert "7d" in do("ns", "show", "m/1").out
    for arguments in (("--ttl-idle", "soon"), ("--ttl-idle", "0s"), (), ("--ttl-total", "1000w1")):
        assert do("ns", "set", "m/1", *arguments).code == ExitCode.CONFIG
    assert do("ns", "set", "m/1", "--ttl-total", "9999w").code == ExitCode.REFUSED
    do.json("ns", "set", "n", "--ttl-total", "1s")
    gone = await gateway.until(lambda status: status["cache"]["evicted_ttl"] == 1)
    assert gone["usage"]["objects"] == 1
    assert (await client.lookup("n", b"", [b"k"])).hits == 0
    assert (await client.lookup("m/1", b"", [b"k"])).hits == 1
    metrics = (await gateway.get("/metrics")).text
    assert 'xkv_evicted_objects_total{cause="ttl"} 1.0' in metrics


async def test_what_is_beyond_the_budget_of_the_day_is_refused_and_told_also_after_a_kill(home: Path) -> None:
    arguments = ("--admission-bytes-per-day", "100KiB")
    for end, stored in ((signal.SIGKILL, ["stored", "no_space"]), (signal.SIGTERM, ["no_space", "no_space"])):
        async with (
            serving(home / "state", *arguments) as gateway,
            gateway.client() as client,
        ):
            keys = [b"%d%d" % (end, i) for i in range(2)]
            assert await client.store("n", b"", keys, [bytes(60 << 10)] * 2) == stored
            admission = (await gateway.status())["admission"]
            assert admission == {"bytes_per_day": 100 << 10, "written_bytes": 60 << 10}
            metrics = (await gateway.get("/metrics")).text
            assert f'cause="budget"}} {stored.count("no_space")}.0' in metrics
            assert "xkv_admission_written_bytes 61440.0" in metrics
            done = Commands(home, gateway)("status")
            assert "60 KiB of 100 KiB in 24 hours" in done.out
            await gateway.end(end)


async def test_what_the_gateway_refuses_has_an_exit_code_and_no_salt(home: Path, gateway: Gateway) -> None:
    do = Commands(home, gateway)
    for arguments, code in (
        (("tenant", "show", "nobody"), ExitCode.REFUSED),
        (("tenant", "rm", "nobody"), ExitCode.REFUSED),
        (("quota", "rm", "_default"), ExitCode.REFUSED),
        (("quota", "set", SALT, "1GB"), ExitCode.REFUSED),
        (("quota", "set", "_default", "lots"), ExitCode.CONFIG),
        (("quota", "set", "_default", "99999999999GB"), ExitCode.CONFIG),
        (("tenant", "set", "_default", "--scope", "00", "--no-limit"), ExitCode.REFUSED),
        (("tenant", "set", "x", "--scope", SALT, "--no-limit"), ExitCode.CONFIG),
        (("tenant", "set", "x", "--scope", "00"), ExitCode.CONFIG),
        (("ns", "show", "nothing"), ExitCode.REFUSED),
        (("ns", "wipe", "nothing", "--scope", "00", "--tenant", "x", "--yes"), ExitCode.CONFIG),
        (("ns", "wipe", "nothing"), ExitCode.REFUSED),
        (("ns", "wipe", "nothing", "--tenant", "nobody", "--yes"), ExitCode.REFUSED),
    ):
        done = do(*arguments)
        assert done.code == code, (arguments, done)
        assert done.err.startswith("xkv-gateway: ")
        assert SALT not in done.err + done.out
    for salt in (b"a@b", b"\xff", b"x" * 129, b"_default"):
        assert do("salt", "tag", stdin=salt).code == ExitCode.CONFIG
    await gateway.end()
    for arguments in (("tenant", "list"), ("ns", "list"), ("quota", "list"), ("top", "--once")):
        assert do(*arguments).code == ExitCode.UNREACHABLE


async def test_namespaces_are_listed_and_wiped_with_a_report(
    home: Path, gateway: Gateway, client: AsyncClient
) -> None:
    do = Commands(home, gateway)
    for namespace, scope in (("m/1", b"\x01"), ("m/1", b"\x02"), ("m/10", b"\x01"), ("", b"")):
        await client.store(namespace, scope, [b"a", b"b"], [b"1" * 100, b"2" * UNIT])
    assert {entry["name"]: entry["objects"] for entry in do.json("ns", "list")} == {
        "m/1": 4,
        "m/10": 2,
        "_default": 2,
    }
    shown = do.json("ns", "show", "m/1")
    assert sorted(scope["scope"] for scope in shown["scopes"]) == ["01", "02"]
    assert "scope:01" in do("ns", "show", "m/1").out
    do.json("tenant", "set", "acme", "--scope", "01", "--no-limit")
    report = do.json("ns", "wipe", "m/1", "--tenant", "acme", "--yes")
    assert (report["objects"], report["stage"], report["left_bytes"]) == (2, "done", 0)
    assert report["erased_bytes"] == 2 * UNIT
    assert "read back" in report["verification"]
    assert (await client.lookup("m/1", b"\x01", [b"a"])).hits == 0
    assert (await client.lookup("m/1", b"\x02", [b"a", b"b"])).hits == 2
    assert (await client.lookup("m/10", b"\x01", [b"a", b"b"])).hits == 2
    done = do("ns", "wipe", "m/1", "--yes")
    assert (done.code, "verified" in done.out) == (ExitCode.OK, True)
    assert do.json("ns", "wipe", "_default", "--scope", "_default", "--yes")["objects"] == 2
    assert [entry["name"] for entry in do.json("ns", "list")] == ["m/10"]
    assert len(do.json("ns", "wipes")) == 3
    assert "done" in do("ns", "wipes").out


async def test_the_report_of_a_wipe_waits_for_the_end_of_leases(
    home: Path, gateway: Gateway, client: AsyncClient
) -> None:
    await client.store("ns", b"", [b"k"], [b"x" * 100])
    lease = (await client.lookup("ns", b"", [b"k"], lease_ms=60_000)).lease
    assert lease is not None
    wiping = asyncio.create_task(run(home, "ns", "wipe", "ns", "--yes", "--json", "--admin", gateway.admin))
    async with asyncio.timeout(HANG_S):
        while not (await gateway.get("/v1/wipes")).json()["wipes"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    wipe = (await gateway.get("/v1/wipes")).json()["wipes"][0]
    assert (wipe["waiting_bytes"], wipe["left_bytes"]) == (UNIT, UNIT)
    assert (await client.lookup("ns", b"", [b"k"])).hits == 0
    assert not wiping.done()
    await client.release(lease)
    done = await wiping
    assert done.code == ExitCode.OK, done.err


async def test_top_shows_rates_of_tenants_and_the_card(
    home: Path, gateway: Gateway, client: AsyncClient
) -> None:
    do = Commands(home, gateway)
    do.json("tenant", "set", "acme", "--scope", "01", "--limit", "1GiB")
    stop = asyncio.Event()

    async def traffic() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            key = number.to_bytes(8, "big")
            await client.store("ns", b"\x01", [key], [b"x" * 1000])
            await client.lookup("ns", b"\x01", [key, b"missing"])

    busy = asyncio.create_task(traffic())
    arguments = ("top", "--interval", "1", "--admin", gateway.admin)
    both = await asyncio.gather(run(home, *arguments, "--json"), run(home, *arguments))
    stop.set()
    await busy
    seen = json.loads(both[0].out)
    line = next(line for line in seen["tenants"] if line["name"] == "acme")
    assert line["hit_rate"] == pytest.approx(0.5, abs=0.2)
    assert line["stored_bytes"] > 0
    assert line["limit_bytes"] == 1 << 30
    assert seen["requests"]["store"] > 0
    assert seen["card"] == "online"
    assert "acme" in both[1].out
    assert "hit rate" in both[1].out


async def test_everything_that_an_operator_set_survives_a_kill(home: Path) -> None:
    async with serving(home / "state") as gateway:
        do = Commands(home, gateway)
        do.json("tenant", "set", "acme", "--scope", "01", "--limit", "5GB")
        do.json("quota", "set", "scope:02", "0")
        before = do.json("tenant", "list")
        gateway.process.kill()
        await gateway.process.wait()
    async with serving(home / "state") as gateway:
        after = Commands(home, gateway).json("tenant", "list")
    names = ("name", "scope", "limit_bytes", "effective_limit_bytes")
    assert [[tenant[name] for name in names] for tenant in after["tenants"]] == [
        [tenant[name] for name in names] for tenant in before["tenants"]
    ]
    assert after["complete"]
