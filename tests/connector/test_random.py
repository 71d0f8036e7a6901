"""Any mix of requests, models, ranks and losses: nobody gets a wrong byte, nobody waits for ever, no block stays held."""

from __future__ import annotations

import random

import pytest

from tests.connector.mini_parts import MiniRequest, Status
from tests.connector.pipelined import PipelinedEngine
from tests.connector.rig import MODELS, Rig, connector, gateway
from tests.connector.test_engine import end_in_order, prompt
from tests.connector.test_faults import Faulty

CHUNK = 8
STEPS = 120
FAULTS = (
    "",
    "",
    "",
    "",
    "corrupt",
    "miss",
    "io_error",
    "wrong size",
    "refused",
    "store no_space",
    "store io_error",
)


def some_request(draw: random.Random, number: int) -> MiniRequest:
    """Prompts share beginnings, so that requests meet each other's objects."""
    text = prompt(200, seed=draw.randrange(3))[: draw.randrange(1, 130)] + prompt(
        draw.randrange(30), seed=number
    )
    return MiniRequest(
        f"q{number}",
        text,
        new_tokens=draw.randrange(1, 25),
        cache_salt=draw.choice([None, "a", "b"]),
        local_tokens=draw.choice([0, 0, 0, 16, 40]),
        kv_transfer_params=draw.choice([None, None, None, {"xkv_store": False}]),
    )


def disturb(draw: random.Random, rig: Rig, service: Faulty) -> None:
    service.fault = draw.choice(FAULTS)
    live = list(rig.engine.requests.values())
    if live and draw.random() < 0.15:
        victim = draw.choice(live)
        if victim.status is not Status.DONE:
            rig.engine.abort(victim)
    running = [one for one in rig.engine.requests.values() if one.status is Status.RUNNING]
    if running and draw.random() < 0.15:
        rig.engine.preempt(draw.choice(running))
    if draw.random() < 0.2:
        for identity in draw.sample(sorted(service.objects), min(3, len(service.objects))):
            rig.served.run(lambda identity=identity: service.objects.pop(identity, None))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens(model: str, seed: int) -> None:
    draw = random.Random(f"{model} {seed}")
    ranks, replicas = draw.choice([(1, 1), (2, 1), (4, 2)])
    sync = model == "full" and ranks == 1 and draw.random() < 0.5
    service = Faulty()
    numbers = iter(range(10_000))
    found = 0
    with gateway(service, regions=draw.random() < 0.7) as (_, served):
        for _ in range(2):
            with connector(
                service,
                served,
                MODELS[model],
                ranks=ranks,
                replicas=replicas,
                sync=sync,
                max_store_backlog_bytes=40_000,
            ) as rig:
                if model != "qwen" and draw.random() < 0.6:
                    guesses, lag = draw.choice([0, 3]), draw.random() < 0.7
                    rig.engine = PipelinedEngine(rig, guesses=guesses, lag=lag, seed=seed)
                for _ in range(STEPS):
                    if draw.random() < 0.3:
                        rig.engine.add(some_request(draw, next(numbers)))
                    rig.engine.step()
                    disturb(draw, rig, service)
                service.fault = ""
                rig.engine.settle()
                end_in_order(rig)
                assert not [line for line in rig.said if "bug" in line]
                found += rig.count("hit_tokens")
    assert found > 0
