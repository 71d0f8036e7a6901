"""Failure is always a miss: nobody waits for ever, nobody gets wrong tokens, and nobody is asked the same twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.connector.mini_parts import Status
from tests.connector.rig import FULL, MODELS, connector, gateway
from tests.connector.test_boundaries import drop
from tests.connector.test_engine import end_in_order, prompt, request
from tests.rpc.harness import DictService, wait_until
from xkv_rpc.errors import ErrorCode, RpcError
from xkv_rpc.messages import Hello, Load, LoadReply, Lookup, Store, StoreReply
from xkv_vllm_connector.requests import State

if TYPE_CHECKING:
    from xkv_rpc.server import Call

CHUNK = 8
LONG = 10 * CHUNK + 1


REFUSED_LOADS = ("corrupt", "io_error", "miss")
REFUSED_STORES = ("no_space", "over_quota", "cancelled", "io_error")


class Faulty(DictService):
    """A service that answers some operations otherwise, or late."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = 0
        self.lookups = 0
        self.fault: str = ""
        self.late: list[tuple[Call, Any]] = []

    def answer(self, call: Call) -> None:
        if self.fault == "all forbidden" and not isinstance(call.request, Hello):
            raise RpcError(ErrorCode.FORBIDDEN, "not your namespace", field="ns")
        match call.request:
            case Lookup():
                self.lookups += 1
                if self.fault == "lookup hangs":
                    return
            case Load() as load:
                self.loads += 1
                if self._load_fails(call, load):
                    return
            case Store() as store:
                if self.fault == "store hangs":
                    self._put_off(call, store.region)
                    return
                if self.fault.startswith("store "):
                    call.reply(StoreReply([self.fault.removeprefix("store ")] * len(store.keys)))
                    return
            case _:
                pass
        super().answer(call)

    def _load_fails(self, call: Call, load: Load) -> bool:
        match self.fault:
            case "load hangs":
                self._put_off(call, load.region)
            case "second corrupt" if self.loads == 2:
                call.reply(LoadReply(["corrupt"] * len(load.keys), [None] * len(load.keys)))
            case "corrupt" | "io_error" | "miss":
                good = len(load.keys) - 1
                call.reply(LoadReply(["ok"] * good + [self.fault], [*load.lengths[:good], None]))
            case "wrong size":
                call.reply(LoadReply(["ok"] * len(load.keys), [47] * len(load.keys)))
            case "refused":
                raise RpcError(ErrorCode.BUSY, "queues are full")
            case _:
                return False
        return True

    def _put_off(self, call: Call, token: bytes | None) -> None:
        assert self.regions is not None
        assert token is not None
        region = self.regions.find(token)
        region.pin()
        self.late.append((call, region))

    def answer_late(self) -> None:
        """Carry out what was put off, in the memory that it named, as I/O does that was under way."""
        regions = self.regions
        for call, region in self.late:
            self.regions = SimpleNamespace(find=lambda _, region=region: region)  # type: ignore[assignment]
            super().answer(call)
            region.unpin()
        self.regions = regions
        self.late = []


def stored(service: DictService, served: Any, model: str = "full", **more: Any) -> None:
    with connector(service, served, MODELS[model], **more) as first:
        first.engine.run(request(prompt(LONG)))
        end_in_order(first)


@pytest.mark.parametrize("fault", [*REFUSED_LOADS, "wrong size", "refused"])
@pytest.mark.parametrize("sync", [False, True])
def test_a_load_that_fails_is_computed_and_not_offered_again(fault: str, *, sync: bool) -> None:
    service = Faulty()
    with gateway(service) as (_, served):
        stored(service, served)
        with connector(service, served, sync=sync) as rig:
            service.fault = fault
            asked, other = request(prompt(LONG)), request(prompt(LONG, seed=7))
            rig.engine.run(asked, other)
            end_in_order(rig)
            assert asked.external_total == 10 * CHUNK
            assert service.loads == 1
            assert rig.count("loads_failed") == 1
            assert other.external_total == 0
            service.fault = ""
            later = request(prompt(LONG))
            rig.engine.run(later)
            assert later.external_total == 10 * CHUNK
            assert rig.count("loads_failed") == 1


def test_a_load_that_never_ends_is_given_up_in_time_and_what_comes_late_touches_nothing() -> None:
    service = Faulty()
    with gateway(service) as (_, served):
        stored(service, served)
        with connector(service, served, load_timeout_ms=1500) as rig:
            service.fault = "load hangs"
            asked = request(prompt(LONG))
            rig.engine.run(asked)
            assert rig.count("loads_failed") == 1
            service.fault = ""
            # The bytes of the call that was given up come now, into the memory that it named.
            served.run(service.answer_late)
            wait_until(lambda: rig.lookups.available or _probe(rig), "the gateway is found again")
            later = request(prompt(LONG))
            rig.engine.run(later)
            assert later.external_total == 10 * CHUNK
            end_in_order(rig)


def _probe(rig: Any) -> bool:
    rig.engine.run(request(prompt(CHUNK + 1, seed=99)))
    return bool(rig.lookups.available)


@pytest.mark.parametrize("lost", ["one rank's part", "one rank's connection"])
@pytest.mark.parametrize("model", MODELS)
def test_one_ranks_failure_fails_the_load_in_all_ranks(model: str, lost: str) -> None:
    with gateway() as (service, served):
        stored(service, served, model, ranks=4)
        with connector(service, served, MODELS[model], ranks=4) as rig:
            asked = rig.engine.add(request(prompt(LONG)))
            # The hit is found; what is lost is lost before it is loaded.
            wait_until(lambda: rig.side.match(asked, 0) == (10 * CHUNK, True), "it is found")
            if lost == "one rank's part":
                assert drop(service, rank=2, chunk=9) > 0
            else:
                rig.workers[3]._load_channel._client.close()
            rig.engine.settle()
            assert rig.count("loads_failed") == 1
            assert asked.external_total == 10 * CHUNK
            end_in_order(rig)


@pytest.mark.parametrize("sync", [False, True])
def test_a_load_that_fails_when_half_of_it_is_there_leaves_nothing_of_it(*, sync: bool) -> None:
    service = Faulty()
    chunks = 200  # more than one message brings
    with gateway(service) as (_, served):
        with connector(service, served) as first:
            first.engine.run(request(prompt(chunks * CHUNK + 1)))
        with connector(service, served, sync=sync) as rig:
            service.fault = "second corrupt"
            asked, other = request(prompt(chunks * CHUNK + 1)), request(prompt(LONG, seed=7))
            rig.engine.run(asked, other)
            end_in_order(rig)
            assert service.loads == 2
            assert rig.count("loads_failed") == 1
            assert asked.external_total == chunks * CHUNK


def test_without_a_gateway_the_engine_starts_and_serves() -> None:
    with gateway() as (service, served):
        pass
    with connector(service, served, lookup_step_wait_ms=1000) as rig:
        requests = [request(prompt(LONG, seed)) for seed in range(20)]
        rig.engine.run(*requests)
        end_in_order(rig)
        assert rig.count("lookups_failed") >= 1
        assert rig.count("lookups") < 20
        assert any("does not answer" in line for line in rig.said)
        assert len(rig.said) == 1


def test_a_gateway_that_hangs_holds_up_no_step_and_is_found_again() -> None:
    service = Faulty()
    with gateway(service) as (_, served):
        stored(service, served)
        service.fault = "lookup hangs"
        with connector(service, served, lookup_step_wait_ms=1, lookup_timeout_ms=100) as rig:
            requests = [rig.engine.add(request(prompt(LONG, seed))) for seed in range(256)]
            before = service.lookups
            rig.engine.settle()
            assert service.lookups - before <= 4
            assert all(one.external_total == 0 for one in requests)
            assert not rig.lookups.available
            service.fault = ""
            wait_until(lambda: rig.lookups.available or _probe(rig), "the gateway is found again")
            assert "the gateway answers again" in rig.said


@pytest.mark.parametrize("requests", [1, 20])
def test_a_gateway_that_refuses_is_quoted_once_and_costs_nobody_anything(requests: int) -> None:
    service = Faulty()
    with gateway(service) as (_, served), connector(service, served) as rig:
        service.fault = "all forbidden"
        asked = [request(prompt(LONG, seed)) for seed in range(requests)]
        rig.engine.run(*asked)
        end_in_order(rig)
        assert [one.external_total for one in asked] == [0] * requests
        assert rig.lookups.available
        assert sorted(line.partition(",")[0] for line in rig.said) == [
            "the gateway refuses to be asked",
            "the gateway takes no stores",
        ]
        assert all("forbidden (ns): not your namespace" in line for line in rig.said)
        service.fault = ""
        rig.engine.run(request(prompt(LONG, 0)))
        assert rig.count("chunks_stored") == 10


@pytest.mark.parametrize("fault", REFUSED_STORES)
def test_what_the_gateway_does_not_take_is_counted_and_offered_again_by_the_next_request(fault: str) -> None:
    service = Faulty()
    with gateway(service) as (_, served), connector(service, served) as rig:
        service.fault = f"store {fault}"
        rig.engine.run(request(prompt(LONG)))
        end_in_order(rig)
        assert rig.count("chunks_refused") == 10
        assert rig.count("chunks_stored") == 0
        service.fault = ""
        rig.engine.run(request(prompt(LONG)))
        assert rig.count("chunks_stored") == 10


def test_a_store_without_an_answer_lets_its_blocks_go_and_its_memory_is_not_used_again() -> None:
    service = Faulty()
    with gateway(service) as (_, served), connector(service, served, store_timeout_ms=100) as rig:
        service.fault = "store hangs"
        rig.engine.run(request(prompt(LONG)))
        end_in_order(rig)
        assert rig.count("stores_failed") >= 1
        service.fault = ""
        wait_until(lambda: rig.lookups.available or _probe(rig), "the gateway is found again")
        rig.engine.run(request(prompt(LONG, seed=3)))
        # The gateway reads what it was told to keep only now: it must not find another object's bytes there.
        served.run(service.answer_late)
        later = request(prompt(LONG))
        rig.engine.run(later)
        end_in_order(rig)


def test_stores_are_put_off_when_too_much_waits_and_loads_never_are() -> None:
    service = Faulty()
    chunk_bytes = 2 * 48
    with gateway(service) as (_, served):
        stored(service, served)
        service.fault = "store hangs"
        with connector(
            service, served, max_store_backlog_bytes=3 * chunk_bytes, store_timeout_ms=20_000
        ) as rig:
            slow = rig.engine.add(request(prompt(LONG, seed=5)))
            while slow.request_id in rig.engine.requests:
                rig.engine.step()
            assert rig.stores.backlog_bytes <= 3 * chunk_bytes
            assert rig.count("stores_put_off") >= 1
            assert rig.count("chunks_shed") >= 1
            asked = rig.engine.add(request(prompt(LONG)))
            while asked.request_id in rig.engine.requests:
                rig.engine.step()
            assert asked.external_total == 10 * CHUNK
            wait_until(lambda: bool(service.late), "the store has come")
            service.fault = ""
            served.run(service.answer_late)
            rig.engine.settle()
            end_in_order(rig)


@pytest.mark.parametrize("when", ["waiting", "offered", "remote", "running"])
def test_an_abort_in_any_state_frees_everything_exactly_once(when: str) -> None:
    service = Faulty()
    with gateway(service) as (_, served):
        stored(service, served)
        with connector(service, served) as rig:
            asked = rig.engine.add(request(prompt(LONG), new_tokens=100))
            if when == "offered":
                assert rig.side.match(asked, 0)[0] == 10 * CHUNK
            if when == "remote":
                service.fault = "load hangs"
                rig.engine.step()
                assert asked.status is Status.REMOTE
            if when == "running":
                while len(asked.output) < 3:
                    rig.engine.step()
            rig.engine.abort(asked)
            if when == "remote":
                assert rig.side._leaving[asked.request_id].state is State.LEAVING
                wait_until(lambda: bool(service.late), "the load has come")
                served.run(service.answer_late)
            rig.engine.settle()
            end_in_order(rig)
            assert not rig.side._leaving


def test_a_request_that_is_preempted_is_asked_for_again_and_its_blocks_under_way_are_safe() -> None:
    with gateway() as (service, served):
        stored(service, served)
        with connector(service, served, MODELS["full"]) as rig:
            asked = rig.engine.add(request(prompt(LONG), new_tokens=40))
            while len(asked.output) < 20:
                rig.engine.step()
            assert asked.external == 10 * CHUNK
            rig.engine.preempt(asked)
            rig.engine.settle()
            assert asked.external_total >= 2 * 10 * CHUNK
            end_in_order(rig)


def test_after_a_failed_synchronous_load_nothing_of_that_step_is_kept() -> None:
    service = Faulty()
    with gateway(service) as (_, served):
        stored(service, served)
        before = set(service.objects)
        with connector(service, served, FULL, sync=True) as rig:
            service.fault = "corrupt"
            # The rest of the prompt is computed in the same step, on what was not loaded.
            asked = request(prompt(LONG) + prompt(3 * CHUNK, seed=4))
            rig.engine.run(asked)
            end_in_order(rig)
            service.fault = ""
            assert rig.count("loads_failed") == 1
        new = set(service.objects) - before
        assert len(new) == 3
        with connector(service, served, FULL) as rig:
            again = request(prompt(LONG) + prompt(3 * CHUNK, seed=4))
            rig.engine.run(again)
            assert again.external_total == 13 * CHUNK
