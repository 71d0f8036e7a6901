from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.harness import (
    ACME,
    BETA,
    CHAT,
    HELLO,
    KEY_A,
    KEY_ALICE,
    KEY_B,
    SALTER,
    Running,
    auth,
    running_front,
    salt_of,
)
from xkv_frontend.core.fields import BODIES, REQUIRED, Kind
from xkv_frontend.core.jsonstrict import DEPTH_MAX, parse_object, write_object
from xkv_frontend.core.names import Scope, ScopeIds, SessionName, UserName
from xkv_frontend.core.policy import Identity, Policy, RoutePolicy, TenantPolicy, UnknownFields
from xkv_frontend.core.refusal import Refusal
from xkv_frontend.core.rewrite import HANDLERS, rewrite
from xkv_frontend.core.routes import ROUTES, RouteName, find_route

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm

CHAT_ROUTE = find_route("POST", b"/v1/chat/completions")
DROPPING = Policy(unknown_fields=UnknownFields.DROP)
PNG = "data:image/png;base64,AAAA"


async def send(front: Running, raw: bytes, content_type: str = "application/json", **more: str) -> int:
    headers = auth(KEY_A) | {"content-type": content_type} | more
    answer = await front.client.post(CHAT, content=raw, headers=headers)
    if answer.status_code != 200:
        assert answer.json()["error"]["code"]
    return answer.status_code


MESSAGES = json.dumps(HELLO)[1:-1]
AMBIGUOUS = {
    "salt twice": '{%s, "cache_salt": "a", "cache_salt": "b"}',
    "salt twice, once escaped": '{%s, "cache_salt": "a", "\\u0063ache_salt": "b"}',
    "salt in other letters": '{%s, "Cache_Salt": "a"}',
    "salt with blanks": '{%s, "cache_salt ": "a"}',
    "salt with NUL": '{%s, "cache_salt\\u0000": "a"}',
    "member twice deep inside": '{%s, "tools": [{"type": "function", "function": {"name": "f", "name": "g"}}]}',
    "byte order mark": "\ufeff{%s}",
    "two values": "{%s} {}",
    "a comma too many": "{%s,}",
    "comment": "{%s /* */}",
    "NaN": '{%s, "temperature": NaN}',
    "infinity": '{%s, "temperature": -Infinity}',
    "beyond a double": '{%s, "temperature": 1e999}',
    "endless number": '{%s, "seed": ' + "9" * 5000 + "}",
    "half a surrogate pair": '{%s, "user": "\\ud800"}',
    "single quotes": "{%s, 'user': 'x'}",
    "too deep": '{%s, "logit_bias": ' + '{"a":' * 70 + "1" + "}" * 70 + "}",
    "far too deep": '{%s, "logit_bias": ' + "[" * 10_000 + "]" * 10_000 + "}",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_a_body_with_two_readings_is_refused(front: Running, fake: FakeVllm, name: str) -> None:
    assert await send(front, AMBIGUOUS[name].replace("%s", MESSAGES).encode()) == 400
    assert fake.connections == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"1",
        b"{",
        b"\xff\xfe",
        json.dumps(HELLO).encode("utf-16"),
        json.dumps(HELLO).encode("utf-32"),
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b"\0{}",
    ],
)
async def test_what_is_not_one_object_in_utf_8_is_refused(front: Running, fake: FakeVllm, raw: bytes) -> None:
    assert await send(front, raw) == 400
    assert fake.connections == 0


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "multipart/form-data; boundary=x", "application/json; charset=utf-16", "application/json, text/plain", "",
     "application/x-www-form-urlencoded", "application/json;charset=utf-8;charset=latin-1"],
)  # fmt: skip
async def test_a_body_must_say_that_it_is_json(front: Running, fake: FakeVllm, content_type: str) -> None:
    assert await send(front, json.dumps(HELLO).encode(), content_type) == 415
    assert fake.connections == 0


async def test_a_compressed_body_is_refused_and_utf_8_may_be_said(front: Running) -> None:
    assert await send(front, b"x", **{"content-encoding": "gzip"}) == 415
    assert await send(front, json.dumps(HELLO).encode(), 'application/json; charset="UTF-8"') == 200


async def test_an_escaped_name_is_the_same_name_and_the_salt_is_ours(front: Running, fake: FakeVllm) -> None:
    more = '"\\u0063ache_salt": "mine", "kv_transfer_params": {"remote_host": "x"}, "vllm_xargs": {"a": 1}}'
    raw = "{" + MESSAGES + ", " + more
    assert await send(front, raw.encode()) == 200
    body = fake.requests[0].body
    assert body.count(b"cache_salt") == 1
    assert json.loads(body) == {**HELLO, "cache_salt": salt_of("acme")}


CONTROL = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"},
    "ec_transfer_params": {"x": 1},
    "vllm_xargs": {"lmcache.skip_save": True},
    "priority": -5,
    "request_id": "mine",
    "session_id": "mine",
    "multi_modal_uuids": {"image": ["x"]},
    "cache_salt": ["not", "a", "string"],
    "prompt_cache_key": "x",
}


@pytest.mark.parametrize("name", CONTROL)
async def test_what_steers_the_cache_is_dropped(front: Running, fake: FakeVllm, name: str) -> None:
    assert (await front.post({**HELLO, name: CONTROL[name]})).status_code == 200
    assert fake.requests[0].json == {**HELLO, "cache_salt": salt_of("acme")}


@pytest.mark.parametrize(
    "more",
    [{"prompt_embeds": "AAAA"}, {"return_token_ids": True}, {"chat_template": "{{ x }}"}, {"extra_body": {"cache_salt": "x"}},
     {"logits_processors": ["os.system"]}, {"mm_processor_kwargs": {"a": 1}}, {"media_io_kwargs": {}}, {"something_new": 1},
     {"chat_template_kwargs": {"chat_template": "x"}}, {"chat_template_kwargs": {"tokenize": True}},
     {"chat_template_kwargs": {"a": {"b": 1}}}, {"tools": [{"type": "mcp", "server_url": "http://10.0.0.1"}]},
     {"stream": "yes"}, {"model": 5}, {"temperature": [1]}, {"stop": [1]}, {"stop_token_ids": ["x"]}, {"xkv_scope": "x"},
     {"xkv_scope": {"tenant": "beta"}}, {"xkv_scope": {"user": "a|b"}}, {"xkv_scope": {"user": ""}}, {"xkv_store": "no"}],
    ids=json.dumps,
)  # fmt: skip
async def test_what_cannot_be_dropped_is_refused_by_name(
    front: Running, fake: FakeVllm, more: dict[str, Any]
) -> None:
    answer = await front.post({**HELLO, **more})
    if more == {"extra_body": {"cache_salt": "x"}}:
        assert answer.status_code in (200, 400)
        assert all(b"extra_body" not in request.body for request in fake.requests)
        return
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(next(iter(more)))
    assert fake.connections == 0


async def test_unknown_fields_are_dropped_where_the_operator_says_so(fake: FakeVllm, tmp_path: Path) -> None:
    async with running_front(fake, tmp_path, policy=DROPPING) as front:
        message = {"role": "user", "content": [{"type": "text", "text": "x", "new": 1}], "newer": 2}
        assert (await front.post({"messages": [message], "newest": 3, "Cache_Salt": "x"})).status_code == 200
        body = fake.requests[0].json
        assert body == {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "cache_salt": salt_of("acme"),
        }
        assert (
            await front.post({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]})
        ).status_code == 400


@pytest.mark.parametrize(
    "messages",
    ["x", None, {}, [], 5, [None], ["x"], [[]], [{}], [{"role": "user"}], [{"role": "user", "content": None}],
     [{"role": "user", "content": 5}], [{"role": "user", "content": {}}], [{"role": "user", "content": [[]]}],
     [{"role": "user", "content": ["x"]}], [{"role": "user", "content": [{"text": "x"}]}], [{"role": 5, "content": "x"}],
     [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
     [{"role": "assistant", "tool_calls": "x"}], [{"role": "assistant", "tool_calls": [{"function": 5}]}],
     [{"role": "assistant", "content": None}], [{"content": "x"}]],
    ids=json.dumps,
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_messages_of_the_wrong_shape_are_an_answer_and_never_an_error_of_ours(
    front: Running, fake: FakeVllm, messages: Any, path: str
) -> None:
    assert (await front.post({"messages": messages, "max_tokens": 1}, path=path)).status_code == 400
    assert not [request for request in fake.requests if request.target == path]


def rewritten(
    body: dict[str, Any],
    tenant: str = "acme",
    route: RouteName = RouteName.CHAT,
    policy: Policy | None = None,
) -> Any:
    row = next(row for row in ROUTES if row.name is route)
    identity = Identity(ACME if tenant == "acme" else BETA)
    return rewrite(row, body, identity, policy or Policy(), SALTER, bytes).body


MEDIA_PARTS = [
    {"type": "image_url", "image_url": {"url": PNG}, "uuid": "U"},
    {"type": "image_url", "image_url": PNG, "uuid": "U"},
    {"type": "image_url", "image_url": {"url": PNG, "uuid": "U"}},
    {"type": "image_url", "image_url": None, "uuid": "U"},
    {"type": "image_url", "uuid": "U"},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}, "uuid": "U"},
    {"type": "input_audio", "input_audio": None, "uuid": "U"},
    {"type": "audio_url", "audio_url": {"url": PNG}, "uuid": "U"},
    {"type": "video_url", "video_url": {"url": PNG}, "uuid": "U"},
    {"type": "text", "text": "x", "uuid": "U"},
    {"type": "input_image", "image_url": PNG, "uuid": "U"},
]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize("part", MEDIA_PARTS, ids=json.dumps)
def test_a_uuid_of_media_is_made_the_tenants_own(part: dict[str, Any], role: str) -> None:
    body = {
        "messages": [{"role": role, "content": [{"type": "text", "text": "x"}, part], "uuid": "U"}],
        "multi_modal_uuids": {"image": ["U"]},
    }
    ours, theirs = (rewritten(body, tenant)["messages"] for tenant in ("acme", "beta"))
    assert '"U"' not in json.dumps(ours)
    if "uuid" in part and part["type"] not in ("text", "input_image"):
        assert ours[0]["content"][1]["uuid"] != theirs[0]["content"][1]["uuid"]
        assert rewritten(body)["messages"] == ours


@pytest.mark.parametrize(
    "part",
    [{"image": PNG}, {"type": "image_embeds", "image_embeds": "AAAA"}, {"type": "image_pil", "image_pil": 1},
     {"type": "file", "file": {"file_id": "x"}}, {"type": "image_url"}, {"type": "image_url", "image_url": {"detail": "low"}},
     {"type": "image_url", "image_url": {"url": PNG}, "uuid": 5}, {"type": "image_url", "image_url": {"url": PNG}, "uuid": ""},
     {"type": "item_reference", "id": "x"}, {"type": None}],
    ids=json.dumps,
)  # fmt: skip
def test_parts_that_are_not_known_are_refused_even_where_unknown_fields_are_dropped(
    part: dict[str, Any],
) -> None:
    with pytest.raises(Refusal) as caught:
        rewritten({"messages": [{"role": "user", "content": [part]}]}, policy=DROPPING)
    assert caught.value.status == 400


URLS = [
    "http://169.254.169.254/", "http://[::ffff:127.0.0.1]:8000/", "file:///etc/passwd", "https://evil.example/x.png", "ftp://x/",
    "https://media.example.org@evil.example/", "https://media.example.org:8000/", "https://media.example.org.evil.example/",
    "HTTPS://media.example.org/", " https://media.example.org/", "https://media.example.org\\@evil.example/", "//media.example.org/",
    "data:", "https://", "https://media.example.org/\nx", "javascript:x",
]  # fmt: skip


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("route", [RouteName.CHAT, RouteName.MESSAGES, RouteName.RESPONSES])
def test_media_come_from_data_urls_and_allowed_hosts_only(url: str, route: RouteName) -> None:
    policy = Policy(TenantPolicy(media_hosts=frozenset({"media.example.org"})))
    bodies: dict[RouteName, Any] = {
        RouteName.CHAT: lambda u: {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": u}}]}]
        },
        RouteName.MESSAGES: lambda u: {
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": u}}]}
            ]
        },
        RouteName.RESPONSES: lambda u: {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": u}]}]
        },
    }
    make = bodies[route]
    with pytest.raises(Refusal):
        rewritten(make(url), route=route, policy=policy)
    for good in (PNG, "https://media.example.org/a/b.png?c=d", "https://MEDIA.example.org"):
        assert rewritten(make(good), route=route, policy=policy)
    with pytest.raises(Refusal):
        rewritten(make("https://media.example.org/a.png"), route=route)


def test_what_a_client_describes_is_not_touched() -> None:
    schema = {"type": "object", "properties": {"uuid": {"type": "string"}, "cache_salt": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    arguments = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"uuid": 1}'}}
    body = {
        "messages": [*HELLO["messages"], {"role": "assistant", "content": None, "tool_calls": [arguments]}],
        "tools": tools,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    result = rewritten(body)
    assert {name: result[name] for name in body} == body
    assert (
        "cache_salt"
        not in rewritten(HELLO | {"stream_options": {"cache_salt": "x", "include_usage": True}})[
            "stream_options"
        ]
    )


def test_responses_keep_nothing_on_the_server() -> None:
    assert rewritten({"input": "x", "store": True}, route=RouteName.RESPONSES)["store"] is False
    for more in (
        {"previous_response_id": "r"},
        {"background": True},
        {"conversation": "c"},
        {"prompt": {"id": "p"}},
    ):
        with pytest.raises(Refusal):
            rewritten({"input": "x", **more}, route=RouteName.RESPONSES)
    items = [{"type": "item_reference", "id": "x"}, {"id": "x"}, {"type": "mcp_call"}]
    for item in items:
        with pytest.raises(Refusal):
            rewritten({"input": [item]}, route=RouteName.RESPONSES, policy=DROPPING)
    assert rewritten(
        {"input": "x", "background": False, "previous_response_id": None}, route=RouteName.RESPONSES
    )


def test_blocks_of_messages_are_checked_to_the_bottom() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": [{"type": "image", "source": {"type": "base64", "data": "A"}, "uuid": "U"}],
    }
    body = {
        "messages": [{"role": "user", "content": [result]}],
        "max_tokens": 1,
        "system": [{"type": "text", "text": "x", "cache_control": {}}],
    }
    found = json.dumps(rewritten(body, route=RouteName.MESSAGES))
    assert "U" not in found.replace(salt_of("acme"), "")
    assert "cache_control" not in found


# --- scopes ---------------------------------------------------------------------------------------------------------


def salt_with(
    policy: Policy, body: dict[str, Any], user: str | None = None, route: RouteName = RouteName.CHAT
) -> str | None:
    row = next(row for row in ROUTES if row.name is route)
    identity = Identity(ACME, UserName(user) if user else None)
    result: str | None = rewrite(row, body, identity, policy, SALTER, bytes).body.get("cache_salt")
    return result


def salt_for(scope: Scope, user: str | None = None, session: str | None = None) -> str | None:
    ids = ScopeIds(ACME, UserName(user) if user else None, SessionName(session) if session else None)
    return SALTER.salt(scope, ids, bytes(16) if scope is Scope.REQUEST else b"")


def of_scope(scope: Scope, **more: Any) -> Policy:
    return Policy(tenants={ACME: TenantPolicy(scope=scope, **more)})


def test_the_policy_says_who_shares() -> None:
    both = {"xkv_scope": {"user": "u", "session": "s"}}
    assert salt_with(of_scope(Scope.NONE), HELLO) is None
    assert salt_with(of_scope(Scope.TENANT), HELLO) == salt_of("acme")
    assert salt_with(of_scope(Scope.USER), HELLO, "u") == salt_for(Scope.USER, "u")
    assert salt_with(of_scope(Scope.USER), {**HELLO, "xkv_scope": {"user": "u"}}) == salt_for(Scope.USER, "u")
    assert salt_with(of_scope(Scope.SESSION), {**HELLO, **both}) == salt_for(Scope.SESSION, "u", "s")
    assert salt_with(of_scope(Scope.REQUEST), {**HELLO, **both}) == salt_for(Scope.REQUEST)


def test_a_client_narrows_and_never_widens() -> None:
    session = {**HELLO, "xkv_scope": {"session": "s"}}
    assert salt_with(of_scope(Scope.NONE), session) == salt_for(Scope.SESSION, None, "s")
    assert salt_with(of_scope(Scope.TENANT), session) == salt_for(Scope.SESSION, None, "s")
    assert salt_with(of_scope(Scope.TENANT), session, "u") == salt_for(Scope.SESSION, "u", "s")
    assert salt_with(of_scope(Scope.REQUEST), session) == salt_for(Scope.REQUEST)
    assert salt_with(of_scope(Scope.TENANT), {**HELLO, "xkv_scope": {}}) == salt_of("acme")
    with pytest.raises(Refusal) as caught:
        salt_with(of_scope(Scope.TENANT, client_narrowing=False), session)
    assert caught.value.status == 403


def test_a_user_cannot_claim_to_be_another() -> None:
    assert salt_with(of_scope(Scope.USER), {**HELLO, "xkv_scope": {"user": "u"}}, "u") == salt_for(
        Scope.USER, "u"
    )
    with pytest.raises(Refusal) as caught:
        salt_with(of_scope(Scope.USER), {**HELLO, "xkv_scope": {"user": "v"}}, "u")
    assert caught.value.status == 403


@pytest.mark.parametrize("scope", [Scope.USER, Scope.SESSION])
def test_a_scope_without_its_name_is_refused_and_not_widened(scope: Scope) -> None:
    with pytest.raises(Refusal) as caught:
        salt_with(of_scope(scope), HELLO)
    assert caught.value.status == 400


def test_a_route_only_narrows() -> None:
    routes = {
        RouteName.CHAT: RoutePolicy(scope=Scope.REQUEST),
        RouteName.COMPLETIONS: RoutePolicy(scope=Scope.NONE),
    }
    policy = Policy(TenantPolicy(scope=Scope.TENANT), routes=routes)
    assert salt_with(policy, HELLO) == salt_for(Scope.REQUEST)
    assert salt_with(policy, {"prompt": "x"}, route=RouteName.COMPLETIONS) == salt_of("acme")


def test_staying_off_the_card_is_the_policys_and_the_clients_only_where_allowed() -> None:
    off = Policy(TenantPolicy(store=False))
    assert rewritten(HELLO, policy=off)["kv_transfer_params"] == {"xkv_store": False}
    assert "kv_transfer_params" not in rewritten(HELLO)
    assert rewritten({**HELLO, "xkv_store": True}, policy=off)["kv_transfer_params"] == {"xkv_store": False}
    with pytest.raises(Refusal) as caught:
        rewritten({**HELLO, "xkv_store": False})
    assert caught.value.status == 403
    allowed = Policy(TenantPolicy(client_store=True))
    assert rewritten({**HELLO, "xkv_store": False}, policy=allowed)["kv_transfer_params"] == {
        "xkv_store": False
    }
    by_route = Policy(routes={RouteName.CHAT: RoutePolicy(store=False)})
    assert rewritten(HELLO, policy=by_route)["kv_transfer_params"] == {"xkv_store": False}
    with pytest.raises(Refusal) as caught:
        rewritten({"input": "x"}, route=RouteName.RESPONSES, policy=off)
    assert caught.value.status == 501, "a route that cannot carry it is closed, not left open"


async def test_a_key_with_a_user_and_one_without_share_the_tenant(front: Running, fake: FakeVllm) -> None:
    for key in (KEY_A, KEY_ALICE, KEY_B):
        await front.post(HELLO, key=key)
    salts = [request.json["cache_salt"] for request in fake.requests]
    assert salts == [salt_of("acme"), salt_of("acme"), salt_of("beta")]


# --- any body at all ------------------------------------------------------------------------------------------------

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
