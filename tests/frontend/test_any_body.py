from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.bodies import DROPPING, PNG, rewritten
from tests.frontend.harness import (
    ACME,
    SALTER,
    salt_of,
)
from xkv_frontend.core.fields import BODIES, REQUIRED, Kind
from xkv_frontend.core.jsonstrict import DEPTH_MAX, parse_object, write_object
from xkv_frontend.core.policy import Identity, Policy, UnknownFields
from xkv_frontend.core.refusal import Refusal
from xkv_frontend.core.rewrite import HANDLERS, rewrite
from xkv_frontend.core.routes import ROUTES, RouteName, find_route

CHAT_ROUTE = find_route("POST", b"/v1/chat/completions")
MARK = "SECRET-OF-THE-CLIENT"
HOSTILE = [
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "uuid",
    "multi_modal_uuids",
    "request_id",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "image_url", "url", "input", "id"]) | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
NAMES = st.sampled_from(sorted({name for table in BODIES.values() for name in table})) | st.text(max_size=6)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.sampled_from([route for route in ROUTES if route.has_body]),
    st.dictionaries(NAMES, VALUES, max_size=6),
    st.sampled_from(list(UnknownFields)),
)
def test_any_json_is_salted_by_us_or_refused(
    route: Any, body: dict[str, Any], unknown: UnknownFields
) -> None:
    try:
        result = rewrite(route, body, Identity(ACME), Policy(unknown_fields=unknown), SALTER, bytes).body
        written = json.loads(write_object(result))
    except Refusal as refusal:
        assert 400 <= refusal.status < 500 or refusal.status == 501  # noqa: PT017 - either outcome is right
        return
    assert isinstance(written["cache_salt"], str)
    assert written.keys() <= BODIES[route.name].keys()
    assert all(BODIES[route.name][name] is not Kind.REFUSE for name in written)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["top", "message", "part", "media", "call", "option"]), min_size=1),
    st.sampled_from(HOSTILE),
)
def test_control_fields_reach_the_upstream_from_nowhere(places: list[str], name: str) -> None:
    media: dict[str, Any] = {"url": PNG}
    part: dict[str, Any] = {"type": "image_url", "image_url": media}
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message: dict[str, Any] = {"role": "assistant", "content": [part], "tool_calls": [call]}
    body: dict[str, Any] = {"messages": [message], "stream_options": {}}
    spots = {
        "top": body,
        "message": message,
        "part": part,
        "media": media,
        "call": call,
        "option": body["stream_options"],
    }
    for place in places:
        spots[place][name] = MARK
    for policy in (Policy(), DROPPING):
        try:
            written = write_object(rewritten(body, policy=policy))
        except Refusal as refusal:
            assert refusal.status == 400  # noqa: PT017 - either outcome is right
            continue
        assert MARK.encode() not in written
        assert json.loads(written)["cache_salt"] == salt_of("acme")


@settings(derandomize=True, max_examples=200)
@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_json_is_written_as_it_was_read(value: dict[str, Any]) -> None:
    raw = json.dumps(value).encode()
    try:
        again = write_object(parse_object(raw))
    except Refusal:
        assert "\\ud" in raw.decode().lower()
        return
    assert json.loads(again) == value


def test_the_depth_is_counted_exactly() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)

    assert parse_object(nested(DEPTH_MAX))
    assert parse_object(b'{"a":"' + b"[" * 1000 + b'"}')
    with pytest.raises(Refusal):
        parse_object(nested(DEPTH_MAX + 1))


def test_every_kind_of_field_has_a_check_and_every_route_a_subject() -> None:
    used = {kind for table in BODIES.values() for kind in table.values()}
    assert used - HANDLERS.keys() == {Kind.DROP, Kind.REFUSE, Kind.NARROW, Kind.STORE}
    assert BODIES.keys() == REQUIRED.keys() == {route.name for route in ROUTES if route.has_body}
    assert CHAT_ROUTE.name is RouteName.CHAT
