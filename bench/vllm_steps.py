"""What the connector costs a real vLLM where it finds nothing: its steps with and without, in turns, in one engine.

1,000 requests at once on a tiny model on the CPU, prompts of 140 tokens that nobody has asked before, 64 new tokens each: first the
steps that admit them, then those in which all of them run. The engine has a core to itself and the gateway another. In every other
batch the connector is taken out of the engine: engines in two processes differ by more than what is measured here.

(a) Asking: nothing is stored (no backlog is allowed), so that the difference is the price of finding nothing.
(b) Storing: every prompt's chunk is stored, as it is for users; the time until the last is stored is counted in.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.e2e.gateway import serving
from tests.vllm.harness import Prompt, engine, tokens, transfer_config

from bench.harness import BenchError, at_most, work_folder
from bench.vllm_ttft import build_model, need_vllm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.vllm.harness import Engine

REQUESTS: Final = 1000
ALL: Final = 0.97
"""A step in which at least this share of the requests runs is one in which all run."""
PROMPT_TOKENS: Final = 140
NEW_TOKENS: Final = 64
ROUNDS: Final = 10
STORING_ROUNDS: Final = 5
ADDED_PERCENT_MAX: Final = 1.0


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    need_vllm(argv)
    with work_folder() as folder:
        model = build_model("llama", folder)
        asking = asyncio.run(_added(folder, model, ROUNDS, max_store_backlog_bytes=0))
        storing = asyncio.run(_added(folder, model, STORING_ROUNDS))
    return {
        "asking_added_percent": asking,
        "storing_added_percent": storing,
        "bars": [
            at_most("miss path, added to a step's CPU time, %", asking["step_cpu least"], ADDED_PERCENT_MAX),
            at_most(
                "miss path, added to a full step's CPU time, %", asking["full_cpu least"], ADDED_PERCENT_MAX
            ),
        ],
    }


async def _added(folder: Path, model: Path, rounds: int, **settings: int) -> dict[str, float]:
    """Return what the connector adds, in percent: from the median of the rounds' ratios, and from the least of each side.

    Whatever else runs on the machine only ever adds to a time, so the least of several rounds is the steadier figure.
    """
    more = {"max_num_seqs": REQUESTS, "max_model_len": 256}
    rounds_of: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    state = folder / f"state-{rounds}"
    async with serving(state, card="8GiB") as gateway:
        transfer = transfer_config(gateway.control_port, **settings)
        async with engine(model, state / "log", transfer, **more) as one:
            _pin(gateway.process.pid, 1)
            _pin(one.process.pid, 0)
            await one.steps()
            for number in range(-1, rounds):
                for on in (True, False) if number % 2 else (False, True):
                    await one.plug(on=on)
                    taken = await _batch(one, 2 * (number + 1) + on)
                    if number >= 0:  # the first warms up
                        rounds_of[on].append(taken)
    return _compared(rounds_of[True], rounds_of[False])


def _compared(having: list[dict[str, float]], lacking: list[dict[str, float]]) -> dict[str, float]:
    added = {}
    for name in having[0]:
        ones, others = [one[name] for one in having], [one[name] for one in lacking]
        ratios = [one / other for one, other in zip(ones, others, strict=True)]
        added[f"{name} median"] = 100 * (statistics.median(ratios) - 1)
        added[f"{name} least"] = 100 * (min(ones) / min(others) - 1)
    return added


async def _batch(one: Engine, number: int) -> dict[str, float]:
    """Return times of one batch: mean step, mean step in which all run, and all in all until nothing is left to store."""
    seeds = range(number * REQUESTS, (number + 1) * REQUESTS)
    prompts = [Prompt(tokens(PROMPT_TOKENS, seed), "a") for seed in seeds]
    answers = await one.generate(*prompts, max_tokens=NEW_TOKENS)
    steps = await one.steps()
    await one.forget()
    after = sum(cpu for _, cpu, _ in await one.steps())
    full = [step for step in steps if step[2] >= ALL * REQUESTS]
    if not full:
        raise BenchError("the requests never ran all at once: is the machine busy?")
    return {
        "step_wall": statistics.fmean(wall for wall, _, _ in steps),
        "step_cpu": statistics.fmean(cpu for _, cpu, _ in steps),
        "full_wall": statistics.fmean(wall for wall, _, _ in full),
        "full_cpu": statistics.fmean(cpu for _, cpu, _ in full),
        "all_cpu": answers[0].cpu_seconds + after,
    }


def _pin(process: int, core: int) -> None:
    """Keep a process on one core, where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[core % len(cores)]})
