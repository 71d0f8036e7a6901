"""`verify` and `timing` as an operator runs them: what they print, write and return."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.frontend.harness import KEY_A, KEY_A2, KEY_B, Running, running_front
from tests.frontend.test_verify import SECRET, SaltSwitchedOff, restarter
from xkv_frontend.core.salt import Secret
from xkv_frontend.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm


async def run(
    command: str, *arguments: str, keys: tuple[str, str, str] = (KEY_A, KEY_A2, KEY_B)
) -> tuple[int, str]:
    prefix = f"XKV_FRONTEND_{command.upper()}_KEY_"
    env = {**os.environ, **{prefix + name: key for name, key in zip(("A", "A2", "B"), keys, strict=True)}}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "xkv_frontend", command, *arguments,
        env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    assert process.returncode is not None
    assert not any(key.encode() in output for key in keys)
    return process.returncode, output.decode()


@pytest.mark.parametrize("command", ["verify", "timing"])
async def test_the_help_names_the_variables_of_the_keys(command: str) -> None:
    code, output = await run(command, "--help")
    assert code == ExitCode.OK
    assert all(f"XKV_FRONTEND_{command.upper()}_KEY_{name}" in output for name in ("A", "A2", "B"))


async def test_verify_tells_its_verdict_in_words_and_by_its_exit_code(
    front: Running, fake: FakeVllm, tmp_path: Path
) -> None:
    seen = tmp_path / "seen.json"
    async with restarter(fake) as command:
        code, output = await run(
            "verify", "--front", front.url, "--vllm", fake.url, "--lines", "60", "--settle-seconds", "0",
            "--restart-command", command, "--json", str(seen),
        )  # fmt: skip
    assert code == ExitCode.OK
    assert "Verdict: isolated." in output
    document = json.loads(seen.read_text())
    assert document["verdict"] == "isolated"
    assert [one["cached_tokens"] > 0 for one in document["observations"]] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    fake.tells_cached = False
    assert (await run("verify", "--front", front.url, "--lines", "60"))[0] == ExitCode.INCONCLUSIVE
    code, output = await run("verify", "--front", front.url, keys=("wrong-key", KEY_A2, KEY_B))
    assert code == ExitCode.UNREACHABLE
    assert "401" in output


async def test_both_fail_when_the_salt_is_switched_off(fake: FakeVllm, tmp_path: Path) -> None:
    async with running_front(fake, tmp_path, salter=SaltSwitchedOff(Secret(SECRET), "prod")) as front:
        code, output = await run("verify", "--front", front.url, "--lines", "60")
        assert code == ExitCode.FAILED
        assert "got around the front end's salt" in " ".join(output.split())
        code, output = await run(
            "timing",
            "--front",
            front.url,
            "--vllm",
            fake.url,
            "--probes",
            "5",
            "--lines",
            "30",
            "--settle-seconds",
            "0",
        )
        assert code == ExitCode.FAILED
        assert "do not keep the tenants apart" in " ".join(output.split())


async def test_timing_draws_and_writes_what_it_measured(
    front: Running, fake: FakeVllm, tmp_path: Path
) -> None:
    picture, numbers = tmp_path / "timing.png", tmp_path / "timing.json"
    code, output = await run(
        "timing", "--front", front.url, "--vllm", fake.url, "--probes", "5", "--probes-max", "5", "--lines", "30",
        "--settle-seconds", "0",
        "--plot", str(picture), "--json", str(numbers),
    )  # fmt: skip
    # This fake answers at once whatever it has cached, so that the clock of the machine shows no signal to anybody.
    assert code in (ExitCode.INCONCLUSIVE, ExitCode.FAILED, ExitCode.OK)
    assert "without salts:" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
    arms = json.loads(numbers.read_text())["arms"]
    assert arms.keys() == {"without salts", "other tenant", "colleague"}
    assert [len(arm["samples"]["known_ms"]) for arm in arms.values()] == [5, 5, 5]
