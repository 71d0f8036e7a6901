"""vLLM's API server as an operator runs it: salts in the body, a restart of vLLM, clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import httpx
import pytest

from tests.vllm.harness import PATIENT, api_server, cached_tokens, tokens, transfer_config
from tests.vllm.meddler import Fault, meddler

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from tests.vllm.conftest import Models
    from tests.vllm.harness import ApiServer

pytestmark = pytest.mark.vllm
DOCUMENT: Final = "\n".join(f"Line {number}: a private document of tenant A." for number in range(1, 3001))
CHUNK: Final = 128
SETTLE_S: Final = 120.0


async def stored(gateway: Gateway, objects: int) -> None:
    """Return once so many objects are on the card."""
    async with asyncio.timeout(SETTLE_S):
        while (await gateway.status())["usage"]["objects"] < objects:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def test_a_long_private_document_comes_from_the_card_for_its_tenant_only(
    gateway: Gateway, models: Models, home: Path
) -> None:
    transfer = transfer_config(
        gateway.control_port, chunk_size=128, require_cache_salt=True, key_namespace="prod-glm53"
    )
    async with api_server(models("llama"), home / "log", transfer, max_model_len=65536) as server:
        first = await server.complete(DOCUMENT, "tenant-a")
        length = first["usage"]["prompt_tokens"]
        most = (length - 1) // CHUNK * CHUNK
        assert length > 20_000
        assert cached_tokens(first) == 0
        again = await server.complete(DOCUMENT, "tenant-a")
        assert cached_tokens(again) == most
        await stored(gateway, length // CHUNK)
        assert cached_tokens(await server.complete(DOCUMENT, "tenant-b")) == 0
        await stored(gateway, 2 * (length // CHUNK))
        other = f"Second document.\n{DOCUMENT}"
        assert cached_tokens(await server.complete(other, "tenant-a")) == 0
        await stored(gateway, 3 * (length // CHUNK))
        assert await server.metric("vllm:fusionx_chunks_stored_total") >= 3 * (length // CHUNK)
        await server.restart()
        await server.ready()
        restarted = await server.complete(DOCUMENT, "tenant-a")
        assert cached_tokens(restarted) == most
        assert restarted["choices"][0]["text"] == first["choices"][0]["text"]
        logprobs = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (first, restarted)]
        assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-3)
        assert await server.metric("vllm:fusionx_chunks_loaded_total") == length // CHUNK
        # B has asked the first document, and has it under a salt of its own; nobody but A has asked the second.
        assert cached_tokens(await server.complete(other, "tenant-b")) == 0
        assert cached_tokens(await server.complete(other)) == 0
        assert "FusIOnX: on" in server.log_text
        assert "tenant-a" not in server.log_text


async def test_clients_that_go_away_while_their_prompt_is_looked_up_or_loaded_leave_nothing_behind(
    gateway: Gateway, models: Models, home: Path
) -> None:
    prompts = [tokens(1000, seed=seed) for seed in range(4)]
    async with meddler(gateway.control_port) as between:
        # Nobody asks for less patience here: what is held up is let go by the test.
        transfer = transfer_config(between.port, **PATIENT)
        variables = {"VLLM_SERVER_DEV_MODE": "1"}
        async with api_server(models("llama"), home / "log", transfer, variables) as server:
            scratch = [await server.complete(prompt, "a") for prompt in prompts]
            await stored(gateway, 4 * 7)
            for operation in ("lookup", "load", "store"):
                await emptied(server)
                before = between.caught
                between.spoil(operation, Fault.HOLD)
                for prompt in prompts:
                    await gone_after(server, prompt if operation != "store" else [*prompt[:500], *prompt])
                assert between.caught > before
                between.relent()
                await emptied(server)
                found = [await server.complete(prompt, "a") for prompt in prompts]
                texts = [answer["choices"][0]["text"] for answer in found]
                assert texts == [answer["choices"][0]["text"] for answer in scratch]
            assert [cached_tokens(answer) for answer in found] == [896] * 4
            assert await server.metric("vllm:num_requests_running") == 0
            assert await server.metric("vllm:kv_cache_usage_perc") == pytest.approx(0, abs=0.01)


async def gone_after(server: ApiServer, prompt: list[int], seconds: float = 1.0) -> None:
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(seconds):
            await server.complete(prompt, "a")


async def emptied(server: ApiServer) -> None:
    """Empty vLLM's own prefix cache; this works only when no block is held."""
    async with asyncio.timeout(SETTLE_S), httpx.AsyncClient(trust_env=False, timeout=SETTLE_S) as client:
        while not (await client.post(f"{server.url}/reset_prefix_cache")).json()["success"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
