"""Whatever fails, a request gets the answer that it would get without a cache, and the next one finds the cache again."""

from __future__ import annotations

import asyncio
import signal
import struct
from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.gateway import serving
from tests.vllm.harness import Prompt, engine, tokens, transfer_config
from tests.vllm.meddler import Fault, meddler

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from tests.vllm.conftest import Models
    from tests.vllm.harness import Answer, Engine

pytestmark = pytest.mark.vllm
KNOWN: Final = Prompt(tokens(1000), "a")
HIT: Final = 896
BYSTANDER_SEEDS: Final = iter(range(100, 1000))
LIMITS: Final = {"load_timeout_ms": 1500, "store_timeout_ms": 1500, "lookup_timeout_ms": 500}
RECOVERY_S: Final = 90.0
DATA_OFFSET_AT: Final = 232
"""Where the superblock says where payloads begin."""


async def learn(one: Engine) -> Answer:
    """Have the prompt computed and stored, and see that it is found."""
    scratch = await one.one(KNOWN)
    await finds_again(one, scratch)
    return scratch


async def finds_again(one: Engine, scratch: Answer) -> None:
    """The card gives the prompt back; after a failure this takes a while (the circuit is open, or it is stored anew)."""
    async with asyncio.timeout(RECOVERY_S):
        while True:
            await one.forget()
            before = await loaded(one)
            found = await one.one(KNOWN)
            assert found.same_as(scratch)
            if found.cached == HIT and await loaded(one) > before:
                return
            await asyncio.sleep(0.5)


async def loaded(one: Engine) -> float:
    await one.one(Prompt(tokens(5)))  # a step more: what the workers counted is told
    return (await one.metrics()).get("vllm:fusionx_chunks_loaded", 0)


async def spoiled(one: Engine, scratch: Answer) -> None:
    """Ask beside somebody whom all this does not concern: both get what they would get without a cache."""
    bystander = Prompt(tokens(700, seed=next(BYSTANDER_SEEDS)), "b")
    victim, other = await one.generate(KNOWN, bystander)
    assert victim.same_as(scratch)
    assert {victim.reason, other.reason} == {"length"}
    again = await one.one(bystander)
    assert again.same_as(other)


@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_a_request_that_is_lost_at_any_stage_costs_a_detour(
    gateway: Gateway, models: Models, home: Path, mode: str
) -> None:
    async with meddler(gateway.control_port) as between:
        transfer = transfer_config(between.port, load_mode=mode, **LIMITS)
        async with engine(models("llama"), home / "log", transfer) as one:
            scratch = await learn(one)
            for operation in ("lookup", "load", "hello", "store"):
                for fault in Fault:
                    await one.forget()
                    between.spoil(operation, fault)
                    await spoiled(one, scratch)
                    between.relent()
                    await finds_again(one, scratch)
            assert between.caught >= 6


@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_a_gateway_that_stands_still_dies_or_is_not_there_is_a_miss(
    models: Models, home: Path, mode: str
) -> None:
    async with serving(home / "state") as first:
        port = first.control_port
        # `fail` is vLLM's default for loads that fail; the connector sees to it that nobody's request does.
        transfer = transfer_config(port, load_mode=mode, kv_load_failure_policy="fail", **LIMITS)
        async with engine(models("llama"), home / "log", transfer) as one:
            scratch = await learn(one)
            await one.forget()
            first.process.send_signal(signal.SIGSTOP)
            await spoiled(one, scratch)
            first.process.send_signal(signal.SIGCONT)
            await finds_again(one, scratch)
            await first.end(signal.SIGKILL)
            await one.forget()
            await spoiled(one, scratch)
            async with serving(home / "state", "--port", str(port)) as second:
                await finds_again(one, scratch)
                assert await second.end() == 0


async def test_vllm_starts_and_serves_without_a_gateway_and_finds_it_when_it_comes(
    models: Models, home: Path
) -> None:
    async with serving(home / "state") as first:
        port = first.control_port
    async with engine(models("llama"), home / "log", transfer_config(port, **LIMITS)) as one:
        scratch = await one.one(KNOWN)
        assert scratch.cached == 0
        async with serving(home / "state", "--port", str(port)):
            await finds_again(one, scratch)


@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_objects_that_are_damaged_on_the_card_are_computed_and_stored_anew(
    gateway: Gateway, models: Models, home: Path, mode: str
) -> None:
    transfer = transfer_config(gateway.control_port, load_mode=mode, **LIMITS)
    async with engine(models("llama"), home / "log", transfer) as one:
        scratch = await learn(one)
        await one.forget()
        with (home / "state.img").open("r+b") as card:
            card.seek(DATA_OFFSET_AT)
            (offset,) = struct.unpack("<Q", card.read(8))
            card.seek(offset)
            card.write(b"\xa5" * (32 << 20))
        await spoiled(one, scratch)
        await finds_again(one, scratch)
