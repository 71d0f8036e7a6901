"""What gathers while a store is under way goes together; what two requests have in common is stored once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.connector.rig import MODELS, connector, gateway
from tests.connector.test_engine import end_in_order, prompt, request
from tests.connector.test_faults import Faulty
from tests.rpc.harness import wait_until
from xkv_rpc.messages import Store, StoreReply

if TYPE_CHECKING:
    from xkv_rpc.server import Call

CHUNK = 8
LONG = 2 * CHUNK + 1


class Counting(Faulty):
    """Counts messages that store; keys in `refused` it does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.stores: list[list[bytes]] = []
        self.refused: set[bytes] = set()

    def answer(self, call: Call) -> None:
        if isinstance(call.request, Store):
            self.stores.append(call.request.keys)
            if self.refused:
                call.reply(
                    StoreReply(["no_space" if key in self.refused else "stored" for key in call.request.keys])
                )
                return
        super().answer(call)


def test_jobs_that_gather_go_in_one_message_a_tenant_and_a_common_object_goes_once() -> None:
    service = Counting()
    with gateway(service) as (_, served), connector(service, served, MODELS["gemma"], ranks=2) as rig:
        service.fault = "store hangs"
        rig.engine.add(request(prompt(LONG, 99), "a"))
        while len(service.late) < 2:
            rig.engine.step()
        # Two of each: they are computed side by side, so that both want to store the same.
        for seed in range(4):
            for _ in range(2):
                rig.engine.add(request(prompt(LONG, seed), "ab"[seed % 2]))
        while rig.engine.requests:
            rig.engine.step()
        service.fault = ""
        began = len(service.stores)
        served.run(service.answer_late)
        rig.engine.settle()
        end_in_order(rig)
        # Two ranks with a message for each tenant; three groups, two chunks and two prompts in each.
        rest = service.stores[began:]
        assert [len(keys) for keys in rest] == [12] * 4
        assert rig.count("chunks_stored") == 2 * 3 * 2 * 5
        assert rig.count("stores_failed") == 0
        assert rig.count("chunks_refused") == 0
    with gateway(service) as (_, served), connector(service, served, MODELS["gemma"], ranks=2) as rig:
        again = [request(prompt(LONG, seed), "ab"[seed % 2]) for seed in range(4)]
        rig.engine.run(*again)
        assert [one.external_total for one in again] == [2 * CHUNK] * 4


def test_of_jobs_that_go_together_only_those_fail_whose_objects_were_not_taken() -> None:
    service = Counting()
    with gateway(service) as (_, served), connector(service, served) as rig:
        service.fault = "store hangs"
        rig.engine.add(request(prompt(LONG, 99)))
        while not service.late:
            rig.engine.step()
        asked = [rig.engine.add(request(prompt(LONG, seed))) for seed in range(3)]
        while rig.engine.requests:
            rig.engine.step()
        service.fault = ""
        served.run(service.answer_late)
        refused = asked[1].block_hashes[3]
        rig.engine.settle()
        assert rig.count("stores_failed") == 0
        service.refused = {key for key in service.stores[-1] if key.endswith(refused)}
        assert len(service.refused) == 1
        rig.stores.forget()
        service.objects.clear()
        rig.engine.run(*(request(prompt(LONG, seed)) for seed in range(3)))
        end_in_order(rig)
        assert rig.count("stores_failed") == 1
        assert rig.count("chunks_refused") == 1
        known = [one.block_hashes[3] in {entry[2] for entry in rig.stores._known._young} for one in asked]
        assert known == [True, False, True]


def test_a_job_whose_time_is_over_in_the_queue_does_not_take_the_others_along() -> None:
    service = Counting()
    with gateway(service) as (_, served):
        now = [1_000_000_000]
        with connector(service, served, clock=lambda: now[0], store_timeout_ms=20_000) as rig:
            service.fault = "store hangs"
            rig.engine.add(request(prompt(LONG, 99)))
            while not service.late:
                rig.engine.step()
            early = rig.engine.add(request(prompt(LONG, 1)))
            while early.request_id in rig.engine.requests:
                rig.engine.step()
            rig.side.plan({}, None)
            now[0] += 19_000_000_000
            rig.engine.add(request(prompt(LONG, 2)))
            while rig.engine.requests:
                rig.engine.step()
            now[0] += 2_000_000_000
            service.fault = ""
            served.run(service.answer_late)
            rig.engine.settle()
            end_in_order(rig)
            wait_until(lambda: len(service.objects) >= 4, "the first and the last are held")
            assert rig.count("stores_failed") == 1
            assert rig.lookups.available
