"""The same front end around an application in this process."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from tests.frontend.harness import CHAT, HELLO, KEY_A, KEY_B, SALTER, auth, salt_of, sample_keys
from xkv_frontend.accesslog import AccessLog
from xkv_frontend.auth import KeysFileAuthenticator
from xkv_frontend.clock import monotonic_ns
from xkv_frontend.core.keys import format_keys
from xkv_frontend.core.policy import Policy
from xkv_frontend.front import Parts
from xkv_frontend.metrics import Metrics
from xkv_frontend.middleware import IDENTITY_KEY, EnvironmentMiddleware, FrontMiddleware

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from starlette.requests import Request

SEEN: list[Any] = []


async def chat(request: Request) -> Any:
    body = await request.json()
    SEEN.append((body, dict(request.headers), request.url.query, request.scope["state"][IDENTITY_KEY]))
    if body.get("stream"):

        async def events() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"data: %d\n\n" % number

        return StreamingResponse(events(), media_type="text/event-stream")
    return JSONResponse({"salt": body.get("cache_salt")})


async def inner(_: Request) -> PlainTextResponse:
    return PlainTextResponse("inside")


def application() -> Starlette:
    SEEN.clear()
    return Starlette(
        routes=[
            Route(CHAT, chat, methods=["POST"]),
            Route("/metrics", inner),
            Route("/health", inner),
            Route("/v1/messages", chat, methods=["POST"]),
        ]
    )


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    path = tmp_path / "keys"
    path.write_text(format_keys(sample_keys()))
    authenticator = KeysFileAuthenticator(path, monotonic_ns)
    return Parts(
        Policy(), SALTER, authenticator, Metrics(), AccessLog(None, lambda: 0), monotonic_ns, os.urandom
    )


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://inside.example")


async def test_the_application_sees_a_salted_request_and_who_sent_it(parts: Parts) -> None:
    app = application()
    app.add_middleware(FrontMiddleware, parts=parts)
    async with client_of(app) as client:
        headers = auth(KEY_A) | {"x-cache-salt": "mine", "cookie": "a=b"}
        answer = await client.post(f"{CHAT}?x=1", json={**HELLO, "cache_salt": "mine"}, headers=headers)
        assert answer.json() == {"salt": salt_of("acme")}
        assert answer.headers["x-request-id"]
        assert (await client.post(CHAT, json=HELLO, headers=auth(KEY_B))).json() == {"salt": salt_of("beta")}
        stream = await client.post(CHAT, json={**HELLO, "stream": True}, headers=auth(KEY_A))
        assert stream.content == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    body, seen_headers, query, identity = SEEN[0]
    assert body == {**HELLO, "cache_salt": salt_of("acme")}
    assert seen_headers.keys() == {
        "host", "accept", "accept-encoding", "user-agent", "connection", "x-request-id", "content-type", "content-length",
    }  # fmt: skip
    assert (query, identity.tenant) == ("", "acme")


async def test_routes_that_are_not_listed_do_not_reach_the_application(parts: Parts) -> None:
    app = FrontMiddleware(application(), parts=parts, allow=frozenset({b"/health"}))
    async with client_of(app) as client:
        assert (await client.get("/metrics", headers=auth(KEY_A))).status_code == 404
        assert (await client.get("/health")).text == "inside"
        assert (await client.post(CHAT, json=HELLO)).status_code == 401
        assert (await client.post("/v1/messages", json=HELLO, headers=auth(KEY_A))).status_code == 501
    assert not SEEN
    app = FrontMiddleware(application(), parts=parts, version=(0, 32))
    async with client_of(app) as client:
        assert (await client.post("/v1/messages", json=HELLO, headers=auth(KEY_A))).status_code == 200


async def test_websockets_are_closed_and_the_life_of_the_application_goes_on(parts: Parts) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    front = FrontMiddleware(app, parts=parts)
    await front({"type": "websocket", "path": CHAT}, receive, send)
    await front({"type": "lifespan"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert seen == ["lifespan"]


async def test_a_client_that_goes_away_cancels_the_application(parts: Parts) -> None:
    cancelled = asyncio.Event()
    gone = asyncio.Event()
    messages = [{"type": "http.request", "body": b'{"messages": [{"role": "user", "content": "x"}]}'}]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        gone.set()
        try:
            await receive()
        finally:
            cancelled.set()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        raise AssertionError("there is nobody to answer")

    headers = [(b"authorization", f"Bearer {KEY_A}".encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "headers": headers,
        "client": None,
    }
    async with asyncio.timeout(60):
        await FrontMiddleware(app, parts=parts)(scope, receive, send)
    assert cancelled.is_set()


async def test_a_key_revoked_in_the_file_is_noticed_without_a_task_of_ours(
    parts: Parts, tmp_path: Path
) -> None:
    now = monotonic_ns()
    authenticator = KeysFileAuthenticator(tmp_path / "keys", lambda: now)
    app = FrontMiddleware(
        application(),
        parts=Parts(Policy(), SALTER, authenticator, Metrics(), parts.access_log, lambda: now, os.urandom),
    )
    async with client_of(app) as client:
        assert (await client.post(CHAT, json=HELLO, headers=auth(KEY_A))).status_code == 200
        keys = sample_keys()
        (tmp_path / "keys").write_text(format_keys(keys.revoke(keys.table()[keys.digest(KEY_A.encode())].id)))
        now += 2_000_000_000
        assert (await client.post(CHAT, json=HELLO, headers=auth(KEY_A))).status_code == 401


async def test_settings_of_the_environment_make_a_whole_middleware(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XKV_FRONTEND_DEPLOYMENT", "prod")
    monkeypatch.setenv("XKV_FRONTEND_KEYS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("CACHE_SALT_SECRET", bytes(range(32)).hex())
    async with client_of(EnvironmentMiddleware(application())) as client:
        answer = await client.post(CHAT, json=HELLO, headers=auth(KEY_A))
    assert answer.json() == {"salt": salt_of("acme")}
