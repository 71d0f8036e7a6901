"""Secrets are planted wherever one can be; everything runs at debug level, errors included; then they are looked for."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.gateway import HANG_S, PATIENT, run, serving
from xkv_gateway.keys.directory import KeyDirectory
from xkv_rpc import scope_of
from xkv_rpc.async_client import AsyncClient
from xkv_rpc.client import ClientOptions
from xkv_rpc.curve_files import read_certificate, read_client_keys
from xkv_rpc.errors import RpcError, XkvRpcError

if TYPE_CHECKING:
    from tests.e2e.gateway import Gateway

SALT = "geheim-salt-of-a-tenant"
PROMPT = b"geheim-key-of-a-prompt"
TOKEN = "geheim-token-" + "w" * 32
READ_TOKEN = "geheim-token-" + "r" * 32
WRONG_TOKEN = "geheim-token-" + "x" * 32


def patient(keys: Path) -> ClientOptions:
    return replace(PATIENT, keys=read_client_keys(keys))


async def use_everything(home: Path, gateway: Gateway, keys: KeyDirectory) -> list[str]:
    """Do right and wrong things; return all that was said."""
    said: list[str] = []
    scope, endpoint = scope_of(SALT), f"tcp://{gateway.said_at('with keys')}"
    async with AsyncClient(endpoint, patient(keys.path / "alice.key_secret")) as client:
        await client.store("a", scope, [PROMPT], [PROMPT * 10])
        lease = (await client.lookup("a", scope, [PROMPT], lease_ms=5000)).lease
        assert lease is not None
        await client.load("a", scope, [PROMPT])
        for wrong in (
            client.lookup("b", scope, [PROMPT]),
            client.renew(b"x" * 16, 1000),
            client.store("a", scope, [PROMPT, PROMPT], [b"1", b"2"]),
        ):
            with pytest.raises(RpcError) as caught:
                await wrong
            said.append(str(caught.value))
    keys.revoke("bob")
    options = ClientOptions(timeout_ms=500, connect_timeout_ms=500, keys=read_client_keys(home / "bob"))
    async with AsyncClient(endpoint, options) as client:
        await gateway.logged("key bob is out")
        with pytest.raises(XkvRpcError) as refused:
            await client.ping()
        said.append(str(refused.value))
    async with httpx.AsyncClient(
        trust_env=False, timeout=HANG_S, base_url=f"http://{gateway.admin}"
    ) as client_:
        for token in (TOKEN, READ_TOKEN, WRONG_TOKEN):
            headers = {"Authorization": f"Bearer {token}"}
            for method, path in (
                ("GET", "/v1/status"),
                ("GET", "/metrics"),
                ("PUT", f"/quota/{SALT}"),
                ("GET", f"/quota/{SALT}"),
                ("DELETE", f"/quota/{SALT}@"),
                ("GET", f"/nothing/{SALT}"),
            ):
                said.append((await client_.request(method, path, headers=headers)).text)
    gateway.process.send_signal(signal.SIGHUP)
    await gateway.logged("reloaded")
    said.append(Path(f"/proc/{gateway.process.pid}/cmdline").read_text())
    said.append(json.dumps(gateway.said))
    return said


async def test_no_secret_is_in_anything_that_is_said_or_kept(home: Path) -> None:
    keys = KeyDirectory(home / "state" / "keys")
    keys.path.parent.mkdir(mode=0o700)
    keys.init()
    keys.new("alice", frozenset({"a"}))
    (home / "bob").write_bytes(keys.new("bob", None).read_bytes())
    (home / "bob").chmod(0o600)
    secrets = [SALT, PROMPT.decode(), TOKEN, READ_TOKEN, WRONG_TOKEN]
    secrets += [str(read_certificate(path).secret) for path in keys.path.glob("*.key_secret")]
    for name, text in (("w", TOKEN), ("r", READ_TOKEN)):
        (home / name).write_text(text)
        (home / name).chmod(0o600)
    settings = {
        "XKV_LOG__LEVEL": "debug",
        "XKV_LOG__FORMAT": "json",
        "XKV_CONTROL__CURVE__BIND_ADDRESS": "127.0.0.1",
        "XKV_CONTROL__CURVE__PORT": "0",
        "XKV_ADMIN__TOKEN_FILE": str(home / "w"),
        "XKV_ADMIN__READ_TOKEN_FILE": str(home / "r"),
    }
    async with serving(home / "state", **settings) as gateway:
        said = await use_everything(home, gateway, keys)
        await gateway.end()
        said.append(gateway.log_text)
    shown = await run(home, "config", "show", "--state-dir", str(home / "state"), **settings)
    said += [shown.out, shown.err, (await run(home, "keys", "list", "--state-dir", str(home / "state"))).out]
    kept = [
        path.read_bytes()
        for path in (home / "state").rglob("*")
        if path.is_file() and path.suffix != ".key_secret"
    ]
    assert len(said) > 20
    for secret in secrets:
        assert not [text for text in said if secret in text]
        assert not [content for content in kept if secret.encode() in content]
