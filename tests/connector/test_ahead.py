"""A crowd of waiting prompts is asked about in few messages, and nobody is told anything wrong by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.connector.rig import FINGERPRINT, MODELS, Rig, connector, gateway
from tests.connector.test_engine import end_in_order, prompt, request
from tests.connector.test_faults import Faulty
from tests.connector.test_isolation import Listening
from tests.rpc.harness import wait_until
from xkv_rpc.messages import Lookup, LookupMode, scope_of
from xkv_vllm_connector.ahead import LIFETIME_NS, WINDOW
from xkv_vllm_connector.keys import HEAD, key_of, stem_of

if TYPE_CHECKING:
    from tests.connector.mini_parts import MiniRequest

CHUNK = 8
LONG = 3 * CHUNK + 1
CROWD = 2 * WINDOW + 50


class Clock:
    """Stands still but for what a test sets it forward, so that nothing gets old on a slow machine."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns


def told(rig: Rig, one: MiniRequest) -> tuple[int | None, bool]:
    """Ask as the engine does, step after step, until there is an answer."""
    answers: list[tuple[int | None, bool]] = []

    def answered() -> bool:
        answers.append(rig.side.match(one, 0))
        rig.side.plan({}, None)
        return answers[-1][0] is not None

    wait_until(answered, "there is an answer")
    return answers[-1]


def test_a_crowd_that_finds_nothing_is_asked_about_in_few_messages_and_each_request_once() -> None:
    service = Faulty()
    with (
        gateway(service) as (_, served),
        connector(service, served, clock=Clock(), max_store_backlog_bytes=0) as rig,
    ):
        crowd = [rig.engine.add(request(prompt(LONG, seed), "a")) for seed in range(CROWD)]
        rig.engine.settle()
        end_in_order(rig)
        assert service.lookups < CROWD / 10
        assert rig.count("lookups_ahead") + rig.count("lookups") == CROWD
        assert [one.external_total for one in crowd] == [0] * CROWD


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_a_crowd_who_has_something_gets_it_and_nobody_else(model: str, ranks: int) -> None:
    with gateway() as (service, served):
        with connector(service, served, MODELS[model], ranks=ranks) as first:
            first.engine.run(*(request(prompt(LONG, seed), "a") for seed in range(0, 40, 2)))
        with connector(service, served, MODELS[model], ranks=ranks, max_store_backlog_bytes=0) as rig:
            crowd = [
                (request(prompt(LONG, seed), salt), 3 * CHUNK * (salt == "a" and seed % 2 == 0))
                for seed in range(40)
                for salt in ("a", "b", None)
            ]
            rig.engine.run(*(one for one, _ in crowd))
            end_in_order(rig)
            assert [one.external_total for one, _ in crowd] == [expected for _, expected in crowd]
            assert rig.count("loads_failed") == 0


def test_what_is_asked_ahead_is_the_first_chunk_without_a_lease_a_message_a_tenant() -> None:
    service = Listening()
    with gateway(service) as (_, served), connector(service, served) as rig:
        crowd = [rig.engine.add(request(prompt(LONG, seed), "ab"[seed % 2])) for seed in range(6)]
        rig.side.plan({}, None)
        wait_until(lambda: len(service.heard) == 2, "a message for each tenant")
        stem = stem_of(FINGERPRINT, 0, 0)
        for tenant, asked in zip("ab", service.heard, strict=True):
            hashes = [one.block_hashes[1] for one in crowd if one.cache_salt == tenant]
            assert asked == Lookup(
                "", scope_of(tenant), [key_of(stem, 0, one) for one in hashes], LookupMode.EACH
            )


def test_no_is_believed_for_a_while_and_then_asked_again() -> None:
    clock = Clock()
    with gateway() as (service, served), connector(service, served, clock=clock) as rig:
        crowd = [rig.engine.add(request(prompt(LONG, seed))) for seed in range(3)]
        assert told(rig, crowd[0]) == (0, False)
        with connector(service, served) as other:
            other.engine.run(*(request(prompt(LONG, seed)) for seed in range(3)))
        assert told(rig, crowd[1]) == (0, False)
        clock.now_ns += LIFETIME_NS
        assert [told(rig, one) for one in crowd] == [(3 * CHUNK, True)] * 3
        rig.engine.settle()
        end_in_order(rig)


def test_what_the_engine_has_itself_is_not_taken_for_what_the_card_lacks() -> None:
    """The card has lost the beginning, which the engine has: what follows is found."""
    with gateway() as (service, served):
        with connector(service, served) as first:
            first.engine.run(*(request(prompt(LONG, seed)) for seed in range(4)))
        for identity in [one for one in service.objects if HEAD.unpack_from(one[2])[3] == 0]:
            del service.objects[identity]
        with connector(service, served) as rig:
            crowd = [request(prompt(LONG, seed), local_tokens=CHUNK * (seed % 2)) for seed in range(4)]
            rig.engine.run(*crowd)
            end_in_order(rig)
            assert [one.external_total for one in crowd] == [0, 2 * CHUNK, 0, 2 * CHUNK]


@pytest.mark.parametrize("model", ["full", "gemma"])
def test_a_crowd_that_the_engine_knows_the_beginning_of_is_asked_about_what_follows(model: str) -> None:
    """A step that has no time to wait puts all of them into one question."""
    service = Faulty()
    with gateway(service) as (_, served):
        with connector(service, served, MODELS[model]) as first:
            first.engine.run(*(request(prompt(LONG, seed)) for seed in range(0, 200, 50)))
        before = service.lookups
        with connector(
            service, served, MODELS[model], clock=Clock(), lookup_step_wait_ms=0, max_store_backlog_bytes=0
        ) as rig:
            crowd = [rig.engine.add(request(prompt(LONG, seed), local_tokens=CHUNK)) for seed in range(200)]
            rig.engine.settle()
            end_in_order(rig)
            found = [one.external_total for one in crowd]
            assert found == [2 * CHUNK if seed % 50 == 0 else 0 for seed in range(200)]
            assert service.lookups - before < 30


def test_nothing_is_asked_ahead_about_who_takes_no_part() -> None:
    service = Listening()
    with gateway(service) as (_, served), connector(service, served, require_cache_salt=True) as rig:
        crowd = [request(prompt(LONG, seed)) for seed in range(5)]
        crowd += [request(prompt(LONG, 9), "a", kv_transfer_params={"xkv_store": False}) for _ in range(5)]
        crowd += [request(prompt(CHUNK, seed), "a") for seed in range(5)]  # no chunk before the last token
        for one in crowd:
            rig.engine.add(one)
        for _ in range(3):
            rig.side.plan({}, None)
        rig.side.close()
        assert service.heard == []


@pytest.mark.parametrize("how", ["aborted", "reset"])
def test_an_answer_that_comes_too_late_is_nobodys(how: str) -> None:
    with gateway() as (service, served):
        with connector(service, served) as first:
            first.engine.run(request(prompt(LONG, 0)), request(prompt(LONG, 1)))
        with connector(service, served, clock=Clock(), max_store_backlog_bytes=0) as rig:
            crowd = [rig.engine.add(request(prompt(LONG, seed))) for seed in range(5)]
            service.hold = True
            rig.side.plan({}, None)
            wait_until(
                lambda: any(isinstance(call.request, Lookup) for call in service.held),
                "the question has come",
            )
            service.hold = False
            if how == "aborted":
                for one in crowd[1:]:
                    rig.engine.abort(one)
            else:
                rig.side.renew(bytes(range(50, 66)))
            served.run(lambda: [service.answer(call) for call in service.held])
            rig.engine.settle()
            end_in_order(rig)
            assert crowd[0].external_total == (3 * CHUNK if how == "aborted" else 0)


def test_while_the_gateway_is_away_a_crowd_goes_on_without_it() -> None:
    with gateway() as (service, served):
        pass
    with connector(service, served) as rig:
        crowd = [rig.engine.add(request(prompt(LONG, seed))) for seed in range(CROWD)]
        rig.engine.settle()
        end_in_order(rig)
        assert [one.external_total for one in crowd] == [0] * CROWD
        assert rig.count("lookups") + rig.count("lookups_ahead") < CROWD
        assert len(rig.said) == 1
