"""The doors open as configured, or nothing is open and the message says why."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.ports import held_port
from xkv_gateway.binds import BindAddress, bind_error, judge_bound
from xkv_gateway.config import Config
from xkv_gateway.daemon.ports import Judged, PortOpener, Ports, _bind_failed
from xkv_gateway.errors import BindRefusedError, ConfigError, GatewayError
from xkv_gateway.keys.directory import KeyDirectory
from xkv_rpc.errors import BadEndpointError
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


@pytest.mark.parametrize(
    ("sections", "addresses"),
    [
        (("control", "admin"), ("127.0.0.1", "127.0.0.1")),
        (("control", "admin"), ("::1", "::1")),
        (("admin", "admin.metrics"), ("127.0.0.1", "0.0.0.0")),
        (("control.curve", "admin"), ("::", "127.0.0.1")),
    ],
)
async def test_one_port_for_two_doors_is_told_as_that_and_not_as_somebody_elses(
    tmp_path: Path, sections: tuple[str, str], addresses: tuple[str, str]
) -> None:
    settings: dict[str, Any] = {}
    for section, address in zip(sections, addresses, strict=True):
        at = settings
        for name in section.split("."):
            at = at.setdefault(name, {})
        at |= {"bind_address": address, "port": 6001}
    error = await refused(tmp_path / "state", settings)
    assert isinstance(error, ConfigError)
    assert str(error) == f"{sections[0]}.port and {sections[1]}.port are both 6001"
    assert not (tmp_path / "state").exists()


async def test_one_port_at_two_addresses_is_two_ports(tmp_path: Path) -> None:
    with held_port() as port:
        settings = {"control": {"port": port}, "admin": {"bind_address": "::1", "port": port}}
        async with opened(tmp_path, settings) as ports:
            assert (ports.addresses.control, ports.addresses.admin) == (f"127.0.0.1:{port}", f"[::1]:{port}")


@pytest.mark.parametrize("section", ["control", "control.curve", "admin"])
def test_a_port_for_which_privileges_are_needed_is_told_as_that(section: str) -> None:
    address = BindAddress("127.0.0.1", "127.0.0.1", 80)
    if section == "admin":
        error = bind_error(address, errno.EACCES, section=section)
    else:
        judged = Judged(
            control=address if section == "control" else None,
            curve=address if section == "control.curve" else None,
            admin=BindAddress("127.0.0.1", "127.0.0.1", 5558),
            metrics=None,
        )
        error = _bind_failed(
            BadEndpointError("tcp://127.0.0.1:80", "Permission denied", errno=errno.EACCES), judged
        )
    assert (type(error), str(error)) == (
        ConfigError,
        f"{section}.port: no permission to listen on port 80",
    )
    assert "higher" in error.advice


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
