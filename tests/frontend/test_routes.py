from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.frontend.harness import (
    CHAT,
    HELLO,
    KEY_A,
    Running,
    auth,
    raw_post,
    running_front,
    salt_of,
    status_of,
    talk,
)
from xkv_frontend.core.policy import Policy, RoutePolicy
from xkv_frontend.core.refusal import STATUS, Code
from xkv_frontend.core.routes import ROUTES, RouteName, parse_version

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm

BODY = json.dumps(HELLO).encode()
BODIES = {
    RouteName.CHAT: HELLO,
    RouteName.COMPLETIONS: {"prompt": "hello"},
    RouteName.RESPONSES: {"input": "hello"},
    RouteName.MESSAGES: {"messages": HELLO["messages"], "max_tokens": 5, "model": "m"},
    RouteName.EMBEDDINGS: {"input": ["hello"]},
    RouteName.POOLING: {"input": "hello"},
}

NOT_THERE = [
    "/", "/metrics", "/load", "/health", "/ping", "/version", "/invocations", "/tokenize", "/detokenize",
    "/reset_prefix_cache", "/reset_mm_cache", "/sleep", "/wake_up", "/collective_rpc", "/start_profile", "/server_info",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/score", "/rerank", "/v1/rerank", "/classify",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/batches", "/v1/files", "/v1/messages/count_tokens",
    "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/models/tiny", "/docs", "/openapi.json",
    "//v1/chat/completions", "/v1//chat/completions", "/v1/../invocations", "/v1/%2e%2e/invocations", "/v1/./chat/completions",
    "/v1/chat/completions/", "/v1/chat%2Fcompletions", "/v1/chat/completion%73", "/v1/chat/completions;x",
    "/V1/chat/completions", "/v1/Chat/Completions", "/v1/chat/completions%00", "/v1/chat/completions%20",
    "/v1\\chat\\completions", "http://127.0.0.1/v1/chat/completions", "http://127.0.0.1:8000/invocations", "*",
    "/v1/chat/completions%3Fx",
]  # fmt: skip


@pytest.mark.parametrize("target", NOT_THERE)
async def test_what_is_not_listed_is_not_there_and_costs_no_connection(
    front: Running, fake: FakeVllm, target: str
) -> None:
    for method in ("POST", "GET"):
        raw = raw_post(BODY, path=target).replace(b"POST", method.encode(), 1)
        answer = await talk(front.port, raw)
        assert status_of(answer) in (404, 400)
        assert b"location" not in answer.lower()
    assert fake.connections == 0


@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "post", "POSTX"]
)
async def test_other_methods_on_a_listed_path_are_not_allowed(
    front: Running, fake: FakeVllm, method: str
) -> None:
    answer = await talk(front.port, raw_post(BODY).replace(b"POST", method.encode(), 1))
    assert status_of(answer) == 405
    assert b"\r\nallow: POST\r\n" in answer
    assert fake.connections == 0


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
async def test_there_is_nothing_to_upgrade_to(front: Running, fake: FakeVllm, upgrade: str) -> None:
    head = f"GET {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY_A}\r\nConnection: upgrade, close\r\nUpgrade: {upgrade}\r\n"
    answer = await talk(front.port, (head + "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n").encode())
    assert status_of(answer) == 405
    assert fake.connections == 0


@pytest.mark.parametrize("route", [route for route in ROUTES if route.has_body], ids=lambda route: route.name)
async def test_every_listed_route_is_salted(front: Running, fake: FakeVllm, route) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    path = route.path.decode()
    answer = await front.post({**BODIES[route.name], "cache_salt": "mine"}, path=f"{path}?beta=true&x=1")
    assert answer.status_code == 200
    assert fake.requests[-1].target == path, "the query is not passed on"
    assert fake.requests[-1].json["cache_salt"] == salt_of("acme")


async def test_models_are_listed_for_those_who_are_known(front: Running, fake: FakeVllm) -> None:
    answer = await front.client.get("/v1/models", headers=auth(KEY_A))
    assert answer.json()["data"][0]["id"] == "tiny"
    assert (await front.client.get("/v1/models")).status_code == 401
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ("0.32.0", True),
        ("0.33.1+cpu", True),
        ("1.0.0rc1", True),
        ("0.31.9", False),
        ("dev", False),
        (None, False),
    ],
)
async def test_a_route_is_off_unless_the_running_version_is_known_to_salt_it(
    front: Running, fake: FakeVllm, version: str | None, served: bool
) -> None:
    fake.version = version
    for name in (RouteName.MESSAGES, RouteName.EMBEDDINGS, RouteName.POOLING):
        path = next(route.path.decode() for route in ROUTES if route.name is name)
        answer = await front.post(BODIES[name], path=path)
        assert answer.status_code == (200 if served else 501)
    forwarded = {request.target for request in fake.requests} - {"/version"}
    assert bool(forwarded) is served
    assert (await front.post(HELLO)).status_code == 200, "the others do not ask"


async def test_the_operator_can_state_the_version_and_switch_routes_off(
    fake: FakeVllm, tmp_path: Path
) -> None:
    policy = Policy(routes={RouteName.COMPLETIONS: RoutePolicy(enabled=False)})
    async with running_front(fake, tmp_path, version=(0, 31), policy=policy) as front:
        assert (await front.post(BODIES[RouteName.MESSAGES], path="/v1/messages")).status_code == 501
        assert (await front.post({"prompt": "x"}, path="/v1/completions")).status_code == 404
    assert fake.connections == 0


async def test_health_is_told_to_everybody_and_metrics_to_nobody_here(front: Running, fake: FakeVllm) -> None:
    assert (await front.client.get("/healthz")).json() == {"status": "ok"}
    assert (await front.client.get("/metrics")).status_code == 404
    assert fake.connections == 0


def test_versions_are_read_as_vllm_writes_them() -> None:
    assert (
        parse_version("0.32.0")
        == parse_version("v0.32.1+cpu")
        == parse_version("0.32.1rc1.dev3+g12")
        == (0, 32)
    )
    assert parse_version("") is parse_version("x.y") is parse_version("0.32\n0") is None


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(Code)
