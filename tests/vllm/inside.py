"""A vLLM engine that does what JSON lines on standard input say; run by the interpreter that has vLLM.

`{"op": "generate", "prompts": [{"tokens", "salt", "store"}], "max_tokens": N}` answers a list of
`{"tokens", "logprobs", "cached", "reason", "seconds", "cpu_seconds"}`; `{"op": "forget"}` empties the engine's own prefix cache; `{"op": "metrics"}` answers what
vLLM counts; `{"op": "steps"}` answers for each step since the last time (the first time, nothing) how many requests run, and seconds of the processor: in the
engine's thread, what the engine's calls of our connector took, and in all other threads, these two since the step before (requests are told to a connector between steps); `{"op": "plug", "connector": "none"}` takes the connector out of the engine, until "ours" is put back, and "idle" puts one in its
place that does nothing; `{"op": "end"}` ends it in order. The first line that it writes is `{"ready": true}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# Standard output is ours alone: what vLLM and its children print goes to standard error.
_OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


CALLS = (
    "build_connector_meta", "build_connector_worker_meta", "get_block_ids_with_load_errors", "get_kv_connector_stats", "get_num_new_matched_tokens",
    "get_transfer_results", "has_pending_push_work", "on_new_request", "request_finished_all_groups", "save_kv_layer", "start_load_kv",
    "update_connector_output", "update_state_after_alloc", "wait_for_layer_load", "wait_for_save",
)  # fmt: skip
"""What the engine calls of a connector of ours, in its steps and between them."""


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
    """Times the engine's steps, and from one's end to the next one's the calls of the connector and the other threads."""

    def __init__(self, llm: LLM) -> None:
        self._core = llm.llm_engine.engine_core.engine_core
        self._step = self._core.step_fn
        self._core.step_fn = self._timed
        self._taken: list[tuple[int, float, float, float]] = []
        self._in_calls_s = 0.0
        self._others_began_s = _others_s()
        for connector in (self._core.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT):
            for name in CALLS:
                setattr(connector, name, self._counted(getattr(connector, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            outcome = call(*args, **kwargs)
            self._in_calls_s += time.perf_counter() - began_s
            return outcome

        return counted

    def _timed(self) -> Any:
        began_s = time.thread_time()
        outcome = self._step()
        took_s = time.thread_time() - began_s
        self._taken.append((len(self._core.scheduler.running), took_s, *self._since()))
        return outcome

    def _since(self) -> tuple[float, float]:
        """Return what calls and other threads took since this was asked last."""
        others_s, calls_s = _others_s(), self._in_calls_s
        began_s, self._others_began_s, self._in_calls_s = self._others_began_s, others_s, 0.0
        return calls_s, max(0.0, others_s - began_s)

    def take(self) -> list[tuple[int, float, float, float]]:
        """Return the steps since the last time; what came behind the last of them counts to it."""
        calls_s, others_s = self._since()
        taken, self._taken = self._taken, []
        if taken:
            running, took_s, its_calls_s, its_others_s = taken[-1]
            taken[-1] = (running, took_s, its_calls_s + calls_s, its_others_s + others_s)
        return taken


def _others_s() -> float:
    """Seconds of the processor that all threads but this one have taken."""
    return time.process_time() - time.thread_time()


class Idle(KVConnectorBase_V1, SupportsHMA):
    """A connector that does nothing: what an engine pays for having one at all."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


class Plug:
    """Takes the connector out of an engine at rest, as if it had never had one, or puts another one in its place."""

    def __init__(self, llm: LLM) -> None:
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        ours = self._scheduler.connector
        of_the_worker = kv_transfer_state._KV_CONNECTOR_AGENT
        self._stats = self._scheduler.connector_prefix_cache_stats
        self._connectors = {
            "none": (None, None),
            "ours": (ours, of_the_worker),
            "idle": (
                Idle(ours._vllm_config, KVConnectorRole.SCHEDULER, ours._kv_cache_config),
                Idle(ours._vllm_config, KVConnectorRole.WORKER, ours._kv_cache_config),
            ),
        }

    def turn(self, connector: str) -> None:
        self._scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = self._connectors[connector]
        self._scheduler.connector_prefix_cache_stats = None if connector == "none" else self._stats


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
                plug.turn(command["connector"])
                say(True)
            case "end":
                break
    if plug is not None:
        plug.turn("ours")
    llm.llm_engine.engine_core.shutdown()
    say({"ended": True})


if __name__ == "__main__":
    main()
