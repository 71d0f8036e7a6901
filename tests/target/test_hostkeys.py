"""The keys of `[fabric]`: where they are read, and what is refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from xkv_gateway.config.fabric import FabricConfig
from xkv_gateway.errors import ConfigError
from xkv_gateway.target.hostkeys import read_host_keys
from xkv_nvmeof.dhchap.crypto import Hash
from xkv_nvmeof.dhchap.secret import new_dhchap_secret

if TYPE_CHECKING:
    from pathlib import Path

TEXT = new_dhchap_secret(Hash.SHA_256, os.urandom)


def key_file(folder: Path, name: str, text: str = TEXT, mode: int = 0o600) -> Path:
    path = folder / name
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def test_without_settings_there_are_no_keys() -> None:
    assert read_host_keys(FabricConfig(), None) is None


def test_both_keys_are_read(tmp_path: Path) -> None:
    own, target = key_file(tmp_path, "own"), key_file(tmp_path, "target")
    alone = read_host_keys(FabricConfig(dhchap_key_file=str(own)), None)
    assert alone is not None
    assert alone.controller is None
    both = read_host_keys(FabricConfig(dhchap_key_file=str(own), dhchap_ctrl_key_file=str(target)), None)
    assert both is not None
    assert both.controller is not None


def test_a_bare_name_is_a_credential(tmp_path: Path) -> None:
    key_file(tmp_path, "dhchap", mode=0o440)
    assert read_host_keys(FabricConfig(dhchap_key_file="dhchap"), tmp_path) is not None
    with pytest.raises(ConfigError, match="systemd credential"):
        read_host_keys(FabricConfig(dhchap_key_file="dhchap"), None)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, "own", mode=mode)
    with pytest.raises(ConfigError, match="others can read"):
        read_host_keys(FabricConfig(dhchap_key_file=str(path)), None)


def test_what_is_no_key_is_refused_by_setting_and_file_and_not_shown(tmp_path: Path) -> None:
    own, broken = key_file(tmp_path, "own"), key_file(tmp_path, "broken", TEXT[:-3] + "AA:")
    fabric = FabricConfig(dhchap_key_file=str(own), dhchap_ctrl_key_file=str(broken))
    with pytest.raises(ConfigError, match=r"fabric\.dhchap_ctrl_key_file") as caught:
        read_host_keys(fabric, None)
    assert str(broken) in str(caught.value)
    assert TEXT[10:30] not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_host_keys(FabricConfig(dhchap_key_file=str(tmp_path / "nowhere")), None)
