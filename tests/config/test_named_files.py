"""What settings name as a file may be anything: nothing that reads it waits for somebody to write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from tests.e2e.gateway import run
from xkv_gateway.config import Config
from xkv_gateway.errors import ConfigError, ExitCode
from xkv_gateway.keys.directory import KeyDirectory
from xkv_gateway.service.tokens import read_token
from xkv_gateway.target.hostkeys import read_host_keys
from xkv_nvmeof.softcard.options import read_keys
from xkv_rpc.curve_files import CertificateError, read_certificate

if TYPE_CHECKING:
    from collections.abc import Callable

READERS: dict[str, Callable[[Path], object]] = {
    "key of the host": lambda path: read_host_keys(
        Config.model_validate({"fabric": {"dhchap_key_file": str(path)}}).fabric, None
    ),
    "token": lambda path: read_token(path, "admin.token_file", private=True),
    "certificate": read_certificate,
    "key of the soft card": lambda path: read_keys(path, None),
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("kind", ["pipe", "terminal", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, what: str, kind: str) -> None:
    path = tmp_path / "named"
    match kind:
        case "pipe":
            os.mkfifo(path, 0o600)
        case "folder":
            path.mkdir()
        case _:
            path = Path("/dev/ptmx")
    with pytest.raises((ConfigError, CertificateError, click.BadParameter), match=r"regular file|directory"):
        READERS[what](path)


def test_a_pipe_among_the_keys_hides_none_of_the_others(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path / "keys")
    keys.path.mkdir(mode=0o700)
    os.mkfifo(keys.path / "pipe.key", 0o600)
    _grants, faults = keys.clients()
    assert any("pipe" in fault for fault in faults)


async def test_the_doctor_names_a_pipe_instead_of_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    done = await run(tmp_path, "doctor", XKV_ADMIN__TOKEN_FILE=str(tmp_path / "token"))
    assert done.code == ExitCode.DEGRADED
    assert "it is no regular file" in done.out
