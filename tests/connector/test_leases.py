"""What a request was offered stays where it is until it is loaded, and is let go then."""

from __future__ import annotations

import pytest

from tests.connector.rig import connector, gateway
from tests.connector.test_ahead import Clock
from tests.connector.test_engine import end_in_order, prompt, request
from tests.connector.test_faults import CHUNK, LONG, Faulty, stored
from tests.rpc.harness import DictService, wait_until
from xkv_vllm_connector.settings import SettingsError, parse_settings

LEASE_MS = 3000
THIRD_NS = 1_000_000_000


@pytest.mark.parametrize("ends", ["loaded", "aborted meanwhile"])
def test_leases_are_renewed_until_their_load_is_done(ends: str) -> None:
    service, clock = Faulty(), Clock()
    with gateway(service) as (_, served):
        stored(service, served)
        with connector(service, served, clock=clock, lease_ms=LEASE_MS) as rig:
            service.fault = "load hangs"
            asked = rig.engine.add(request(prompt(LONG)))
            while not service.late:
                rig.engine.step()
            if ends == "aborted meanwhile":
                rig.engine.abort(asked)
            for times in (1, 2):
                clock.now_ns += THIRD_NS - 1
                rig.engine.step()
                clock.now_ns += 1
                rig.engine.step()
                wait_until(lambda times=times: list(service.granted.values()) == [times], "it is renewed")
            service.fault = ""
            served.run(service.answer_late)
            while not asked.external_total if ends == "loaded" else rig.side._leaving:
                rig.engine.step()
            rig.engine.settle()
            wait_until(lambda: not service.granted, "it is let go")
            clock.now_ns += LEASE_MS * 1_000_000
            rig.engine.step()
            assert service.renewals == 2
            assert rig.count("loads_failed") == 0
            end_in_order(rig)


def test_an_answer_that_nobody_came_for_in_time_is_not_offered() -> None:
    service, clock = DictService(), Clock()
    with gateway(service) as (_, served):
        with connector(service, served) as first:
            first.engine.run(request(prompt(LONG)))
        with connector(service, served, clock=clock, lease_ms=LEASE_MS, lookup_step_wait_ms=0) as rig:
            service.hold = True
            asked = rig.engine.add(request(prompt(LONG)))
            while not service.held:
                rig.engine.step()
            clock.now_ns += THIRD_NS
            service.hold = False
            served.run(lambda: [service.answer(call) for call in service.held])
            asking = rig.side._entries[asked.request_id].asked
            assert asking is not None
            wait_until(asking.done, "it is answered")
            assert asking.result().leases
            rig.engine.settle()
            assert asked.external_total == 0
            wait_until(lambda: not service.granted, "what it leased is let go")
            end_in_order(rig)


def test_a_lease_is_renewed_before_a_load_within_the_step() -> None:
    with gateway() as (service, served):
        with connector(service, served) as first:
            first.engine.run(request(prompt(LONG)))
        with connector(service, served, sync=True) as rig:
            asked = request(prompt(LONG))
            rig.engine.run(asked)
            assert asked.external_total == 10 * CHUNK
            wait_until(lambda: service.renewals == 1, "it is renewed")
            end_in_order(rig)


def test_a_load_within_the_step_may_take_no_longer_than_its_lease_lasts() -> None:
    parse_settings({"load_mode": "sync", "load_timeout_ms": 30_000})
    parse_settings({"load_timeout_ms": 600_000})
    with pytest.raises(SettingsError, match="lease_ms") as caught:
        parse_settings({"load_mode": "sync", "load_timeout_ms": 30_001})
    assert caught.value.field == "load_timeout_ms"
