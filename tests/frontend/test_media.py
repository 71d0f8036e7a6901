from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontend.bodies import DROPPING, PNG, rewritten
from tests.frontend.harness import (
    HELLO,
    salt_of,
)
from xkv_frontend.core.policy import Policy, TenantPolicy
from xkv_frontend.core.refusal import Refusal
from xkv_frontend.core.routes import RouteName

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
