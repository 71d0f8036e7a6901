from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from xkv_gateway.errors import StateDirError
from xkv_gateway.state import choose_state_dir, host_identity, make_state_dir, regions_socket_path

HOME = Path("/home/somebody")


def test_the_setting_wins_then_systemd_then_xdg_then_home() -> None:
    everything = {"STATE_DIRECTORY": "/var/lib/xkv-gateway:/var/lib/other", "XDG_STATE_HOME": "/xdg"}
    assert choose_state_dir("/chosen", everything, HOME) == Path("/chosen")
    assert choose_state_dir(None, everything, HOME) == Path("/var/lib/xkv-gateway")
    assert choose_state_dir(None, {"XDG_STATE_HOME": "/xdg"}, HOME) == Path("/xdg/xkv-gateway")
    assert choose_state_dir(None, {"XDG_STATE_HOME": "relative"}, HOME) == HOME / ".local/state/xkv-gateway"
    assert choose_state_dir(None, {}, HOME) == HOME / ".local/state/xkv-gateway"


def test_the_state_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    make_state_dir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    make_state_dir(path)


def test_a_file_in_place_of_the_state_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(StateDirError, match="file"):
        make_state_dir(path)


def test_the_host_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    first = host_identity(tmp_path, os.urandom)
    assert first.host_nqn == f"nqn.2014-08.org.nvmexpress:uuid:{first.host_id}"
    assert first.host_id.int != 0
    assert host_identity(tmp_path, os.urandom) == first
    assert stat.S_IMODE((tmp_path / "host.json").stat().st_mode) == 0o600


def test_an_identity_that_was_told_to_a_target_outlives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one would be another host, whose card it is not: the file is durable first, then its name."""
    durable: list[tuple[bool, list[str]]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        durable.append(
            (stat.S_ISDIR(os.fstat(descriptor).st_mode), [each.name for each in tmp_path.iterdir()])
        )

    monkeypatch.setattr(os, "fsync", noted)
    host_identity(tmp_path, os.urandom)
    assert durable == [(False, ["host.json.new"]), (True, ["host.json"])]


DAMAGED = (
    "",
    "{}",
    "[]",
    "null",
    '{"host_nqn": 5, "host_id": "6f1a2f0e-6c53-4a0b-8d34-0d8f2a9c1b7e"}',
    '{"host_nqn": "nqn.a", "host_id": "00000000-0000-0000-0000-000000000000"}',
    '{"host_nqn": "nqn.a", "host_id": 5}',
)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_host_identity_is_an_error_and_not_a_new_identity(tmp_path: Path, content: str) -> None:
    (tmp_path / "host.json").write_text(content)
    with pytest.raises(StateDirError, match=r"host\.json"):
        host_identity(tmp_path, os.urandom)
    assert (tmp_path / "host.json").read_text() == content


def test_an_over_long_socket_path_is_a_named_error() -> None:
    assert regions_socket_path(None, Path("/var/lib/xkv-gateway")) == Path(
        "/var/lib/xkv-gateway/regions.sock"
    )
    assert regions_socket_path("/run/r.sock", Path("/var/lib/xkv-gateway")) == Path("/run/r.sock")
    with pytest.raises(StateDirError, match="too long for a Unix socket"):
        regions_socket_path(None, Path("/" + "d" * 120))
