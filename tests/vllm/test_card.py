"""What is on the card comes back after a restart, for each kind of model, and gives the same as computing it."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.gateway import serving
from tests.vllm.harness import Prompt, engine, tokens, transfer_config

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from tests.vllm.conftest import Models
    from tests.vllm.harness import Engine

pytestmark = pytest.mark.vllm
CARD: Final = "1GiB"


def chunk_of(one: Engine) -> int:
    """Return what the connector says at its start of the length of one object, in tokens."""
    found = re.search(r"chunks of (\d+) tokens", one.log_text)
    assert found, one.log_tail()
    return int(found[1])


def edges(chunk: int) -> list[Prompt]:
    """Return prompts of lengths around the edges of blocks."""
    lengths = [1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 3 * chunk + 17]
    return [
        Prompt(tokens(length, seed=length), "a" if number % 2 else None)
        for number, length in enumerate(lengths)
    ]


def found_of(prompt: Prompt, chunk: int) -> int:
    """Return how much of a prompt a card that holds all of it can give: whole chunks, and never the last token."""
    return (len(prompt.tokens) - 1) // chunk * chunk


@pytest.mark.smoke
async def test_after_a_restart_the_prompt_comes_from_the_card_and_only_for_the_salt_that_stored_it(
    gateway: Gateway, models: Models, home: Path
) -> None:
    transfer = transfer_config(gateway.control_port)
    known, other = tokens(300), tokens(300, seed=1)
    async with engine(models("llama"), home / "first.log", transfer) as first:
        stored = await first.one(Prompt(known, "a"))
        assert stored.cached == 0
        assert (await first.one(Prompt(other, "b"))).cached == 0
    async with engine(models("llama"), home / "second.log", transfer) as second:
        stranger = await second.one(Prompt(known, "b"))
        owner = await second.one(Prompt(known, "a"))
        nobody = await second.one(Prompt(known))
        colleague = await second.one(Prompt(other, "b"))
    assert (stranger.cached, owner.cached, nobody.cached, colleague.cached) == (0, 256, 0, 256)
    assert owner.same_as(stored)
    assert stranger.same_as(stored)


@pytest.mark.parametrize("kind", ["llama", "gemma", "qwen3next"])
async def test_prompts_of_all_lengths_come_back_after_vllm_and_the_gateway_were_killed(
    models: Models, home: Path, kind: str
) -> None:
    async with serving(home / "state", card=CARD) as first_gateway:
        port = first_gateway.control_port
        async with engine(models(kind), home / "first.log", transfer_config(port)) as first:
            chunk = chunk_of(first)
            prompts = edges(chunk)
            stored = await first.generate(*prompts, max_tokens=4)
            assert [answer.cached for answer in stored] == [0] * len(prompts)
            # What only its own context tells apart must be told apart: a control of the comparison itself.
            last = prompts[-1]
            changed = Prompt([*last.tokens[:2], last.tokens[2] + 1, *last.tokens[3:]], last.salt)
            assert not (await first.one(changed, max_tokens=4)).same_as(stored[-1])
            await first.forget()
        await first_gateway.end(signal.SIGKILL)
    async with (
        serving(home / "state", "--port", str(port), card=CARD),
        engine(models(kind), home / "second.log", transfer_config(port)) as second,
    ):
        found = [await second.one(prompt, max_tokens=4) for prompt in prompts]
        assert [answer.cached for answer in found] == [found_of(prompt, chunk) for prompt in prompts]
        assert all(one.same_as(other) for one, other in zip(found, stored, strict=True))
        longer = [Prompt([*prompt.tokens, *tokens(50, seed=9)], prompt.salt) for prompt in prompts]
        await second.forget()
        from_card = await second.generate(*longer, max_tokens=4)
        assert sum(answer.cached for answer in from_card) > 0
    async with engine(models(kind), home / "third.log") as without:
        computed = await without.generate(*longer, max_tokens=4)
        assert all(one.same_as(other) for one, other in zip(from_card, computed, strict=True))


async def test_two_ranks_find_what_two_ranks_stored_and_one_rank_finds_nothing_of_it(
    gateway: Gateway, models: Models, home: Path
) -> None:
    transfer = transfer_config(gateway.control_port)
    prompt = Prompt(tokens(1000), "a")
    async with engine(models("llama"), home / "first.log", transfer, tensor_parallel_size=2) as first:
        stored = await first.one(prompt)
        await first.forget()
    async with engine(models("llama"), home / "second.log", transfer, tensor_parallel_size=2) as second:
        stranger = await second.one(Prompt(prompt.tokens, "b"))
        owner = await second.one(prompt)
    assert (stored.cached, stranger.cached, owner.cached) == (0, 0, 896)
    assert owner.same_as(stored)
    async with engine(models("llama"), home / "third.log", transfer) as alone:
        other = await alone.one(prompt)
    assert other.cached == 0
    assert other.same_as(stored)


@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_requests_that_are_preempted_again_and_again_get_their_answers(
    gateway: Gateway, models: Models, home: Path, mode: str
) -> None:
    transfer = transfer_config(gateway.control_port, load_mode=mode)
    prompts = [Prompt(tokens(600, seed=number), "ab"[number % 2]) for number in range(8)]
    async with engine(models("llama"), home / "roomy.log") as roomy:
        computed = await roomy.generate(*prompts, max_tokens=200)
    async with engine(
        models("llama"), home / "tight.log", transfer, num_gpu_blocks_override=24, max_model_len=1024
    ) as tight:
        for _ in range(3):
            found = await tight.generate(*prompts, max_tokens=200)
            assert all(one.same_as(other) for one, other in zip(found, computed, strict=True))
            await tight.forget()
        assert (await tight.metrics())["vllm:num_preemptions"] > 0


async def test_without_shared_memory_the_bytes_travel_in_the_messages(
    gateway: Gateway, models: Models, home: Path
) -> None:
    (home / "state" / "regions.sock").unlink()
    prompt = Prompt(tokens(1000), "a")
    async with engine(models("llama"), home / "log", transfer_config(gateway.control_port)) as one:
        stored = await one.one(prompt)
        await one.forget()
        found = await one.one(prompt)
    assert (stored.cached, found.cached) == (0, 896)
    assert found.same_as(stored)
