from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.frontend.bodies import DROPPING
from tests.frontend.harness import (
    CHAT,
    HELLO,
    KEY_A,
    Running,
    auth,
    running_front,
    salt_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm


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
