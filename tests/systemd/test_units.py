"""The units: systemd accepts them, they may do little, they are installed whole, and the example settings are valid."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from xkv_gateway.cli import main
from xkv_gateway.cli.systemd import EXAMPLES, MANAGED
from xkv_gateway.config import load_config
from xkv_gateway.daemon.stopping import STOP_DEADLINE_S
from xkv_gateway.errors import ExitCode

UNITS: Final = Path(__file__).parents[2] / "systemd"
SERVICES: Final = ("xkv-gateway.service", "xkv-gateway@.service")
ATTACH: Final = "xkv-card-attach@.service"
EXPOSURE_MAX: Final = 2.0

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here"
)


def settings_of(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@needs_systemd
@pytest.mark.parametrize("unit", [*SERVICES, ATTACH])
def test_systemd_accepts_the_unit(unit: str, tmp_path: Path) -> None:
    text = (UNITS / unit).read_text().replace("/usr/bin/xkv-gateway", shutil.which("true") or "/bin/true")
    (tmp_path / unit).write_text(text)
    verified = analyze("verify", "--man=no", str(tmp_path / unit))
    said = verified.stdout + verified.stderr
    # What it says about other units of this machine does not concern us.
    assert not [line for line in said.splitlines() if "xkv-" in line]


def test_instances_share_neither_user_nor_directories() -> None:
    settings = settings_of("xkv-gateway@.service")
    for name in ("User", "StateDirectory", "RuntimeDirectory"):
        assert all("%i" in value for value in settings[name]), name


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES)
def test_the_service_may_do_little(unit: str) -> None:
    analyzed = analyze("security", "--offline=yes", "--no-pager", str(UNITS / unit))
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", analyzed.stdout)
    if found is None and "offline" in analyzed.stderr:
        pytest.skip("this systemd-analyze has no --offline")
    assert found, analyzed.stdout + analyzed.stderr
    assert float(found[1]) <= EXPOSURE_MAX


@pytest.mark.parametrize("unit", SERVICES)
def test_the_gateway_ends_within_half_of_the_time_that_systemd_gives(unit: str) -> None:
    settings = settings_of(unit)
    assert float(settings["TimeoutStopSec"][0]) / 2 >= STOP_DEADLINE_S
    assert settings["Type"] == ["notify"]
    assert float(settings["WatchdogSec"][0]) > 0
    codes = {int(code) for code in settings["RestartPreventExitStatus"][0].split()}
    assert codes == {ExitCode.CONFIG, ExitCode.BIND_REFUSED, ExitCode.CARD_LOST}


def test_the_one_unit_with_root_waits_longer_than_a_silent_target_keeps_nvme_cli() -> None:
    settings = settings_of(ATTACH)
    assert float(settings["TimeoutStartSec"][0]) > 61 < float(settings["TimeoutStopSec"][0])
    assert settings["Type"] == ["oneshot"]


def test_install_writes_all_of_it_and_uninstall_takes_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/local/bin/xkv-gateway"])
    assert main(["systemd", "install", "--root", str(tmp_path)]) == ExitCode.OK
    assert "systemctl" in capsys.readouterr().out
    for target in MANAGED.values():
        assert (tmp_path / target).read_text()
    unit = (tmp_path / MANAGED["xkv-gateway.service"]).read_text()
    assert "ExecStart=/usr/local/bin/xkv-gateway serve" in unit
    config = tmp_path / EXAMPLES["gateway.toml"]
    config.write_text("# mine\n")
    assert main(["systemd", "install", "--root", str(tmp_path)]) == ExitCode.OK
    assert config.read_text() == "# mine\n"
    assert main(["systemd", "uninstall", "--root", str(tmp_path)]) == ExitCode.OK
    assert not any((tmp_path / target).exists() for target in MANAGED.values())
    assert config.exists()


def test_a_unit_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / MANAGED["xkv-gateway.service"]
    foreign.parent.mkdir(parents=True)
    foreign.write_text("[Service]\nExecStart=/bin/true\n")
    for command in ("install", "uninstall"):
        assert main(["systemd", command, "--root", str(tmp_path)]) == ExitCode.CONFIG
    assert foreign.read_text() == "[Service]\nExecStart=/bin/true\n"


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.endswith(".toml")])
def test_the_example_settings_are_valid_as_they_are_and_with_everything_uncommented(
    name: str, tmp_path: Path
) -> None:
    assert load_config(file=UNITS / name, environment={}, flags={}).config.card.url
    everything = re.sub(r"^#(?=[\w\[]+.*[=\]])", "", (UNITS / name).read_text(), flags=re.MULTILINE)
    (tmp_path / name).write_text(everything)
    assert load_config(file=tmp_path / name, environment={}, flags={}).config.card.url
