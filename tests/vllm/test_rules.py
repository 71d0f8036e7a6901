"""Who takes part in the external cache, and with whom."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.vllm.harness import Prompt, engine, tokens, transfer_config

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from tests.vllm.conftest import Models

pytestmark = pytest.mark.vllm


async def requests_of(gateway: Gateway) -> int:
    """Return how many requests about objects the gateway has had."""
    page = (await gateway.get("/metrics")).text
    found = re.findall(r'^xkv_requests_total\{op="(?:lookup|load|store|delete)"\} (\S+)$', page, re.MULTILINE)
    assert len(found) == 4
    return int(sum(map(float, found)))


async def test_what_a_request_must_not_touch_it_does_not_touch(
    gateway: Gateway, models: Models, home: Path
) -> None:
    transfer = transfer_config(gateway.control_port, require_cache_salt=True)
    known = tokens(300)
    async with engine(models("llama"), home / "log", transfer) as one:
        unsalted = await one.one(Prompt(known))
        await one.one(Prompt(known))
        await one.one(Prompt(known, "a", store=False))
        await one.forget()
        assert await requests_of(gateway) == 0
        assert one.log_text.count("require_cache_salt keeps such requests off the card") == 1
        stored = await one.one(Prompt(known, "a"))
        await one.forget()
        before = await requests_of(gateway)
        assert before > 0
        assert (await one.one(Prompt(known, "a", store=False))).cached == 0
        await one.forget()
        assert (await one.one(Prompt(known))).cached == 0
        await one.forget()
        assert await requests_of(gateway) == before
        found = await one.one(Prompt(known, "a", store=True))
        await one.forget()
        mixed = await one.generate(Prompt(known, "a"), Prompt(known), Prompt(known, "b"))
    assert (stored.cached, found.cached, [answer.cached for answer in mixed]) == (0, 256, [256, 0, 0])
    assert all(answer.same_as(unsalted) for answer in (stored, found, *mixed))


async def test_another_namespace_or_another_fingerprint_is_another_cache(
    gateway: Gateway, models: Models, home: Path
) -> None:
    prompt = Prompt(tokens(300), "a")
    seen = []
    for number, extra in enumerate(
        [{"key_namespace": "one"}, {"key_namespace": "two"}, {"model_fingerprint": "other weights"}, {}, {"key_namespace": "one"}]
    ):  # fmt: skip
        transfer = transfer_config(gateway.control_port, **extra)
        async with engine(models("llama"), home / f"{number}.log", transfer) as one:
            seen.append((await one.one(prompt)).cached)
            await one.forget()
    assert seen == [0, 0, 0, 0, 256]


async def test_without_prefix_caching_nothing_comes_from_the_card(
    gateway: Gateway, models: Models, home: Path
) -> None:
    transfer = transfer_config(gateway.control_port)
    prompt = Prompt(tokens(300), "a")
    async with engine(models("llama"), home / "log", transfer, enable_prefix_caching=False) as one:
        first = await one.one(prompt)
        second = await one.one(prompt)
    assert first.cached == second.cached == 0
    assert second.same_as(first)
    assert await requests_of(gateway) == 0


async def test_a_setting_that_does_not_exist_ends_the_start_and_is_named(models: Models, home: Path) -> None:
    with pytest.raises(AssertionError, match="xkv_gatway_port"):
        async with engine(models("llama"), home / "log", transfer_config(1, xkv_gatway_port=1)):
            pass
