"""Who takes part, and what of a request reaches the gateway."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.connector.rig import FINGERPRINT, connector, gateway
from tests.connector.test_engine import end_in_order, prompt, request
from tests.rpc.harness import DictService
from xkv_rpc.messages import Hello, Ping, scope_of
from xkv_vllm_connector.keys import key_of, stem_of

if TYPE_CHECKING:
    from xkv_rpc.server import Call

CHUNK = 8
LONG = 10 * CHUNK + 1
SALT = "a tenant's secret salt, which nobody else may see"


class Listening(DictService):
    """A service that remembers whatever it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []
        self.payloads: list[bytes] = []

    def handle(self, call: Call) -> None:
        if not isinstance(call.request, Hello | Ping):
            self.heard.append(call.request)
        self.payloads += [bytes(payload) for payload in call.payloads]
        super().handle(call)


def test_two_salts_never_share_and_the_same_salt_does() -> None:
    with gateway() as (service, served):
        with connector(service, served) as rig:
            rig.engine.run(request(prompt(LONG), "a"))
        with connector(service, served) as rig:
            other, none, same = (request(prompt(LONG), salt) for salt in ("b", None, "a"))
            rig.engine.run(other, none, same)
            assert (other.external, none.external, same.external) == (0, 0, 10 * CHUNK)
            end_in_order(rig)


def test_without_isolation_namespace_scope_and_keys_are_those_of_old() -> None:
    with gateway() as (service, served):
        with connector(service, served) as rig:
            asked = request(prompt(LONG))
            rig.engine.run(asked)
        stem = stem_of(FINGERPRINT, 0, 0)
        expected = {("", b"", key_of(stem, chunk, asked.block_hashes[2 * chunk + 1])) for chunk in range(10)}
        assert set(service.objects) == expected


def test_a_namespace_is_used_exactly_as_it_is_and_starts_a_new_cache() -> None:
    with gateway() as (service, served):
        with connector(service, served) as rig:
            rig.engine.run(request(prompt(LONG), "a"))
        with connector(service, served, key_namespace="prod-glm53") as rig:
            asked = request(prompt(LONG), "a")
            rig.engine.run(asked)
            assert asked.external == 0
        assert {ns for ns, _, _ in service.objects} == {"", "prod-glm53"}
        assert {scope for _, scope, _ in service.objects} == {scope_of("a")}


@pytest.mark.parametrize("salt", [None, ""])
def test_where_a_salt_is_required_a_request_without_one_leaves_no_trace(salt: str | None) -> None:
    service = Listening()
    with gateway(service) as (_, served), connector(service, served, require_cache_salt=True) as rig:
        rig.engine.run(request(prompt(LONG), salt), request(prompt(LONG), salt))
        end_in_order(rig)
        assert service.heard == []
        assert len([line for line in rig.said if "require_cache_salt" in line]) == 1
        rig.engine.run(request(prompt(LONG), SALT))
        assert service.heard
        assert len(service.objects) == 10


@pytest.mark.parametrize("value", [False, 0, None, "false", "no"])
def test_a_request_that_must_not_be_stored_leaves_no_trace(value: object) -> None:
    service = Listening()
    with gateway(service) as (_, served), connector(service, served) as rig:
        rig.engine.run(request(prompt(LONG), SALT))
        service.heard.clear()
        asked = request(prompt(LONG), SALT, kv_transfer_params={"xkv_store": value})
        rig.engine.run(asked)
        end_in_order(rig)
        assert service.heard == []
        assert asked.external_total == 0
        rig.engine.run(request(prompt(LONG, 5), SALT, kv_transfer_params={"xkv_store": True, "other": 1}))
        assert len(service.objects) == 20


@pytest.mark.parametrize(
    "params", [[], ["xkv_store"], "xkv_store", 1, {"xkv_store": []}, {"xkv_store": "true"}, {"xkv_store": 1}]
)
def test_transfer_parameters_that_are_none_forbid_and_break_nothing(params: Any) -> None:
    service = Listening()
    with gateway(service) as (_, served), connector(service, served) as rig:
        asked = request(prompt(LONG), SALT, kv_transfer_params=params)
        rig.engine.run(asked)
        end_in_order(rig)
        assert service.heard == []
        assert asked.external_total == 0


@pytest.mark.parametrize("salt", ["a/b", "a@b", "a\\b", "a\0b", "x" * 129, "_default", "\ud800"])
def test_a_salt_that_cannot_be_a_scope_keeps_the_request_off_and_is_not_said(salt: str) -> None:
    service = Listening()
    with gateway(service) as (_, served), connector(service, served) as rig:
        asked = request(prompt(LONG))
        asked.cache_salt = salt
        rig.engine.run(asked)
        end_in_order(rig)
        assert service.heard == []
        assert len(rig.said) == 1
        assert salt not in rig.said[0]


@pytest.mark.parametrize("regions", [True, False])
def test_neither_salt_nor_tokens_leave_the_engine(*, regions: bool) -> None:
    service = Listening()
    with gateway(service, regions=regions) as (_, served), connector(service, served) as rig:
        text = prompt(LONG)
        rig.engine.run(request(text, SALT))
        rig.engine.run(request(text, SALT))
    said = repr(service.heard).encode() + b"".join(service.payloads) + "".join(rig.said).encode()
    keys = b"".join(key for heard in service.heard for key in getattr(heard, "keys", []))
    for secret in (SALT.encode(), hashlib.sha256(SALT.encode()).digest(), text[:8], text[8:16]):
        assert secret not in said + keys


def test_a_request_that_may_not_read_a_cache_does_not_read_this_one_either() -> None:
    with gateway() as (service, served):
        with connector(service, served) as rig:
            rig.engine.run(request(prompt(LONG)))
        with connector(service, served) as rig:
            asked = request(prompt(LONG), skip_reading_prefix_cache=True)
            rig.engine.run(asked)
            assert asked.external_total == 0
            end_in_order(rig)


def test_after_a_reset_nothing_is_found_that_was_stored_before_and_running_requests_are_stored_anew() -> None:
    with gateway() as (service, served):
        with connector(service, served) as rig:
            rig.engine.run(request(prompt(LONG)))
            running = rig.engine.add(request(prompt(LONG, 9), new_tokens=30))
            while len(running.output) < 3:
                rig.engine.step()
            rig.side.renew(bytes(range(100, 116)))
            rig.engine.preempt(running)
            rig.engine.settle()
            assert running.external_total == 0
            again = request(prompt(LONG))
            rig.engine.run(again)
            assert again.external == 0
            later = request(prompt(LONG))
            rig.engine.run(later)
            assert later.external == 10 * CHUNK
            end_in_order(rig)
        with connector(service, served) as rig:
            before = request(prompt(LONG))
            rig.engine.run(before)
            assert before.external == 10 * CHUNK
