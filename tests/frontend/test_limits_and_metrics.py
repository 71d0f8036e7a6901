from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.frontend.harness import (
    ACME,
    BETA,
    HELLO,
    KEY_A,
    KEY_B,
    Running,
    raw_post,
    running_front,
    status_of,
    talk,
    until,
)
from xkv_frontend.core.limits import TENANTS_MAX, BodyBudget, Limiter
from xkv_frontend.core.names import TenantName
from xkv_frontend.core.policy import Policy, TenantPolicy
from xkv_frontend.core.refusal import Refusal
from xkv_frontend.metrics import NOBODY, OTHERS, Metrics
from xkv_frontend.metrics import TENANTS_MAX as SERIES_MAX
from xkv_frontend.protocol import FrontProtocol

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm, Recorded

SECOND = 1_000_000_000
BODY = json.dumps(HELLO).encode()


def code_of(limiter: Limiter, tenant: TenantName, rules: TenantPolicy, now_ns: int) -> str:
    try:
        limiter.take(tenant, rules, now_ns)
    except Refusal as refusal:
        return refusal.code.value
    return "taken"


def test_a_bucket_fills_with_time_and_never_beyond_its_size() -> None:
    limiter, rules = Limiter(1000), TenantPolicy(requests_per_s=2, burst=3)
    assert [code_of(limiter, ACME, rules, 0) for _ in range(4)] == ["taken"] * 3 + ["rate_limited"]
    assert code_of(limiter, BETA, rules, 0) == "taken", "another tenant has a bucket of its own"
    assert code_of(limiter, ACME, rules, SECOND // 4) == "rate_limited"
    assert code_of(limiter, ACME, rules, SECOND // 2) == "taken"
    assert [code_of(limiter, ACME, rules, 3600 * SECOND) for _ in range(4)] == ["taken"] * 3 + [
        "rate_limited"
    ]


def test_a_refusal_says_when_to_come_again() -> None:
    limiter, rules = Limiter(10), TenantPolicy(requests_per_s=0.1, burst=1)
    limiter.take(ACME, rules, 0)
    with pytest.raises(Refusal) as caught:
        limiter.take(ACME, rules, 0)
    assert caught.value.status == 429
    assert caught.value.headers == ((b"retry-after", b"10"),)


def test_requests_in_flight_are_counted_for_each_tenant_and_for_all() -> None:
    limiter, rules = Limiter(3), TenantPolicy(concurrency=2)
    codes = [code_of(limiter, tenant, rules, 0) for tenant in (ACME, ACME, ACME, BETA, BETA)]
    assert codes == ["taken", "taken", "too_many_requests", "taken", "busy"]
    limiter.give_back(ACME)
    assert code_of(limiter, ACME, rules, 0) == "taken"
    assert (limiter.in_flight, limiter.in_flight_of(ACME), limiter.in_flight_of(TenantName("x"))) == (3, 2, 0)


def test_accounts_are_bounded() -> None:
    limiter, rules = Limiter(10), TenantPolicy()
    limiter.take(ACME, rules, 0)
    for number in range(TENANTS_MAX + 10):
        name = TenantName(f"t{number}")
        limiter.take(name, rules, 0)
        limiter.give_back(name)
    assert len(limiter._accounts) <= TENANTS_MAX
    assert limiter.in_flight_of(ACME) == 1


async def test_a_tenant_at_its_limit_is_told_and_others_are_not_disturbed(
    fake: FakeVllm, tmp_path: Path
) -> None:
    release = asyncio.Event()

    async def wait(request: Recorded, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await fake._answer(request, writer)

    fake.script = wait
    policy = Policy(tenants={ACME: TenantPolicy(concurrency=2)})
    async with running_front(fake, tmp_path, policy=policy) as front:
        running = [asyncio.create_task(front.post(HELLO)) for _ in range(2)]
        await until(lambda: len(fake.requests) == 2)
        refused = await front.post(HELLO)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        other = asyncio.create_task(front.post(HELLO, key=KEY_B))
        await until(lambda: len(fake.requests) == 3)
        release.set()
        assert [(await one).status_code for one in (*running, other)] == [200] * 3
        assert (await front.post(HELLO)).status_code == 200
        assert front.front.running == 0


async def test_a_body_that_is_refused_gives_its_place_back(front: Running) -> None:
    for _ in range(300):
        assert status_of(await talk(front.port, raw_post(b"{", "Connection: close"))) == 400
    assert (await front.post(HELLO)).status_code == 200


async def test_bodies_share_a_bounded_memory(front: Running, fake: FakeVllm) -> None:
    front.front._budget = BodyBudget(1000)
    held = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(2)]
    for number, (_, writer) in enumerate(held):
        writer.write(raw_post(b"x", length=600 - number * 300))
    await until(lambda: front.front._budget.taken_bytes == 900)
    refused = await talk(front.port, raw_post(b"", "Expect: 100-continue", length=200))
    assert status_of(refused) == 503
    chunked = raw_post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    assert status_of(await talk(front.port, chunked + b"c8\r\n" + b" " * 200 + b"\r\n0\r\n\r\n")) == 503
    for _, writer in held:
        writer.close()
    await until(lambda: front.front._budget.taken_bytes == 0)
    assert (await front.post(HELLO)).status_code == 200


# --- metrics --------------------------------------------------------------------------------------------------------


async def test_requests_are_counted_by_the_names_of_tenants(front: Running) -> None:
    for key, times in ((KEY_A, 3), (KEY_B, 2), ("wrong", 1)):
        for _ in range(times):
            await front.post(HELLO, key=key)
    page = front.metrics.page().decode()
    assert 'xkv_frontend_requests_total{route="chat",status="2xx",tenant="acme"} 3.0' in page
    assert 'xkv_frontend_requests_total{route="chat",status="2xx",tenant="beta"} 2.0' in page
    assert f'xkv_frontend_requests_total{{route="chat",status="4xx",tenant="{NOBODY}"}} 1.0' in page
    assert 'xkv_frontend_refusals_total{code="unauthorized"} 1.0' in page
    assert 'xkv_frontend_first_byte_seconds_count{route="chat"} 5.0' in page


async def test_what_clients_write_makes_no_series(front: Running) -> None:
    await front.post(HELLO)
    await front.client.post("/x", json=HELLO)
    before = front.metrics.page()
    lots = random.Random(1)
    for number in range(300):
        word = lots.randbytes(6).hex()
        await talk(
            front.port,
            f"{word.upper()} /{word} HTTP/1.1\r\nHost: {word}\r\nConnection: close\r\n\r\n".encode(),
        )
        if number % 10 == 0:
            await front.post({**HELLO, "model": word, "user": word, word: 1}, key=word)
    after = front.metrics.page()
    assert after.count(b"\n") <= before.count(b"\n") + 40
    assert len(after) < 2 << 20


def test_series_of_tenants_are_bounded() -> None:
    metrics = Metrics()
    for number in range(10_000):
        tenant = TenantName(f"tenant-{number}")
        metrics.began(tenant)
        metrics.released(tenant)
        metrics.ended(tenant, "chat", 200, "done", sent=1, received=1, first_s=0.1)
    page = metrics.page()
    assert page.count(b"\nxkv_frontend_in_flight{") == SERIES_MAX + 1
    assert f'tenant="{OTHERS}"'.encode() in page
    assert len(page) < 2 << 20


# --- secrets --------------------------------------------------------------------------------------------------------


async def test_keys_salts_and_prompts_are_in_no_log_and_no_answer(
    front: Running, fake: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    marker = "MARKED-PROMPT"
    body = {"messages": [{"role": "user", "content": marker}], "cache_salt": "MARKED-SALT"}
    answers = [
        await front.post(body),
        await front.post({**body, "odd": marker}),
        await front.post(body, key="MARKED-KEY" * 4),
    ]
    answers.append(await front.post({**body, "tools": [{"type": marker}]}))
    await fake.stop()
    answers.append(await front.post(body))
    await fake.start()

    def explode(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    front.front._admit = explode  # type: ignore[method-assign,assignment]
    answers.append(await front.post(body))
    assert [answer.status_code for answer in answers] == [200, 400, 401, 400, 502, 500]
    salts = {request.json["cache_salt"] for request in fake.requests}
    seen = "\n".join(
        [*front.log, caplog.text, front.metrics.page().decode(), *(answer.text for answer in answers)]
    )
    for secret in ("MARKED", KEY_A, *salts):
        assert secret not in seen
    assert "a bug of ours" in caplog.text


async def test_each_request_is_one_line_of_json_with_an_id_that_the_client_sees(front: Running) -> None:
    first, second = await front.post(HELLO), await front.post({**HELLO, "stream": True}, key=KEY_B)
    lines = [json.loads(line) for line in front.log]
    assert [line["request_id"] for line in lines] == [
        first.headers["x-request-id"],
        second.headers["x-request-id"],
    ]
    assert lines[1].items() >= {
        "tenant": "beta", "route": "chat", "scope": "tenant", "stream": True, "status": 200, "outcome": "done", "method": "POST",
    }.items()  # fmt: skip
    assert lines[1]["first_byte_ms"] <= lines[1]["duration_ms"]


class FewConnections(FrontProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections_max = 2


async def test_one_connection_too_many_is_told_so_in_json(fake: FakeVllm, tmp_path: Path) -> None:
    async with running_front(fake, tmp_path, protocol=FewConnections) as front:
        (_, one), (_, two) = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(2)]
        answer = await talk(front.port, raw_post(b"{}", "Connection: close"))
        assert status_of(answer) == 503
        assert b"retry-after: 1" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "busy"
        one.close()
        two.close()
    assert fake.connections == 0
