"""The doors of a whole gateway: keys, sockets, tokens, the metrics address, systemd, reloads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.gateway import HANG_S, PATIENT, run, serve_arguments, serving
from tests.e2e.notify import Manager
from tests.ports import held_port
from xkv_gateway.errors import ExitCode
from xkv_gateway.keys.directory import KeyDirectory
from xkv_rpc.async_client import AsyncClient
from xkv_rpc.client import Client, ClientOptions
from xkv_rpc.curve_files import read_client_keys
from xkv_rpc.doors import ClientKeys
from xkv_rpc.errors import ErrorCode, KeyRefusedError, RpcError
from xkv_rpc.porter import new_key_pair

if TYPE_CHECKING:
    from pathlib import Path

TOKEN, READ_TOKEN = "w" * 40, "r" * 40


def with_keys(keys: ClientKeys | None) -> ClientOptions:
    return replace(PATIENT, keys=keys)


async def ping_for_ever(client: AsyncClient) -> None:
    while True:
        await client.ping()


def key_directory(home: Path) -> KeyDirectory:
    directory = KeyDirectory(home / "state" / "keys")
    (home / "state").mkdir(mode=0o700, exist_ok=True)
    directory.init()
    return directory


async def test_clients_with_keys_are_served_within_their_namespaces_until_their_key_is_revoked(
    home: Path,
) -> None:
    keys = key_directory(home)
    alice = read_client_keys(keys.new("alice", frozenset({"a"})))
    bob = read_client_keys(keys.new("bob", None))
    async with serving(
        home / "state", XKV_CONTROL__CURVE__BIND_ADDRESS="127.0.0.1", XKV_CONTROL__CURVE__PORT="0"
    ) as gateway:
        endpoint = f"tcp://{gateway.said_at('with keys')}"
        async with (
            AsyncClient(f"tcp://127.0.0.1:{gateway.control_port}", with_keys(None)) as local,
            AsyncClient(endpoint, with_keys(alice)) as client,
            AsyncClient(endpoint, with_keys(bob)) as other,
        ):
            await local.store("b", b"", [b"k"], [b"of b"])
            await client.store("a", b"", [b"k"], [b"of a"])
            assert (await other.load("b", b"", [b"k"])).payloads[0] == b"of b"
            for namespace in ("b", "nothing", ""):
                with pytest.raises(RpcError) as caught:
                    await client.lookup(namespace, b"", [b"k"])
                assert caught.value.code is ErrorCode.FORBIDDEN
            key = ("--key", str(keys.path / "alice.key_secret"), "--port", endpoint.rpartition(":")[2])
            played = await run(home, "replay", "--limit", "3", "--namespace", "a", *key)
            assert (played.code, played.err) == (ExitCode.OK, "")
            forbidden = await run(home, "replay", "--limit", "3", "--namespace", "b", *key)
            assert forbidden.code == ExitCode.REFUSED
            assert "may not touch" in forbidden.err
            revoked = await run(home, "keys", "revoke", "alice", "--state-dir", str(home / "state"))
            assert revoked.code == ExitCode.OK
            with pytest.raises(RpcError) as caught:
                await asyncio.wait_for(ping_for_ever(client), HANG_S)
            assert caught.value.code is ErrorCode.UNAUTHORIZED
            assert (await other.lookup("a", b"", [b"k"])).hits == 1
            with pytest.raises(KeyRefusedError):
                await asyncio.to_thread(Client(endpoint, with_keys(alice)).ping)
        await gateway.logged("key alice is out")
        await gateway.logged("its key is not known")
        assert await gateway.end() == ExitCode.OK


async def test_without_the_open_port_loopback_needs_a_key_too(home: Path) -> None:
    keys = key_directory(home)
    alice = read_client_keys(keys.new("alice", None))
    extra = {"XKV_CONTROL__CURVE__BIND_ADDRESS": "0.0.0.0", "XKV_CONTROL__CURVE__PORT": "0"}
    async with serving(home / "state", XKV_CONTROL__OPEN="false", **extra) as gateway:
        assert not any(line.startswith("  control ") for line in gateway.said)
        port = gateway.said_at("with keys").rpartition(":")[2]
        async with AsyncClient(f"tcp://127.0.0.1:{port}", with_keys(alice)) as client:
            await client.ping()
        with (
            Client(f"tcp://127.0.0.1:{port}", with_keys(None)) as plain,
            pytest.raises(Exception, match="127"),
        ):
            await asyncio.to_thread(plain.ping)
        assert (await gateway.status())["addresses"]["control"] is None


async def test_where_the_keys_cannot_be_checked_nothing_starts(home: Path) -> None:
    key_directory(home)
    (home / "state" / "keys" / "server.key_secret").chmod(0o644)
    finished = await run(
        home, *serve_arguments(home / "state", "256MiB"), XKV_CONTROL__CURVE__BIND_ADDRESS="127.0.0.1"
    )
    assert finished.code == ExitCode.CONFIG
    assert str(home / "state" / "keys") in finished.err
    assert not (home / "state.img").exists()


async def test_unix_sockets_have_the_mode_and_the_group_and_their_peers_are_logged(home: Path) -> None:
    path = home / "control.sock"
    async with serving(
        home / "state",
        XKV_CONTROL__SOCKET=str(path),
        XKV_CONTROL__SOCKET_MODE="0660",
        XKV_CONTROL__SOCKET_GROUP=str(os.getgid()),
    ) as gateway:
        for found in (path.stat(), (home / "state" / "regions.sock").stat()):
            assert stat.S_IMODE(found.st_mode) == 0o660
            assert found.st_gid == os.getgid()
        async with AsyncClient(f"ipc://{path}", with_keys(None)) as client:
            await client.ping()
        await gateway.logged(f"uid, gid, pid {os.getuid()}:{os.getgid()}:{os.getpid()}")
        gateway.process.kill()
        await gateway.process.wait()
        assert path.exists()
    async with serving(home / "state", XKV_CONTROL__SOCKET=str(path)) as gateway:
        second = await run(home, *serve_arguments(home / "other", "256MiB"), XKV_CONTROL__SOCKET=str(path))
        assert second.code == ExitCode.ADDRESS_IN_USE
        async with AsyncClient(f"ipc://{path}", with_keys(None)) as client:
            await client.ping()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_the_admin_port_asks_for_tokens_and_listens_elsewhere_with_them(home: Path) -> None:
    for name, text in (("w", TOKEN), ("r", READ_TOKEN)):
        (home / name).write_text(text)
        (home / name).chmod(0o600)
    async with serving(
        home / "state",
        "--admin-bind-address",
        "0.0.0.0",
        XKV_ADMIN__TOKEN_FILE=str(home / "w"),
        XKV_ADMIN__READ_TOKEN_FILE=str(home / "r"),
        XKV_ADMIN__SOCKET=f"{home}/admin.sock",
        XKV_ADMIN__METRICS__BIND_ADDRESS="0.0.0.0",
        XKV_ADMIN__METRICS__PORT="0",
    ) as gateway:
        base = "http://127.0.0.1:" + gateway.admin.rpartition(":")[2]
        # What it says to type next is let in.
        assert any(line.rstrip("'").endswith(f"{home}/r") for line in gateway.said if "--token-file" in line)
        metrics = (
            gateway.said_at("metrics").removeprefix("http://").removesuffix("/metrics").rpartition(":")[2]
        )
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
            bearer = {"Authorization": f"Bearer {READ_TOKEN}"}
            assert (await client.get(f"{base}/v1/status")).status_code == 401
            assert (await client.get(f"{base}/healthz")).status_code == 200
            assert (await client.get(f"{base}/v1/status", headers=bearer)).status_code == 200
            assert (await client.delete(f"{base}/v1/namespaces/x", headers=bearer)).status_code == 403
            assert (await client.get(f"http://127.0.0.1:{metrics}/metrics")).status_code == 200
            assert (await client.get(f"http://127.0.0.1:{metrics}/v1/status")).status_code == 404
            where = ("status", "--json", "--admin", base.removeprefix("http://"))
            assert (await run(home, *where)).code == ExitCode.CONFIG
            assert (await run(home, *where, "--token-file", str(home / "r"))).code == ExitCode.OK
            # A token that was exchanged counts after a reload.
            (home / "r").write_text("n" * 40)
            gateway.process.send_signal(signal.SIGHUP)
            await gateway.logged("reloaded")
            assert (await client.get(f"{base}/v1/status", headers=bearer)).status_code == 401
        transport = httpx.AsyncHTTPTransport(uds=f"{home}/admin.sock")
        async with httpx.AsyncClient(transport=transport, timeout=HANG_S) as client:
            assert (await client.get("http://gateway/v1/status")).status_code == 200
        assert await gateway.end() == ExitCode.OK
        assert TOKEN not in gateway.log_text
    assert not (home / "admin.sock").exists()


async def test_systemd_hears_of_the_start_the_state_a_reload_and_the_end(home: Path) -> None:
    manager = Manager(home / "notify")
    extra = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "300000"}
    (home / "gateway.toml").write_text('[log]\nformat = "json"\n')
    starting = serving(home / "state", "--config", str(home / "gateway.toml"), **extra)
    async with starting as gateway:
        await manager.until("READY=1")
        assert "WATCHDOG=1" in manager.said
        async with AsyncClient(f"tcp://127.0.0.1:{gateway.control_port}", with_keys(None)) as client:
            await client.ping()
        assert (await gateway.get("/readyz")).status_code == 200
        await manager.until("STATUS=serving, card online, 0 objects")
        (home / "gateway.toml").write_text('[log]\nformat = "json"\nlevel = "debug"\n')
        gateway.process.send_signal(signal.SIGHUP)
        await manager.until("RELOADING=1")
        await manager.until("READY=1", 2)
        (home / "gateway.toml").write_text("[log]\nlevel = 5\n")
        gateway.process.send_signal(signal.SIGHUP)
        await manager.until("READY=1", 3)
        await gateway.logged("not reloaded")
        await manager.until("WATCHDOG=1", manager.said.count("WATCHDOG=1") + 3)
        assert await gateway.end() == ExitCode.OK
        await manager.until("STOPPING=1")
        lines = [json.loads(line) for line in gateway.log if line.startswith("{")]
        assert any(line.get("event") == "reload" for line in lines)
        assert len(lines) == len([line for line in gateway.log if line.strip()])
    manager.close()


async def test_a_start_that_fails_never_says_that_it_is_ready(home: Path) -> None:
    manager = Manager(home / "notify")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        finished = await run(
            home,
            *serve_arguments(home / "state", "256MiB"),
            "--port",
            port,
            NOTIFY_SOCKET=str(manager.path),
        )
    assert finished.code == ExitCode.ADDRESS_IN_USE
    manager._socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager._socket.recv(100)
    manager.close()


STARTS = 2


async def test_clients_that_are_there_first_are_judged_like_all_others(home: Path) -> None:
    """The same as with the bare server, two hundred times, with whole gateways."""
    keys = key_directory(home)
    alice = read_client_keys(keys.new("alice", None))
    stranger = ClientKeys(alice.server_public, new_key_pair())
    with held_port() as port:
        for start in range(STARTS):
            endpoint = f"tcp://127.0.0.1:{port}"
            clients = [AsyncClient(endpoint, with_keys(one)) for one in (None, stranger, alice)]
            stores = [
                asyncio.create_task(client.store("", b"", [name], [b"bytes"], timeout_ms=60_000))
                for client, name in zip(clients, (b"plain", b"stranger", b"alice%d" % start), strict=True)
            ]
            curve = {"XKV_CONTROL__CURVE__BIND_ADDRESS": "127.0.0.1", "XKV_CONTROL__CURVE__PORT": str(port)}
            async with serving(home / "state", **curve) as gateway:
                await asyncio.wait_for(stores[2], HANG_S)
                status = await gateway.status()
                assert status["requests"] == {"store": 1}
                assert status["usage"]["objects"] == start + 1
                assert await gateway.end() == ExitCode.OK
            for client in clients:
                await client.aclose()
            await asyncio.gather(*stores, return_exceptions=True)
