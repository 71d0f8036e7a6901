from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest

from tests.e2e.gateway import PATIENT, run, serve_arguments, serving
from tests.ports import held_port
from xkv_gateway.cli import main
from xkv_gateway.errors import ExitCode
from xkv_rpc.async_client import AsyncClient

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("flag", "address"),
    [
        ("--bind-address", "::ffff:10.0.0.1"),
        ("--admin-bind-address", "192.0.2.1"),
    ],
)
async def test_an_open_address_is_refused_before_anything_is_made(
    home: Path, flag: str, address: str
) -> None:
    finished = await run(home, *serve_arguments(home / "state", "256MiB"), flag, address)
    assert finished.code == ExitCode.BIND_REFUSED
    assert address in finished.err
    assert "allow_unauthenticated = true" in finished.err
    assert not (home / "state").exists()


async def test_an_open_address_is_served_once_that_is_written_down(home: Path) -> None:
    file = home / "gateway.toml"
    file.write_text("[control]\nallow_unauthenticated = true\n")
    async with serving(home / "state", "--config", str(file), "--bind-address", "0.0.0.0") as gateway:
        assert gateway.said_at("control").startswith("0.0.0.0:")
    # The permission is for one port only.
    refused = await run(
        home,
        *serve_arguments(home / "state", "256MiB"),
        "--config",
        str(file),
        "--admin-bind-address",
        "0.0.0.0",
    )
    assert refused.code == ExitCode.BIND_REFUSED


WRONG_SETTINGS: list[tuple[tuple[str, ...], dict[str, str], str]] = [
    (("--config", "bad.toml"), {}, "control.prot"),
    (("--config", "none.toml"), {}, "none.toml"),
    ((), {"XKV_CONTROL__PRT": "1"}, "XKV_CONTROL__PRT"),
    ((), {"XKV_CARD__AU": "x"}, "card.au"),
    (("--port", "70000"), {}, "--port"),
    (("--card", "kernel+tcp://127.0.0.1/card0"), {}, "NQN"),
    (("--card", "soft:x?size=none"), {}, "size"),
    (("--frobnicate",), {}, "--frobnicate"),
]


@pytest.mark.parametrize(("arguments", "variables", "word"), WRONG_SETTINGS)
def test_a_wrong_setting_is_an_error_that_names_it_and_nothing_is_made(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    variables: dict[str, str],
    word: str,
) -> None:
    monkeypatch.chdir(home)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (home / "bad.toml").write_text("[control]\nprot = 5557\n")
    assert main([*serve_arguments(home / "state", None), *arguments]) == ExitCode.CONFIG
    message = capsys.readouterr().err
    assert word in message
    assert "Traceback" not in message
    assert "pydantic" not in message
    assert not (home / "state").exists()


async def test_the_settings_in_effect_are_shown_with_their_source(home: Path) -> None:
    sample = await run(home, "config", "sample")
    (home / "gateway.toml").write_text(sample.out)
    shown = await run(
        home, "config", "show", "--config", str(home / "gateway.toml"), "--port", "1", XKV_ADMIN__PORT="2"
    )
    assert (sample.code, shown.code) == (ExitCode.OK, ExitCode.OK)
    rows = {line.split()[0]: line for line in shown.out.splitlines() if line}
    assert "flag --port" in rows["control.port"]
    assert "environment variable XKV_ADMIN__PORT" in rows["admin.port"]
    assert "gateway.toml" in rows["card.au"]
    assert rows["card.url"].endswith("default")


async def test_status_without_a_gateway_says_so_and_what_to_do(home: Path) -> None:
    with held_port() as port:
        finished = await run(home, "status", "--admin", f"127.0.0.1:{port}")
    assert finished.code == ExitCode.UNREACHABLE
    assert "no gateway answers" in finished.err
    assert "xkv-gateway serve" in finished.err


async def test_status_of_something_else_says_so(home: Path) -> None:
    async with serving(home / "state") as gateway:
        finished = await run(home, "status", "--admin", f"127.0.0.1:{gateway.control_port}")
    assert finished.code == ExitCode.UNREACHABLE


@pytest.mark.parametrize("admin", ["5558", "127.0.0.1:", ":5558", "127.0.0.1:x", "127.0.0.1:70000"])
def test_a_wrong_admin_address_is_named(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--admin", admin]) == ExitCode.CONFIG
    assert "HOST:PORT" in capsys.readouterr().err


async def test_the_default_card_lies_in_the_state_directory_and_is_used_again_with_its_size(
    home: Path,
) -> None:
    async with serving(home / "state", "--card", f"soft:{home}/state/card.img?size=128MiB", card=None):
        pass
    async with serving(home / "state", card=None) as gateway:
        status = await gateway.status()
    assert status["card"]["url"] == f"soft:{home}/state/card.img"
    assert status["card"]["size_bytes"] == 128 << 20


async def test_a_soft_card_of_another_size_is_refused_and_left_as_it_is(home: Path) -> None:
    async with serving(home / "state", card="128MiB"):
        pass
    size_bytes = (home / "state.img").stat().st_size
    finished = await run(home, *serve_arguments(home / "state", "256MiB"))
    assert finished.code == ExitCode.CARD
    assert "size" in finished.err
    assert (home / "state.img").stat().st_size == size_bytes


async def test_the_host_identity_stays_the_same(home: Path) -> None:
    async with serving(home / "state"):
        first = json.loads((home / "state" / "host.json").read_text())
    async with serving(home / "state"):
        assert json.loads((home / "state" / "host.json").read_text()) == first


async def test_a_target_that_is_not_there_is_named(home: Path) -> None:
    with held_port() as port:
        card = f"nvme+tcp://127.0.0.1:{port}/nqn.2014-08.com.example:gone"
        finished = await run(home, *serve_arguments(home / "state", None), "--card", card)
    assert finished.code == ExitCode.CARD
    assert card in finished.err
    assert "Traceback" not in finished.err


async def test_what_lies_at_a_socket_path_is_never_removed_unless_it_is_a_stale_socket(home: Path) -> None:
    (home / "state").mkdir()
    path = home / "state" / "regions.sock"
    path.write_text("precious")
    finished = await run(home, *serve_arguments(home / "state", "256MiB"))
    assert finished.code == ExitCode.CONFIG
    assert str(path) in finished.err
    assert path.read_text() == "precious"
    assert not (home / "state.img").exists()
    path.unlink()
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(str(path))
    stale.close()
    async with serving(home / "state") as gateway:
        assert gateway.said_at("regions") == str(path)


async def test_an_over_long_socket_path_is_named_and_nothing_is_made(home: Path) -> None:
    long = home / ("d" * 100)
    finished = await run(
        home, *serve_arguments(home / "state", "256MiB"), XKV_CONTROL__SOCKET=f"{long}/control.sock"
    )
    assert finished.code == ExitCode.CONFIG
    assert str(long) in finished.err
    finished = await run(home, *serve_arguments(long, "256MiB"))
    assert finished.code == ExitCode.STATE_DIR
    assert "too long" in finished.err
    assert not list(home.glob("*.img"))


async def test_the_unix_socket_serves_the_same_protocol(home: Path) -> None:
    async with serving(home / "state", XKV_CONTROL__SOCKET=f"{home}/control.sock") as gateway:
        assert gateway.said_at("control").endswith(f" and {home}/control.sock")
        client = AsyncClient(f"ipc://{home}/control.sock", PATIENT)
        hello = await client.hello("test")
        assert hello.card.state == "online"
        assert hello.regions == str(home / "state" / "regions.sock")
        await client.aclose()
