"""What the card is worth to a real vLLM on this machine's CPU.

Time to the first token of prompts of 3,000 tokens, after a restart of vLLM: from the card, in turns with new prompts of the same
length. The model is built here (random weights); its prefill of 3,000 tokens takes more than a second.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
from typing import TYPE_CHECKING, Any, Final

from tests.e2e.gateway import serving
from tests.vllm.environment import interpreter, why_not
from tests.vllm.harness import HERE, Prompt, engine, tokens, transfer_config

from bench.harness import BenchError, at_least, at_most, work_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


PROMPT_TOKENS: Final = 3000
FOUND_TOKENS: Final = 2944
PROMPTS: Final = 6
SHARE_MAX: Final = 1 / 3
SCRATCH_S_MIN: Final = 1.0
BUILD_S: Final = 300


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    need_vllm(argv)
    with work_folder() as folder:
        scratch_s, card_s, loads = asyncio.run(_first_tokens(folder))
    share = statistics.median(card_s) / statistics.median(scratch_s)
    return {
        "first_token_scratch_ms": _milliseconds(scratch_s),
        "first_token_card_ms": _milliseconds(card_s),
        "loads_at_the_gateway": loads,
        "bars": [
            at_most("first token from the card / from scratch", share, SHARE_MAX),
            at_least("prefill from scratch, s", statistics.median(scratch_s), SCRATCH_S_MIN),
        ],
    }


def need_vllm(argv: Sequence[str]) -> None:
    """See that there is a vLLM, and that nothing else was asked for.

    Raises:
        BenchError: it cannot run.
    """
    if argv:
        raise BenchError("takes no arguments")
    reason = why_not()
    if reason is not None:
        raise BenchError(reason)


def build_model(kind: str, folder: Path) -> Path:
    """Build a model with random weights; return its folder."""
    path = folder / kind
    subprocess.run([interpreter(), HERE / "models.py", kind, path], check=True, capture_output=True, timeout=BUILD_S)  # fmt: skip
    return path


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        "p50": 1e3 * statistics.median(seconds),
        "least": 1e3 * min(seconds),
        "most": 1e3 * max(seconds),
    }


async def _first_tokens(folder: Path) -> tuple[list[float], list[float], int]:
    """Return times from scratch, times from the card, and the load messages that the gateway counted."""
    model = build_model("heavy", folder)
    known = [Prompt(tokens(PROMPT_TOKENS, seed), "a") for seed in range(PROMPTS)]
    scratch_s: list[float] = []
    card_s: list[float] = []
    async with serving(folder / "state", card="4GiB") as gateway:
        transfer = transfer_config(gateway.control_port)
        async with engine(model, folder / "first.log", transfer, dtype="bfloat16") as first:
            scratch_s += [(await first.one(prompt, 1)).seconds for prompt in known]
            await first.forget()
        async with engine(model, folder / "second.log", transfer, dtype="bfloat16") as second:
            for number, prompt in enumerate(known):
                found = await second.one(prompt, 1)
                if found.cached != FOUND_TOKENS:
                    raise BenchError(f"{found.cached} tokens came from the card, not {FOUND_TOKENS}")
                card_s.append(found.seconds)
                new = Prompt(tokens(PROMPT_TOKENS, PROMPTS + number), "a")
                scratch_s.append((await second.one(new, 1)).seconds)
        page = (await gateway.get("/metrics")).text
    row = next(line for line in page.splitlines() if line.startswith('xkv_requests_total{op="load"}'))
    return scratch_s, card_s, int(float(row.split()[-1]))
