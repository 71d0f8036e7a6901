"""A vLLM engine that does what JSON lines on standard input say; run by the interpreter that has vLLM.

`{"op": "generate", "prompts": [{"tokens", "salt", "store"}], "max_tokens": N}` answers a list of
`{"tokens", "logprobs", "cached", "reason", "seconds", "cpu_seconds"}`; `{"op": "forget"}` empties the engine's own prefix cache; `{"op": "metrics"}` answers what
vLLM counts; `{"op": "steps"}` answers `[wall seconds, seconds of the processor, requests that run]` for each step since the last time (the first
time, nothing); `{"op": "plug", "on": false}` takes the connector out of the engine, until it is put back; `{"op": "end"}` ends it in order. The first
line that it writes is `{"ready": true}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state

# Standard output is ours alone: what vLLM and its children print goes to standard error.
_OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def say(document: Any) -> None:
    _OUT.write(json.dumps(document) + "\n")
    _OUT.flush()


def generate(llm: LLM, command: dict[str, Any]) -> list[dict[str, Any]]:
    prompts, parameters = [], []
    for prompt in command["prompts"]:
        salt = prompt.get("salt")
        prompts.append(
            {"prompt_token_ids": prompt["tokens"], **({} if salt is None else {"cache_salt": salt})}
        )
        transfer = {"kv_transfer_params": {"xkv_store": prompt["store"]}} if "store" in prompt else None
        count = prompt.get("max_tokens", command.get("max_tokens", 8))
        parameters.append(
            SamplingParams(temperature=0, max_tokens=count, logprobs=0, ignore_eos=True, extra_args=transfer)
        )
    began, began_cpu = time.monotonic(), time.process_time()
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - began_cpu
    return [
        {
            "tokens": list(one.outputs[0].token_ids),
            "logprobs": [
                step[token].logprob
                for step, token in zip(one.outputs[0].logprobs, one.outputs[0].token_ids, strict=True)
            ],
            "cached": one.num_cached_tokens,
            "reason": one.outputs[0].finish_reason,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
        }
        for one in outputs
    ]


def forget(llm: LLM) -> bool:
    """Stores that are under way hold blocks; steps without requests let them go."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if llm.reset_prefix_cache():
            return True
        time.sleep(0.05)
        llm.llm_engine.step()
    return False


def metrics(llm: LLM) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        found[metric.name] = found.get(metric.name, 0) + getattr(metric, "value", 0)
    return found


class Steps:
    """Times the engine's steps."""

    def __init__(self, llm: LLM) -> None:
        self._core = llm.llm_engine.engine_core.engine_core
        self._step = self._core.step_fn
        self._core.step_fn = self._timed
        self._taken: list[tuple[float, float, int]] = []

    def _timed(self) -> Any:
        began, began_cpu = time.monotonic(), time.process_time()
        outcome = self._step()
        running = len(self._core.scheduler.running)
        self._taken.append((time.monotonic() - began, time.process_time() - began_cpu, running))
        return outcome

    def take(self) -> list[tuple[float, float, int]]:
        taken, self._taken = self._taken, []
        return taken


class Plug:
    """Takes the connector out of an idle engine, as if it had never had one, and puts it back."""

    def __init__(self, llm: LLM) -> None:
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._connector = self._scheduler.connector
        self._stats = self._scheduler.connector_prefix_cache_stats
        self._agent = kv_transfer_state._KV_CONNECTOR_AGENT

    def turn(self, *, on: bool) -> None:
        self._scheduler.connector = self._connector if on else None
        self._scheduler.connector_prefix_cache_stats = self._stats if on else None
        kv_transfer_state._KV_CONNECTOR_AGENT = self._agent if on else None


def main() -> None:
    llm = LLM(**json.loads(sys.argv[1]))
    say({"ready": True})
    plug: Plug | None = None
    steps: Steps | None = None
    for line in sys.stdin:
        command = json.loads(line)
        match command["op"]:
            case "generate":
                say(generate(llm, command))
            case "forget":
                say(forget(llm))
            case "metrics":
                say(metrics(llm))
            case "steps":
                steps = steps or Steps(llm)
                say(steps.take())
            case "plug":
                plug = plug or Plug(llm)
                plug.turn(on=command["on"])
                say(True)
            case "end":
                break
    if plug is not None:
        plug.turn(on=True)
    llm.llm_engine.engine_core.shutdown()
    say({"ended": True})


if __name__ == "__main__":
    main()
