"""What the connector costs a real vLLM where it finds nothing: its steps with and without, in turns, in one engine.

1,000 requests at once on a tiny model on the CPU, prompts of 140 tokens that nobody has asked before, 64 new tokens each: first the
steps that admit them, then those in which all of them run, then those in which they end. The engine's thread has a core to itself; the gateway and
all other threads of the engine have the other one. In one engine, because two processes differ by more than what is measured here, and in a
random order of three:

    none    the engine without a connector
    idle    with one that does nothing: what vLLM itself charges for having any
    ours

(a) Asking: nothing is stored (no backlog is allowed), so that the difference is the price of finding nothing.
(b) Storing: every prompt's chunk is stored, as it is for users; the time until the last is stored is counted in.

What the engine's calls of the connector take, in its steps and where requests are told to it between steps, and what its threads take is added up, and is
the figure with the bar: it does not depend on what else the machine does. What the engine takes with it and without is told as well; there every batch has
the same steps, so step is compared with step: the median of its times over the rounds, summed over the steps. The interval is that of 95 % of bootstrap draws of rounds.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tests.e2e.gateway import serving
from tests.vllm.harness import Prompt, Step, engine, tokens, transfer_config

from bench.harness import BenchError, at_most, work_folder
from bench.vllm_ttft import build_model, need_vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.vllm.harness import Engine

    Connector = Literal["none", "idle", "ours"]

REQUESTS: Final = 1000
ALL: Final = 0.97
"""A step in which at least this share of the requests runs is one in which all run."""
PROMPT_TOKENS: Final = 140
NEW_TOKENS: Final = 64
ROUNDS: Final = 14
STORING_ROUNDS: Final = 5
DRAWS: Final = 500
ADDED_PERCENT_MAX: Final = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """The steps, and seconds of the processor all in all until nothing was left to store."""

    steps: tuple[Step, ...]
    all_s: float


Batches = dict["Connector", list[Batch]]


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    need_vllm(argv)
    with work_folder() as folder:
        model = build_model("llama", folder)
        asking = asyncio.run(
            _batches(folder, model, ROUNDS, ("none", "idle", "ours"), max_store_backlog_bytes=0)
        )
        storing = asyncio.run(_batches(folder, model, STORING_ROUNDS, ("none", "ours")))
    results: dict[str, Any] = {
        f"asking, {steps}": {
            "ours over none, %": _added(asking, "ours", "none", of),
            "ours over idle, %": _added(asking, "ours", "idle", of),
            "idle over none, %": _added(asking, "idle", "none", of),
        }
        for steps, of in STEPS.items()
    }
    results["storing, until all is stored"] = {
        "ours over none, %": 100 * (_all_s(storing["ours"]) / _all_s(storing["none"]) - 1)
    }
    results["bars"] = []
    for steps, of in STEPS.items():
        calls, threads = _own(asking, of)
        results[f"asking, {steps}"] |= {"own calls, %": calls, "own threads, %": threads}
        name = f"miss path, {steps}: own calls and threads, %"
        results["bars"].append(at_most(name, calls + threads, ADDED_PERCENT_MAX))
    return results


async def _batches(
    folder: Path, model: Path, rounds: int, connectors: tuple[Connector, ...], **settings: int
) -> Batches:
    """Run batches with each of these connectors, in random order."""
    more: dict[str, Any] = {"max_num_seqs": REQUESTS, "max_model_len": 256}
    found: Batches = {connector: [] for connector in connectors}
    rng = random.Random(rounds)
    async with serving(folder / f"state-{rounds}", card="8GiB") as gateway:
        transfer = transfer_config(gateway.control_port, **settings)
        async with engine(model, folder / "log", transfer, **more) as one:
            await one.steps()
            number = 0
            for counted in (False, *[True] * rounds):  # the first warms up
                for connector in rng.sample(connectors, len(connectors)):
                    await one.plug(connector)
                    _pin(gateway.process.pid, one.process.pid)
                    batch = await _batch(one, number)
                    number += 1
                    if counted:
                        found[connector].append(batch)
    return found


async def _batch(one: Engine, number: int) -> Batch:
    seeds = range(number * REQUESTS, (number + 1) * REQUESTS)
    prompts = [Prompt(tokens(PROMPT_TOKENS, seed), "a") for seed in seeds]
    answers = await one.generate(*prompts, max_tokens=NEW_TOKENS)
    steps = await one.steps()
    await one.forget()
    after_s = sum(step.engine_s + step.others_s for step in await one.steps())
    return Batch(tuple(steps), answers[0].cpu_seconds + after_s)


def _every(batch: Batch) -> tuple[Step, ...]:
    return batch.steps


def _full(batch: Batch) -> tuple[Step, ...]:
    """The steps in which all requests run, without the first, which still admits some."""
    full = tuple(step for step in batch.steps if step.running >= ALL * REQUESTS)[1:]
    if not full:
        raise BenchError("the requests never ran all at once: is the machine busy?")
    return full


STEPS: Final = {"all steps": _every, "1,000 run": _full}


def _added(
    batches: Batches, one: Connector, other: Connector, of: Callable[[Batch], tuple[Step, ...]]
) -> dict[str, float]:
    """What `one` adds to `other`, in percent, and the interval of that."""
    ones, others = (
        [tuple(step.engine_s for step in of(batch)) for batch in batches[each]] for each in (one, other)
    )
    if len({len(steps) for steps in ones + others}) != 1:
        raise BenchError("the batches have not the same steps: is the machine busy?")
    rng, rounds = random.Random(1), range(len(ones))

    def added(chosen: Sequence[int]) -> float:
        return 100 * (_typical([ones[at] for at in chosen]) / _typical([others[at] for at in chosen]) - 1)

    draws = sorted(added(rng.choices(rounds, k=len(ones))) for _ in range(DRAWS))
    return {"median": added(rounds), "from": draws[DRAWS // 40], "to": draws[-1 - DRAWS // 40]}


def _own(batches: Batches, of: Callable[[Batch], tuple[Step, ...]]) -> tuple[float, float]:
    """What the calls of the connector take, and its threads, in percent of the steps without one."""

    def taken_s(connector: Connector, value: Callable[[Step], float]) -> float:
        return statistics.median(sum(map(value, of(batch))) for batch in batches[connector])

    steps_s = taken_s("none", lambda step: step.engine_s)
    # The engine has threads of its own, too.
    threads_s = taken_s("ours", lambda step: step.others_s) - taken_s("none", lambda step: step.others_s)
    return 100 * taken_s("ours", lambda step: step.calls_s) / steps_s, 100 * threads_s / steps_s


def _typical(batches: Sequence[tuple[float, ...]]) -> float:
    """The time of a batch each of whose steps takes its median."""
    return sum((statistics.median(times) for times in zip(*batches, strict=True)), 0.0)


def _all_s(batches: Sequence[Batch]) -> float:
    return statistics.median(batch.all_s for batch in batches)


def _pin(gateway: int, one: int) -> None:
    """Give the engine's thread a core of its own, where there are several; all other threads get another."""
    cores = sorted(os.sched_getaffinity(0))
    for process in (gateway, one):
        for task in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(task.name), {cores[0] if int(task.name) == one else cores[-1]})
