"""The rule that keeps a card's node with its group."""

from __future__ import annotations

from pathlib import Path

import pytest

from xkv_gateway.target import udev

NQN = "nqn.2014-08.com.example:card"


async def test_a_rule_is_written_for_one_subsystem_and_taken_back(tmp_path: Path) -> None:
    await udev.give(NQN, 977, 0o660, tmp_path)
    await udev.give(f"{NQN}2", 978, 0o660, tmp_path)
    first, second = sorted((tmp_path / "rules.d").iterdir(), key=Path.read_text)
    assert first.read_text() == (
        'ACTION!="remove", SUBSYSTEM=="block", KERNEL=="nvme*",'
        ' ATTRS{subsysnqn}=="nqn.2014-08.com.example:card", GROUP="977", MODE="0660"\n'
    )
    await udev.take_back(NQN, tmp_path)
    await udev.take_back(NQN, tmp_path)
    assert list((tmp_path / "rules.d").iterdir()) == [second]


@pytest.mark.parametrize(
    "nqn", ['nqn.2014-08.com.example:a", RUN+="/bin/sh', "nqn.2014-08.com.example:*", "x\ny"]
)
def test_no_nqn_says_more_than_a_name(nqn: str) -> None:
    text = udev.rule(nqn, 1, 0o660)
    assert text.count("\n") == 1
    assert text.count('"') == 12
    assert "RUN+=" not in text
    assert "*" not in text.replace("nvme*", "")


async def test_where_there_is_no_udev_nothing_is_written(tmp_path: Path) -> None:
    await udev.give(NQN, 1, 0o660, tmp_path / "none")
    assert not (tmp_path / "none").exists()
