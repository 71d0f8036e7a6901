from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.service.fake_card import fake_sources
from tests.service.fake_status import FakeSource
from xkv_gateway.binds import BindAddress, bind_tcp
from xkv_gateway.service.admin import AdminServer, create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOOPBACK = BindAddress("127.0.0.1", "127.0.0.1", 0)


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
async def client(source: FakeSource) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the real server, over a real socket."""
    listener = bind_tcp(LOOPBACK, section="admin")
    port = listener.getsockname()[1]
    server = AdminServer(create_app(fake_sources(source), LOOPBACK), listener)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run())
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60
        ) as client:
            yield client
        server.stop()


async def test_health_says_that_the_process_answers(client: httpx.AsyncClient) -> None:
    answer = await client.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_readiness_follows_the_card(client: httpx.AsyncClient, source: FakeSource) -> None:
    assert (await client.get("/readyz")).status_code == 200
    source.go_offline("connection refused")
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": "not ready", "card": "offline", "reason": "connection refused"}
    assert (await client.get("/healthz")).status_code == 200


async def test_a_draining_gateway_is_not_ready(client: httpx.AsyncClient, source: FakeSource) -> None:
    source.current = replace(source.current, state="draining")
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["reason"]) == (503, "draining")


async def test_status_and_card_are_json(client: httpx.AsyncClient, source: FakeSource) -> None:
    assert (await client.get("/v1/status")).json() == source.current.to_json()
    assert (await client.get("/v1/card")).json() == source.current.to_json()["card"]


async def test_metrics_are_prometheus_text_with_our_names_only(client: httpx.AsyncClient) -> None:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for line in (
        'xkv_info{version="1.2.3"} 1.0',
        "xkv_ready 1.0",
        'xkv_card_state{state="online"} 1.0',
        'xkv_card_state{state="offline"} 0.0',
        'xkv_usage_bytes{kind="quarantined"} 40.0',
        'xkv_requests_total{op="lookup"} 5.0',
        'xkv_errors_total{code="busy"} 1.0',
        "xkv_cache_hits_total 3.0",
        "xkv_warm 0.0",
        "xkv_card_epoch 5.0",
        "xkv_recovery_seconds 0.25",
        "xkv_recovered_objects 7.0",
        "xkv_recovery_dropped_objects 1.0",
        "xkv_recovery_damages 1.0",
        "xkv_journal_used_bytes 4096.0",
        "xkv_journal_batches_total 3.0",
        "xkv_checkpoints_total 2.0",
        "xkv_card_io_write_bytes_total 13.0",
        "xkv_control_replies_dropped_total 2.0",
        "xkv_soft_card_restarts_total 1.0",
    ):
        assert line in lines
    assert all(line.startswith(("# ", "xkv_")) for line in lines)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/status/", 404, "not_found"),
        ("GET", "/V1/status", 404, "not_found"),
        ("GET", "/v1/namespace", 404, "not_found"),
        ("GET", "//healthz", 404, "not_found"),
        ("GET", "/healthz/%2e%2e", 404, "not_found"),
        ("POST", "/v1/status", 405, "method_not_allowed"),
        ("DELETE", "/v1/card", 405, "method_not_allowed"),
        ("BREW", "/metrics", 405, "method_not_allowed"),
    ],
)
async def test_every_error_is_json(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    if status == 405:
        assert "GET" in answer.headers["allow"]


async def test_head_is_answered_without_a_body(client: httpx.AsyncClient) -> None:
    answer = await client.head("/healthz")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_bug_is_500_as_json_with_its_trace_in_the_log_only(
    client: httpx.AsyncClient, source: FakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    source.broken = True
    with caplog.at_level(logging.ERROR):
        answer = await client.get("/v1/status")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_server_error"
    assert "a bug" not in answer.text
    assert "a bug" in caplog.text
    assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:5558", "127.0.0.1.evil.example", "", "10.0.0.1", "0.0.0.0"]
)
async def test_a_request_under_a_foreign_host_name_is_refused(client: httpx.AsyncClient, host: str) -> None:
    answer = await client.get("/v1/status", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:5558", "LOCALHOST:1", "[::1]:5558", "127.0.0.2"])
async def test_a_request_under_a_loopback_host_is_served(client: httpx.AsyncClient, host: str) -> None:
    assert (await client.get("/healthz", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    ("origin", "refused"),
    [
        (None, False),
        ("http://localhost:5558", False),
        ("http://evil.example", True),
        ("null", True),
        ("", True),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/tenants:confirm"), ("PUT", "/quota/a"), ("DELETE", "/quota/a")]
)
async def test_nothing_is_changed_for_a_web_page_of_another_origin(
    client: httpx.AsyncClient, method: str, path: str, origin: str | None, refused: bool
) -> None:
    headers = {"Host": "localhost:5558"} | ({} if origin is None else {"Origin": origin})
    assert ((await client.request(method, path, headers=headers)).status_code == 403) == refused
    assert (await client.get("/v1/status", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("192.0.2.7:5558", 200), ("[2001:db8::1]", 200), ("card.lan", 200), ("evil.example", 403)],
)
async def test_a_listener_on_all_addresses_takes_any_address_and_its_own_name(host: str, status: int) -> None:
    app = create_app(fake_sources(), BindAddress("card.lan", "0.0.0.0", 5558))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.get("/healthz", headers={"Host": host})).status_code == status


async def test_stopping_does_not_wait_for_idle_or_half_open_connections(source: FakeSource) -> None:
    listener = bind_tcp(LOOPBACK, section="admin")
    port = listener.getsockname()[1]
    server = AdminServer(create_app(fake_sources(source), LOOPBACK), listener)
    task = asyncio.create_task(server.run())
    writers = []
    for sent in (
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: local",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        writers.append(writer)
    await asyncio.sleep(0)
    server.stop()
    async with asyncio.timeout(60):
        await task
    for writer in writers:
        writer.close()
