"""Tokens of the admin port: who may read, who may change, what is compared, what is said about it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.service.fake_card import fake_sources
from xkv_gateway.binds import BindAddress
from xkv_gateway.errors import ConfigError
from xkv_gateway.service.admin import create_app, create_metrics_app, error_response
from xkv_gateway.service.tokens import AuditTrail, TokenCheck, Tokens, read_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request
    from starlette.types import ASGIApp

WRITE, READ = "w" * 32, "r" * 32
LOOPBACK = BindAddress("127.0.0.1", "127.0.0.1", 5558)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return read_tokens(str(secret(tmp_path / "w", WRITE)), str(secret(tmp_path / "r", READ + "\n")), None)


def secret(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def client_of(app: ASGIApp, token: str | None = None) -> httpx.AsyncClient:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:5558", headers=headers
    )


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"method": request.method})


def guarded(tokens: Tokens) -> ASGIApp:
    routes = [
        Route("/v1/things/{name:path}", echo, methods=["GET", "PUT", "DELETE"]),
        Route("/quota/{cache_salt}", echo, methods=["PUT"]),
        Route("/healthz", echo),
    ]
    return TokenCheck(AuditTrail(Starlette(routes=routes)), lambda: tokens, error_response)


@pytest.mark.parametrize(
    ("token", "method", "status"),
    [
        (WRITE, "GET", 200),
        (WRITE, "PUT", 200),
        (READ, "GET", 200),
        (READ, "PUT", 403),
        (READ, "DELETE", 403),
        (None, "GET", 401),
        ("", "GET", 401),
        ("x" * 32, "GET", 401),
        (WRITE + "x", "GET", 401),
        (WRITE[:-1], "PUT", 401),
        (WRITE, "BREW", 405),
        (READ, "BREW", 403),
    ],
)
async def test_a_token_may_what_it_may(tokens: Tokens, token: str | None, method: str, status: int) -> None:
    async with client_of(guarded(tokens), token) as client:
        response = await client.request(method, "/v1/things/x")
        assert response.status_code == status
        assert ("WWW-Authenticate" in response.headers) == (status == 401)
        assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "header", [f"Basic {WRITE}", WRITE, "Bearer", f"Bearer: {WRITE}", f"Bearer {WRITE} {WRITE}"]
)
async def test_a_header_that_is_no_bearer_token_is_none(tokens: Tokens, header: str) -> None:
    async with client_of(guarded(tokens)) as client:
        response = await client.get("/v1/things/x", headers={"Authorization": header})
    assert response.status_code == 401


async def test_two_authorization_headers_are_none(tokens: Tokens) -> None:
    async with client_of(guarded(tokens)) as client:
        headers = [("Authorization", "Bearer x"), ("Authorization", f"Bearer {WRITE}")]
        assert (await client.get("/v1/things/x", headers=headers)).status_code == 401


def test_a_role_without_a_configured_token_is_nobodys(tmp_path: Path) -> None:
    only_read = read_tokens(None, str(secret(tmp_path / "r", READ)), None)
    assert only_read.role(READ) == "read"
    assert only_read.role("") is None
    assert only_read.role("\0" * 32) is None
    assert only_read.asked_for
    assert not Tokens().asked_for


async def test_every_change_leaves_an_audit_line_without_a_salt(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with client_of(guarded(tokens), WRITE) as client:
        await client.get("/v1/things/x")
        await client.delete("/v1/things/team%22a")
        await client.put("/quota/geheim")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("xkv_gateway")]
    assert len(lines) == 2
    assert lines[0].startswith("admin 'DELETE' '/v1/things/team\"a', token write, from 127.0.0.1")
    assert "/quota/{cache_salt}" in lines[1]
    assert not any("geheim" in line or WRITE in line for line in lines)


@pytest.mark.parametrize(
    ("text", "mode", "word"),
    [
        (WRITE, 0o644, "open to others"),
        (WRITE, 0o660, "open to others"),
        ("brief", 0o600, "shorter"),
        ("", 0o600, "shorter"),
        ("ä" * 32, 0o600, "ASCII"),
        (WRITE + " " + WRITE, 0o600, "spaces"),
        (WRITE + "\n" + WRITE, 0o600, "one line"),
        ("w" * 5000, 0o600, "one line"),
    ],
)
def test_a_bad_token_file_is_named_and_its_content_is_not(
    tmp_path: Path, text: str, mode: int, word: str
) -> None:
    path = secret(tmp_path / "token", text, mode)
    with pytest.raises(ConfigError, match=word) as caught:
        read_tokens(str(path), None, None)
    assert "admin.token_file" in str(caught.value)
    assert not text or text not in str(caught.value)
    with pytest.raises(ConfigError, match=r"admin\.read_token_file"):
        read_tokens(None, str(tmp_path / "none"), None)


def test_tokens_may_be_credentials(tmp_path: Path) -> None:
    secret(tmp_path / "admin-token", WRITE, 0o440)
    found = read_tokens(None, None, tmp_path)
    assert found.role(WRITE) == "write"
    assert WRITE not in repr(found)


async def test_the_real_application_asks_for_tokens_too_and_on_a_unix_socket_it_does_not(
    tokens: Tokens,
) -> None:
    async with client_of(create_app(fake_sources(), LOOPBACK, lambda: tokens)) as client:
        assert (await client.get("/v1/status")).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
        headers = {"Authorization": f"Bearer {READ}"}
        assert (await client.get("/v1/status", headers=headers)).status_code == 200
    async with client_of(create_app(fake_sources(), None, lambda: tokens)) as client:
        assert (await client.get("/v1/status")).status_code == 200


async def test_the_metrics_address_has_metrics_and_health_to_read_and_nothing_else() -> None:
    async with client_of(create_metrics_app(fake_sources())) as client:
        assert (await client.get("/metrics", headers={"Host": "card.lan"})).status_code == 200
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/healthz?x=1")).status_code == 400
        for path in ("/v1/status", "/v1/card", "/readyz", "/", "/quota", "/openapi.json"):
            assert (await client.get(path)).status_code == 404
        for method in ("PUT", "POST", "DELETE"):
            assert (await client.request(method, "/metrics")).status_code == 405
