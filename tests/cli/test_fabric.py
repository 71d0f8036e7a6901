"""`xkv-gateway fabric discover`: whatever says where a target is will do."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.card_process import running_card
from tests.ports import held_port
from xkv_gateway.cli import fabric, main
from xkv_gateway.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path


def test_a_target_is_asked_by_address_or_by_the_url_of_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ("--state-dir", str(tmp_path))
    with running_card("--memory", "--size", "64MiB") as card:
        host, port, nqn = (card.ready[name] for name in ("host", "port", "nqn"))
        for where in (
            f"{host}:{port}",
            f"tcp://{host}:{port}",
            f"nvme+tcp://{host}:{port}/{nqn}?nsid=1",
            f"nvme+tcp://{host}:{port},127.0.0.9:4420/{nqn}",
            f"kernel+tcp://{host}:{port}/{nqn}",
        ):
            assert main(["fabric", "discover", where, "--json", *state]) == ExitCode.OK
            offered = json.loads(capsys.readouterr().out)
            assert offered == [{"nqn": nqn, "address": host, "port": str(port)}]
        assert main(["fabric", "discover", f"{host}:{port}", *state]) == ExitCode.OK
        assert str(port) in capsys.readouterr().out


def test_a_target_that_never_comes_to_an_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fabric, "DISCOVER_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        assert main(["fabric", "discover", where, "--state-dir", str(tmp_path)]) == ExitCode.CARD
    assert "did not tell all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("soft:card.img?size=1GiB", ExitCode.CONFIG, "HOST:PORT"),
        ("http://127.0.0.1:4420", ExitCode.CONFIG, "there is no target to ask"),
        ("127.0.0.1:none", ExitCode.CONFIG, "HOST:PORT"),
        ("nvme+tcp://192.0.2.1:4420/nqn", ExitCode.CONFIG, "192.0.2.1"),
    ],
)
def test_what_is_no_target_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, code: ExitCode, said: str
) -> None:
    assert main(["fabric", "discover", where, "--state-dir", str(tmp_path)]) == code
    assert said in capsys.readouterr().err


def test_a_target_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held_port() as port:
        where = f"nvme+tcp://127.0.0.1:{port}/nqn.2014-08.com.example:card"
        assert main(["fabric", "discover", where, "--state-dir", str(tmp_path)]) == ExitCode.CARD
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
