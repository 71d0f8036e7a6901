"""What is on the card comes back after a restart, for each kind of model, and gives the same as computing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.harness import Prompt, engine, tokens, transfer_config

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from tests.vllm.conftest import Models

pytestmark = pytest.mark.vllm
ASKED = 1300


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
