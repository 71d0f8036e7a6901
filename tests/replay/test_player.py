from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ports import held_port
from tests.replay.memory_gateway import MemoryGateway, serving
from xkv_gateway.errors import (
    CardUnavailableError,
    ConfigError,
    GatewayError,
    GatewayUnreachableError,
    RefusedError,
)
from xkv_gateway.replay import link as link_module
from xkv_gateway.replay import run as run_module
from xkv_gateway.replay.payload import derive_keys
from xkv_gateway.replay.run import ReplayPlan, ReplayResult, Where, run_replay
from xkv_gateway.replay.stats import Operation
from xkv_gateway.replay.trace import Trace, TraceRequest
from xkv_rpc.errors import ErrorCode, RpcError
from xkv_rpc.messages import CardState, Limits, Load, Lookup, Ping, Release, Store

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_rpc.calls import Call

BLOCK_BYTES = 300


def trace_of(*prompts: list[int], timestamps_ms: list[float] | None = None) -> Trace:
    times = timestamps_ms or [0.0] * len(prompts)
    return Trace("t", [TraceRequest(at, 0, 0, prompt) for at, prompt in zip(times, prompts, strict=True)])


def plan_for(port: int, **changes: Any) -> ReplayPlan:
    fields: dict[str, Any] = {
        "where": Where("127.0.0.1", port),
        "block_bytes": BLOCK_BYTES,
        "namespace": "replay",
        "scope": b"",
        "concurrency": 1,
        "region": None,
        "speed": None,
        "lease_ms": 1000,
        "timeout_ns": 20_000_000_000,
    }
    return ReplayPlan(**{**fields, **changes})


async def play(
    gateway: MemoryGateway, trace: Trace, *, regions_path: Path | None = None, **changes: Any
) -> ReplayResult:
    async with serving(gateway, regions_path):
        return await run_replay(
            plan_for(gateway.port, **changes), trace, lambda _: None, clock=time.monotonic_ns
        )


def set_based_hits(prompts: list[list[int]]) -> int:
    seen: set[int] = set()
    hits = 0
    for prompt in prompts:
        for block in prompt:
            if block not in seen:
                break
            hits += 1
        seen |= set(prompt)
    return hits


async def test_a_prompt_is_looked_up_its_hits_loaded_the_rest_stored_and_the_lease_given_back() -> None:
    gateway = MemoryGateway()
    result = await play(gateway, trace_of([1, 2, 3], [1, 2, 4, 5]), namespace="ns", scope=b"tenant")
    stats = result.outcome.stats
    assert result.failure is None
    assert (stats.requests, stats.blocks_asked, stats.blocks_hit, stats.blocks_verified) == (2, 7, 2, 2)
    assert stats.loads == {"ok": 2}
    assert stats.stores == {"stored": 5}
    assert (stats.bytes_loaded, stats.bytes_stored) == (2 * BLOCK_BYTES, 5 * BLOCK_BYTES)
    assert {identity[:2] for identity in gateway.objects} == {("ns", b"tenant")}
    (load,) = gateway.requests(Load)
    assert isinstance(load.request, Load)
    assert load.request.lease is not None
    assert not gateway.leases, "every lease was given back"
    assert gateway.leases_granted == len(gateway.requests(Release)) == 1


@settings(derandomize=True, max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), max_size=7), max_size=6))
async def test_hits_equal_the_count_of_leading_blocks_that_a_set_has_seen(prompts: list[list[int]]) -> None:
    gateway = MemoryGateway(limits=Limits(keys=3))
    result = await play(gateway, trace_of(*prompts))
    stats = result.outcome.stats
    assert result.failure is None
    assert stats.blocks_hit == stats.blocks_verified == set_based_hits(prompts)
    assert stats.stores["stored"] == len(set().union(*prompts))
    assert set(stats.stores) <= {"stored", "exists"}, "a block behind the first miss may be held"


async def test_messages_respect_the_limits_that_hello_tells() -> None:
    limits = Limits(keys=4, inline_bytes=3 * BLOCK_BYTES)
    gateway = MemoryGateway(limits=limits)
    blocks = list(range(11))
    result = await play(gateway, trace_of(blocks, blocks))
    assert result.failure is None
    assert result.outcome.stats.blocks_verified == 11
    sizes = {
        kind: [len(call.request.keys) for call in gateway.requests(kind)]  # type: ignore[union-attr]
        for kind in (Lookup, Load, Store)
    }
    assert sizes[Lookup] == [4, 4, 4, 3]
    assert sum(sizes[Load]) == sum(sizes[Store]) == 11
    assert max(sizes[Load] + sizes[Store]) == 3
    assert not gateway.leases


async def test_a_changed_byte_is_found_and_told_with_its_request_block_and_offset() -> None:
    (bad,) = derive_keys([2], BLOCK_BYTES)

    def spoil(key: bytes, data: bytes) -> bytes:
        return data if key != bad else data[:77] + bytes([data[77] ^ 1]) + data[78:]

    gateway = MemoryGateway(spoil=spoil)
    stats = (await play(gateway, trace_of([1, 2, 3], [1, 2, 3]))).outcome.stats
    assert (stats.blocks_verified, stats.blocks_mismatched) == (2, 1)
    (example,) = stats.mismatch_examples
    assert (example.request_number, example.hash_id, example.first_difference) == (2, 2, 77)


async def test_another_keys_block_and_a_short_one_are_mismatches() -> None:
    wrong, short, _ = derive_keys([1, 2, 3], BLOCK_BYTES)
    gateway = MemoryGateway()

    def spoil(key: bytes, data: bytes) -> bytes:
        other = gateway.objects["replay", b"", short]
        return other if key == wrong else data[:100] if key == short else data

    gateway.spoil = spoil
    stats = (await play(gateway, trace_of([1, 2, 3], [1, 2, 3]))).outcome.stats
    assert (stats.blocks_verified, stats.blocks_mismatched) == (1, 2)


async def test_loads_and_stores_that_fail_are_counted_by_status_and_not_as_bytes() -> None:
    gateway = MemoryGateway(capacity_objects=2, spoil=lambda _, __: None)
    result = await play(gateway, trace_of([1, 2, 3, 4], [1, 2, 3]))
    stats = result.outcome.stats
    assert result.failure is None
    assert stats.stores == {"stored": 2, "no_space": 3}
    assert stats.loads == {"corrupt": 2}
    assert (stats.bytes_loaded, stats.blocks_verified, stats.blocks_mismatched) == (0, 0, 0)


async def test_a_busy_gateway_is_asked_again() -> None:
    turn = Counter[str]()

    def before(call: Call) -> RpcError | None:
        turn[type(call.request).__name__] += 1
        if type(call.request) in {Lookup, Load, Store, Release} and turn[type(call.request).__name__] % 2:
            return RpcError(ErrorCode.BUSY, "later", retry_after_ms=1)
        return None

    result = await play(MemoryGateway(before=before), trace_of([1, 2], [1, 2, 3]))
    assert result.failure is None
    assert result.outcome.stats.blocks_verified == 2
    assert result.outcome.stats.busy_retries == 6
    summary = result.outcome.stats.latencies[Operation.LOOKUP].summary()
    assert summary is not None
    assert summary.count == 2


async def test_a_gateway_that_stays_busy_ends_the_replay_after_its_timeout() -> None:
    def before(call: Call) -> RpcError | None:
        return RpcError(ErrorCode.BUSY, "later") if isinstance(call.request, Store) else None

    result = await play(MemoryGateway(before=before), trace_of([1]), timeout_ns=1_000_000_000)
    assert isinstance(result.failure, GatewayUnreachableError)
    assert "busy" in str(result.failure)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.CARD_OFFLINE, CardUnavailableError),
        (ErrorCode.RECOVERING, CardUnavailableError),
        (ErrorCode.DRAINING, GatewayUnreachableError),
        (ErrorCode.FORBIDDEN, RefusedError),
        (ErrorCode.INTERNAL, GatewayError),
    ],
)
async def test_a_refusal_in_the_middle_ends_the_replay_with_what_was_done_so_far(
    code: ErrorCode, kind: type[GatewayError]
) -> None:
    stores = 0

    def before(call: Call) -> RpcError | None:
        nonlocal stores
        stores += isinstance(call.request, Store)
        return RpcError(code, "told so") if stores == 3 else None

    result = await play(MemoryGateway(before=before), trace_of([1], [2], [3], [4]))
    assert type(result.failure) is kind
    assert "after 2 requests" in str(result.failure)
    assert "told so" in str(result.failure)
    assert result.outcome.problem == str(result.failure)
    assert result.outcome.stats.requests == 2


async def test_no_gateway_is_said_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CONNECT_TIMEOUT_MS", 50)
    with held_port() as port:
        result = await run_replay(plan_for(port), trace_of([1]), lambda _: None, clock=time.monotonic_ns)
    assert isinstance(result.failure, GatewayUnreachableError)
    assert f"no gateway answers at 127.0.0.1:{port}" in str(result.failure)
    assert result.outcome.stats.requests == 0


async def test_a_gateway_that_falls_silent_is_noticed_by_a_ping_long_before_the_call_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(link_module, "PING_TIMEOUT_MS", 1500)
    gateway = MemoryGateway()
    gateway.mute = lambda call: len(gateway.requests(Store)) >= 2 and isinstance(call.request, Store | Ping)
    result = await play(gateway, trace_of([1], [2], [3]), timeout_ns=600_000_000_000)
    assert isinstance(result.failure, GatewayUnreachableError)
    assert "went away after 1 requests" in str(result.failure)


async def test_leases_that_are_refused_or_run_out_are_counted_and_nothing_else_changes() -> None:
    refused = (await play(MemoryGateway(grant_leases=False), trace_of([1], [1]))).outcome.stats
    assert (refused.leases_refused, refused.blocks_verified) == (1, 1)

    def before(call: Call) -> RpcError | None:
        late = isinstance(call.request, Release)
        return RpcError(ErrorCode.UNKNOWN_LEASE, "gone") if late else None

    result = await play(MemoryGateway(before=before), trace_of([1], [1]))
    assert result.failure is None
    assert (result.outcome.stats.leases_lost, result.outcome.stats.blocks_verified) == (1, 1)


async def test_what_this_gateway_cannot_do_is_said_before_anything_is_played() -> None:
    trace = trace_of([1])
    with pytest.raises(ConfigError, match=r"--block-bytes: the gateway takes objects of 100 B"):
        await play(MemoryGateway(limits=Limits(object_bytes=100)), trace)
    with pytest.raises(ConfigError, match=r"in a message at most; use --region"):
        await play(MemoryGateway(limits=Limits(inline_bytes=100)), trace)
    with pytest.raises(ConfigError, match="--region: "):
        await play(MemoryGateway(), trace, region=True)
    with pytest.raises(CardUnavailableError, match="offline"):
        await play(MemoryGateway(state=CardState.OFFLINE), trace)


@pytest.mark.parametrize("region", [None, True])
async def test_a_region_is_used_where_the_gateway_offers_one(tmp_path: Path, region: bool | None) -> None:
    gateway = MemoryGateway()
    trace = trace_of([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4])
    result = await play(gateway, trace, regions_path=tmp_path / "r", region=region)
    assert result.failure is None
    assert result.outcome.transfer == "region"
    assert result.outcome.stats.blocks_verified == 7
    assert result.outcome.stats.stores == {"stored": 4}
    assert not any(call.payloads for call in gateway.seen)
    assert all(call.request.region for call in gateway.requests(Load) if isinstance(call.request, Load))


async def test_bytes_go_inline_when_asked_even_where_regions_are_offered(tmp_path: Path) -> None:
    gateway = MemoryGateway()
    result = await play(gateway, trace_of([1], [1]), regions_path=tmp_path / "r", region=False)
    assert result.outcome.transfer == "inline"
    assert result.outcome.stats.blocks_verified == 1


async def test_a_load_that_writes_nothing_is_a_mismatch_though_the_same_bytes_lay_there_before(
    tmp_path: Path,
) -> None:
    gateway = MemoryGateway(write_regions=False)
    result = await play(gateway, trace_of([1, 2], *[[1, 2]] * 20), regions_path=tmp_path / "r")
    stats = result.outcome.stats
    assert stats.loads == {"ok": 40}
    assert (stats.blocks_verified, stats.blocks_mismatched) == (0, 40)


async def test_requests_start_in_the_order_of_the_trace_and_overlap_when_asked_to() -> None:
    gateway = MemoryGateway()
    prompts = [[block] for block in range(40)]
    result = await play(gateway, trace_of(*prompts), concurrency=8)
    assert result.failure is None
    asked = [call.request.keys[0] for call in gateway.requests(Lookup) if isinstance(call.request, Lookup)]
    assert asked == derive_keys(range(40), BLOCK_BYTES)
    kinds = [type(call.request) for call in gateway.seen if isinstance(call.request, Lookup | Store)]
    assert kinds[:2] == [Lookup, Lookup]


async def test_with_a_speed_no_request_starts_before_its_time() -> None:
    gateway = MemoryGateway()
    trace = trace_of([1], [2], [3], timestamps_ms=[0.0, 100.0, 250.0])
    begin_ns = time.monotonic_ns()
    result = await play(gateway, trace, speed=10.0)
    assert result.failure is None
    starts_ms = [(call.received_ns - begin_ns) / 1e6 for call in gateway.requests(Lookup)]
    assert starts_ms[1] >= 10.0
    assert starts_ms[2] >= 25.0
