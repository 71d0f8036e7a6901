"""The front end's own tools on a real vLLM with the connector and the card: they pass, and they can fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final, cast

import pytest

from tests.e2e.gateway import serving
from tests.frontend.harness import KEY_A, KEY_A2, KEY_B, running_front
from tests.frontend.test_verify import SECRET, SaltSwitchedOff
from tests.vllm.harness import api_server, restarter, transfer_config
from xkv_frontend.core.salt import Secret
from xkv_frontend.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from tests.frontend.fake_vllm import FakeVllm
    from tests.frontend.harness import Running
    from tests.vllm.conftest import Models
    from tests.vllm.harness import ApiServer

pytestmark = pytest.mark.vllm
TOOL_S: Final = 3600
PROBES: Final = 12
PROBES_MAX: Final = 500
"""What it takes depends on how much the machine scatters."""
ATTEMPTS: Final = 3
"""One interval of twenty excludes 0 by chance."""
LINES: Final = 35
CHUNK_TOKENS: Final = 32


async def tool(command: str, *arguments: str) -> tuple[int, str]:
    """Run `xkv-frontend verify` or `timing` as an operator does."""
    keys = {"A": KEY_A, "A2": KEY_A2, "B": KEY_B}
    variables = {f"XKV_FRONTEND_{command.upper()}_KEY_{name}": key for name, key in keys.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "xkv_frontend", command, *arguments,
        env=os.environ | variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TOOL_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, " ".join(output.decode().split())


def before(server: ApiServer) -> FakeVllm:
    """Return the server as what the front end is put before; of that it takes the port only."""
    return cast("FakeVllm", server)


async def test_verify_passes_over_a_restart_and_fails_without_salts(
    gateway: Gateway, models: Models, home: Path, tmp_path: Path
) -> None:
    transfer = transfer_config(gateway.control_port)
    async with api_server(models("llama"), home / "log", transfer, max_model_len=65536) as server:
        async with running_front(before(server), tmp_path) as front, restarter(server) as command:
            code, output = await tool(
                "verify", "--front", front.url, "--vllm", server.url, "--restart-command", command
            )
        assert "Verdict: isolated" in output, output
        assert code == ExitCode.OK
        switched_off = SaltSwitchedOff(Secret(SECRET), "prod")
        async with running_front(before(server), tmp_path, salter=switched_off) as front:
            code, output = await tool("verify", "--front", front.url)
        assert "Verdict: broken" in output, output
        assert code == ExitCode.FAILED


@contextlib.asynccontextmanager
async def timed_server(models: Models, home: Path) -> AsyncIterator[ApiServer]:
    """A vLLM for timing studies, whose prefills take a while."""
    async with serving(home / "state", card="4GiB") as gateway:
        # Only whole chunks come back from the card: of prompts as short as these, with the default size, less than is close to all.
        transfer = transfer_config(gateway.control_port, chunk_size=CHUNK_TOKENS)
        variables = {"VLLM_SERVER_DEV_MODE": "1"}
        more: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192}
        async with api_server(models("heavy"), home / "log", transfer, variables, **more) as server:
            yield server


async def studied(
    front: Running, server: ApiServer, folder: Path, probes: int, *more: str
) -> tuple[int, Any]:
    numbers = folder / "timing.json"
    code, _ = await tool(
        "timing", "--front", front.url, "--vllm", server.url, "--probes", str(probes), "--lines", str(LINES),
        "--settle-seconds", "0.2", "--json", str(numbers), *more,
    )  # fmt: skip
    return code, json.loads(numbers.read_text())["arms"]


async def test_times_tell_others_without_salts_and_nobody_else_with_them(
    models: Models, home: Path, tmp_path: Path
) -> None:
    async with (
        timed_server(models, home) as server,
        running_front(before(server), tmp_path) as front,
        restarter(server) as command,
    ):
        for _ in range(ATTEMPTS):
            more = "--probes-max", str(PROBES_MAX), "--restart-command", command
            code, arms = await studied(front, server, tmp_path, PROBES, *more)
            # Whatever the scatter: who shares a cache is told by it, and who does not finds nothing cached.
            for arm in ("without salts", "colleague", "colleague, after a restart"):
                assert arms[arm]["finding"] == "signal", arms[arm]
                assert arms[arm]["cached_share"] > 0.9, arms[arm]
            for arm in ("other tenant", "other tenant, after a restart"):
                assert not any(arms[arm]["samples"]["known_cached"]), arms[arm]
            if code == ExitCode.OK:
                break
    told = {arm: (found["low_ms"], found["high_ms"], found["fresh_ms"]) for arm, found in arms.items()}
    assert code == ExitCode.OK, told


async def test_times_tell_others_when_the_salt_is_switched_off(
    models: Models, home: Path, tmp_path: Path
) -> None:
    switched_off = SaltSwitchedOff(Secret(SECRET), "prod")
    async with (
        timed_server(models, home) as server,
        running_front(before(server), tmp_path, salter=switched_off) as front,
    ):
        code, arms = await studied(front, server, tmp_path, 5)
    assert code == ExitCode.FAILED
    assert all(arms["other tenant"]["samples"]["known_cached"])
    assert arms["other tenant"]["difference_ms"] > arms["other tenant"]["fresh_ms"] / 2
