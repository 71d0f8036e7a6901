"""LMCache beside vLLM, with its second level on the card by our plugin: both are restarted, and the prompt is found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from tests.vllm.environment import lmcache_interpreter, why_no_lmcache
from tests.vllm.harness import PATIENT, START_S, Prompt, engine, environment, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from tests.vllm.conftest import Models

pytestmark = pytest.mark.vllm
BLOCK: Final = 32
FOUND: Final = 288


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.asynccontextmanager
async def lmcache(gateway: Gateway, log: Path) -> AsyncIterator[int]:
    """Run LMCache's server with the plugin; yield its port."""
    port, http_port = free_ports(2)
    params = {name: value for name, value in PATIENT.items() if name != "load_timeout_ms"}
    adapter = {
        "type": "plugin", "module_path": "xkv_lmcache_plugin", "class_name": "FusIOnXL2Adapter",
        "adapter_params": {"xkv_gateway_port": gateway.control_port, **params},
    }  # fmt: skip
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            str(lmcache_interpreter()), "-P", "-c", "from lmcache.cli.main import main; main()", "server",
            "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port), "--l1-size-gb", "0.5",
            "--supported-transfer-mode", "auto", "--eviction-policy", "LRU", "--chunk-size", str(BLOCK),
            "--disable-metrics", "--l2-adapter", json.dumps(adapter),
            env=environment(LMCACHE_DISABLE_BANNER="1"), start_new_session=True, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        async with asyncio.timeout(START_S), httpx.AsyncClient(trust_env=False) as client:
            while True:
                assert process.returncode is None, log.read_text()[-3000:]
                with contextlib.suppress(httpx.HTTPError):
                    await client.get(f"http://127.0.0.1:{http_port}/")
                    break
                await asyncio.sleep(0.1)
        yield port
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def transfer_config(port: int) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port},
    }


async def test_after_a_restart_of_both_the_card_gives_lmcache_its_objects_back_and_no_stranger(
    gateway: Gateway, models: Models, home: Path
) -> None:
    reason = why_no_lmcache()
    if reason is not None:
        pytest.skip(reason)
    mine, other = Prompt(tokens(300), "a"), Prompt(tokens(300), "b")
    # The engine in a process of its own: numba, which LMCache loads, and vLLM's kernels for the CPU do not agree in one.
    options: dict[str, Any] = {
        "variables": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        "python": lmcache_interpreter(),
        "block_size": BLOCK,
    }
    async with (
        lmcache(gateway, home / "lmcache-1.log") as port,
        engine(models("llama"), home / "first.log", transfer_config(port), **options) as first,
    ):
        scratch = await first.one(mine)
        await gateway.until(lambda status: status["usage"]["objects"] >= FOUND // BLOCK)
    async with (
        lmcache(gateway, home / "lmcache-2.log") as port,
        engine(models("llama"), home / "second.log", transfer_config(port), **options) as second,
    ):
        stranger = await second.one(other)
        found = await second.one(mine)
    assert (scratch.cached, stranger.cached, found.cached) == (0, 0, FOUND)
    assert found.same_as(scratch)
    assert stranger.same_as(scratch)
