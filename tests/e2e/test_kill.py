"""The gateway is killed again and again under load: what it acknowledged is there, what it deleted is not."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.gateway import COMMAND, environment, run, serve_arguments, serving
from tests.e2e.killing import Crowd
from tests.e2e.target import target
from xkv_gateway.errors import ExitCode

if TYPE_CHECKING:
    import contextlib
    from pathlib import Path

    from tests.e2e.gateway import Gateway

CARD = "64MiB"
"""Small, so that the journal's ring is run through many times, with a checkpoint every few dozen batches."""
SHORT = {"XKV_NVME__KEEP_ALIVE_MS": "1000", "XKV_NVME__COMMAND_TIMEOUT_MS": "1000"}
ANSWERS_MAX = 60
STILLBIRTH = 0.15
"""Share of the rounds in which a start is killed as well, before it serves."""
CARD_TOO = 0.15
"""Share of the rounds in which the soft card's process dies at the same moment."""


async def killed_while_starting(home: Path, delay_s: float) -> None:
    """Start a gateway and kill it after a moment."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *serve_arguments(home / "state", CARD),
        env=environment(home),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(delay_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def serving_again(home: Path, card: str | None) -> contextlib.AbstractAsyncContextManager[Gateway]:
    """Start a gateway on the soft card, or on the card that the URL names."""
    if card is None:
        return serving(home / "state", card=CARD)
    return serving(home / "state", "--card", card, card=None, **SHORT)


async def play(home: Path, seed: int, rounds: int, card: str | None = None) -> Crowd:
    """Kill the gateway `rounds` times; after each, look at every key."""
    crowd = Crowd(seed, workers=4)
    for number in range(rounds):
        async with serving_again(home, card) as gateway:
            await crowd.verify(gateway)
            assert crowd.wrong == [], f"seed {seed}, round {number}"
            status = await gateway.until(lambda status: status["card"]["state"] == "online")
            clients = await crowd.busy_until(gateway, crowd.rng.randint(1, ANSWERS_MAX))
            gateway.process.kill()
            if card is None and crowd.rng.random() < CARD_TOO:
                os.kill(status["card"]["soft_card"]["pid"], signal.SIGKILL)
            await gateway.process.wait()
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            assert "Traceback" not in gateway.log_text
        if card is None and crowd.rng.random() < STILLBIRTH:
            await killed_while_starting(home, crowd.rng.uniform(0.3, 1.0))
    async with serving_again(home, card) as gateway:
        await crowd.verify(gateway)
    return crowd


async def test_what_was_acknowledged_survives_20_kills_and_what_was_deleted_stays_deleted(home: Path) -> None:
    crowd = await play(home, seed=1, rounds=20)
    assert crowd.wrong == []
    assert crowd.acknowledged > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
async def test_what_was_acknowledged_survives_200_kills(home: Path, seed: int) -> None:
    crowd = await play(home, seed, rounds=50)
    assert crowd.wrong == []


@pytest.mark.slow
async def test_what_was_acknowledged_survives_kills_on_a_card_that_lives_on(home: Path) -> None:
    async with target(home / "card.img", CARD) as url:
        assert (await run(home, "card", "format", url)).code == ExitCode.OK
        crowd = await play(home, seed=7, rounds=15, card=url)
        assert crowd.wrong == []
