"""The doors open as configured, or nothing is open and the message says why."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from xkv_gateway.binds import judge_bound
from xkv_gateway.config import Config
from xkv_gateway.daemon.ports import PortOpener, Ports
from xkv_gateway.errors import BindRefusedError, ConfigError, GatewayError
from xkv_gateway.keys.directory import KeyDirectory
from xkv_rpc.messages import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@contextlib.asynccontextmanager
async def opened(state_dir: Path, settings: dict[str, Any]) -> AsyncIterator[Ports]:
    control = {"port": 0, **settings.get("control", {})}
    admin = {"port": 0, **settings.get("admin", {})}
    given = {**settings, "control": control, "admin": admin, "state_dir": str(state_dir)}
    config = Config.model_validate(given)
    opener = PortOpener(
        config, state_dir, Limits(), clock=time.monotonic_ns, entropy=os.urandom, credentials=None
    )
    async with contextlib.AsyncExitStack() as undo:
        yield await opener.open(undo)


async def refused(state_dir: Path, settings: dict[str, Any]) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        async with opened(state_dir, settings):
            pass
    return caught.value


def keys_of(state_dir: Path) -> KeyDirectory:
    keys = KeyDirectory(state_dir / "keys")
    keys.init()
    return keys


CURVE = {"control": {"curve": {"bind_address": "127.0.0.1", "port": 0}}}


@pytest.mark.parametrize(
    "fault",
    ["none", "open secret", "open client secret", "not a key", "writable", "unreadable", "no server key"],
)
async def test_where_the_keys_cannot_be_checked_nothing_is_bound(tmp_path: Path, fault: str) -> None:
    if fault != "none":
        keys = keys_of(tmp_path)
        path = keys.new("alice", None)
        match fault:
            case "open secret":
                (keys.path / "server.key_secret").chmod(0o644)
            case "open client secret":
                path.chmod(0o644)
            case "not a key":
                (keys.path / "alice.key").write_text("curve\n")
            case "writable":
                keys.path.chmod(0o777)
            case "unreadable":
                keys.path.rename(tmp_path / "away")
                keys.path.write_text("a file")
            case "no server key":
                (keys.path / "server.key_secret").unlink()
    error = await refused(tmp_path, CURVE)
    assert isinstance(error, ConfigError)
    assert str(tmp_path / "keys") in str(error)
    assert not (tmp_path / "regions.sock").exists()


@pytest.mark.parametrize(
    ("settings", "kind", "word"),
    [
        ({"control": {"curve": {"keys": "/nowhere"}}}, ConfigError, "control.curve.keys"),
        ({"control": {"open": False}}, ConfigError, "control.open"),
        ({"control": {"socket_group": "no-such-group"}}, ConfigError, "no-such-group"),
        ({"admin": {"token_file": "/nowhere/token"}}, ConfigError, "admin.token_file"),
        ({"control": {"bind_address": "0.0.0.0"}}, BindRefusedError, "0.0.0.0"),
        ({"admin": {"bind_address": "0.0.0.0"}}, BindRefusedError, "0.0.0.0"),
        ({"control": {"curve": {"bind_address": "no-such-host.invalid"}}}, ConfigError, "control.curve"),
        ({"admin": {"metrics": {"bind_address": "no-such-host.invalid"}}}, ConfigError, "admin.metrics"),
    ],
)
async def test_a_door_that_cannot_be_as_configured_is_named_and_nothing_is_made(
    tmp_path: Path, settings: dict[str, Any], kind: type[GatewayError], word: str
) -> None:
    state_dir = tmp_path / "state"
    error = await refused(state_dir, settings)
    assert isinstance(error, kind)
    assert word in str(error)
    assert not state_dir.exists()


@pytest.mark.parametrize("section", ["control", "admin"])
async def test_the_refusal_of_an_open_address_says_both_ways_out(tmp_path: Path, section: str) -> None:
    error = await refused(tmp_path / "state", {section: {"bind_address": "0.0.0.0"}})
    assert f"[{section}] allow_unauthenticated = true" in error.advice
    assert ("xkv-gateway keys init" if section == "control" else "token_file") in error.advice


def test_what_was_really_bound_is_judged_again() -> None:
    for bound in ("127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"):
        judge_bound("x", bound, section="control", allow_unauthenticated=False)
    for bound in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[::ffff:10.0.0.1]:1"):
        with pytest.raises(BindRefusedError):
            judge_bound("x", bound, section="control", allow_unauthenticated=False)
        judge_bound("x", bound, section="control", allow_unauthenticated=True)


async def test_a_port_that_is_taken_leaves_nothing_open(tmp_path: Path) -> None:
    keys_of(tmp_path / "a")
    keys_of(tmp_path / "b")
    async with opened(tmp_path / "a", CURVE) as ports:
        assert ports.addresses.control_curve is not None
        port = int(ports.addresses.control_curve.rpartition(":")[2])
        curve = {"curve": {"bind_address": "127.0.0.1", "port": port}}
        unix = {"socket": str(tmp_path / "c.sock")}
        error = await refused(tmp_path / "b", {"control": {**curve, **unix}})
        assert str(port) in str(error)
        assert "control.curve" in str(error)
    assert not (tmp_path / "c.sock").exists()
    assert not (tmp_path / "a" / "regions.sock").exists()


async def test_a_socket_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    for section in ("control", "admin"):
        path = tmp_path / f"{section}.sock"
        path.write_text("precious")
        error = await refused(tmp_path / "state", {section: {"socket": str(path)}})
        assert str(path) in str(error)
        assert path.read_text() == "precious"
