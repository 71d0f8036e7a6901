"""What the doctor says about keys: what a start would say, and whether both ends have the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from xkv_gateway.config import Config
from xkv_gateway.doctor.checks import Level
from xkv_gateway.doctor.keys import examine_keys
from xkv_nvmeof.dhchap.crypto import Hash
from xkv_nvmeof.dhchap.secret import new_dhchap_secret

ME = "nqn.2014-08.com.example:me"
ID = "6f1a2f0e-6c53-4a0b-8d34-0d8f2a9c1b7e"
ONE, OTHER = (new_dhchap_secret(Hash.SHA_256, os.urandom) for _ in range(2))
HERE = THERE = "dhchap_key_file"
CTRL = "dhchap_ctrl_key_file"


def config_of(folder: Path, here: dict[str, str], there: dict[str, str], host: str = ME) -> Config:
    """Settings whose keys are files with these texts."""

    def files(end: str, texts: dict[str, str]) -> dict[str, str]:
        named = {}
        for setting, text in texts.items():
            path = folder / f"{end}-{setting}"
            path.write_text(text)
            path.chmod(0o644 if text == "open" else 0o600)
            named[setting] = str(path)
        return named

    return Config.model_validate(
        {
            "fabric": files("here", here),
            "nvme": {"host_nqn": ME, "host_id": ID},
            "target": {"rpc": "/s", "hosts": ({"nqn": host, **files("there", there)},)},
        }
    )


@pytest.mark.parametrize(
    ("here", "there", "level", "words"),
    [
        ({HERE: ONE}, {THERE: ONE}, Level.OK, "this host proves itself"),
        ({HERE: ONE, CTRL: OTHER}, {THERE: ONE, CTRL: OTHER}, Level.OK, "prove themselves"),
        ({HERE: ONE}, {THERE: ONE, CTRL: OTHER}, Level.OK, "this host proves itself"),
        ({HERE: ONE}, {THERE: OTHER}, Level.PROBLEM, "different keys"),
        (
            {HERE: ONE, CTRL: ONE},
            {THERE: ONE, CTRL: OTHER},
            Level.PROBLEM,
            "dhchap_ctrl_key_file hold different",
        ),
        ({}, {THERE: ONE}, Level.PROBLEM, "fabric.dhchap_key_file is not set"),
        ({HERE: ONE}, {}, Level.NOTE, "of no use"),
        ({HERE: ONE, CTRL: OTHER}, {THERE: ONE}, Level.PROBLEM, "dhchap_ctrl_key_file is not set"),
        ({HERE: "rubbish"}, {}, Level.PROBLEM, "DHHC-1"),
        ({HERE: ONE}, {THERE: "rubbish"}, Level.PROBLEM, "target.hosts dhchap_key_file"),
        ({HERE: "open"}, {}, Level.PROBLEM, "others can read"),
        ({HERE: ONE}, {THERE: "open"}, Level.PROBLEM, "others can read"),
    ],
)
def test_keys_that_do_not_go_together_are_found(
    tmp_path: Path, here: dict[str, str], there: dict[str, str], level: Level, words: str
) -> None:
    [finding] = examine_keys(config_of(tmp_path, here, there), None)
    assert finding.level is level
    assert words in finding.text
    assert finding.advice or level is Level.OK
    shown = repr(finding)
    assert not any(text[10:] in shown for text in (ONE, OTHER))


def test_a_target_that_lets_only_others_in_is_a_problem(tmp_path: Path) -> None:
    [finding] = examine_keys(config_of(tmp_path, {}, {}, host="nqn.2014-08.com.example:other"), None)
    assert (finding.level, "not this host" in finding.text) == (Level.PROBLEM, True)


@pytest.mark.parametrize(
    "settings", [{}, {"target": {"rpc": "/s"}}, {"target": {"rpc": "/s", "allow_any_host": True}}]
)
def test_where_there_are_no_keys_nothing_is_said(settings: dict[str, Any]) -> None:
    assert examine_keys(Config.model_validate(settings), None) == []


def test_a_file_that_only_the_target_can_see_is_not_judged(tmp_path: Path) -> None:
    config = config_of(tmp_path, {HERE: ONE}, {THERE: OTHER})
    Path(config.target.hosts[0].dhchap_key_file or "").unlink()
    [finding] = examine_keys(config, None)
    assert finding.level is Level.OK
