"""Clients that read and write the card themselves: beside the gateway, across its death, and too late."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import TYPE_CHECKING

import pytest
import xxhash

from tests.e2e.direct import NS, SCOPE, DirectClient, direct_client
from tests.e2e.gateway import PATIENT, run, serving
from tests.e2e.target import target
from tests.e2e.test_doors import key_directory, with_keys
from tests.nvmeof.spdk_target import spdk_target
from xkv_gateway.errors import ExitCode
from xkv_rpc.async_client import AsyncClient
from xkv_rpc.client import Client
from xkv_rpc.curve_files import read_client_keys
from xkv_rpc.errors import ErrorCode, RpcError
from xkv_rpc.messages import LoadStatus, StoreStatus

if TYPE_CHECKING:
    from pathlib import Path

CARD = "64MiB"
DIRECT = {"XKV_CONTROL__DIRECT": "true"}
FULL = {
    **DIRECT,
    "XKV_NVME__KEEP_ALIVE_MS": "1000",
    "XKV_NVME__COMMAND_TIMEOUT_MS": "1000",
    "XKV_CONTROL__DIRECT_GRACE_MS": "8000",
    "XKV_CONTROL__LIMITS__LEASE_MS": "2000",
    "XKV_EVICTION__POLICY": "noop",
    "XKV_EVICTION__STORE_WAIT_MS": "0",
}
"""Short times (the grace is longer than it takes to fill the card), and a card on which nothing makes room."""


def payloads(seed: int, count: int = 8) -> dict[bytes, bytes]:
    """Objects of all shapes: empty, a byte, a block, more than a unit."""
    rng = random.Random(seed)
    sizes = [0, 1, 4096, 4097, 65_536, 65_537, 300_001, 1 << 20]
    return {b"%d of %d" % (at, seed): rng.randbytes(sizes[at % len(sizes)]) for at in range(count)}


async def loaded(client: AsyncClient, keys: list[bytes]) -> dict[bytes, bytes]:
    """What the gateway gives, which verifies every byte."""
    result = await client.load(NS, SCOPE, keys)
    assert result.statuses == [LoadStatus.OK] * len(keys)
    return {key: bytes(payload or b"") for key, payload in zip(keys, result.payloads, strict=True)}


@pytest.mark.parametrize("told", [True, False])
async def test_a_client_reads_what_the_gateway_stored_and_others_load_what_it_wrote(
    home: Path, told: bool
) -> None:
    theirs, ours = payloads(1), payloads(2)
    async with serving(home / "state", card=CARD, **DIRECT) as gateway:
        async with gateway.client() as client, direct_client(client) as direct:
            assert set(await client.store(NS, SCOPE, list(theirs), list(theirs.values()))) == {
                StoreStatus.STORED
            }
            assert await direct.read(list(theirs)) == list(theirs.values())
            assert await direct.store(ours, told=told) == [StoreStatus.STORED] * len(ours)
            assert await direct.read(list(ours)) == list(ours.values())
        async with gateway.client() as other:
            assert await loaded(other, list(ours)) == ours
        assert await gateway.end(signal.SIGTERM) == ExitCode.OK
    async with serving(home / "state", card=CARD, **DIRECT) as gateway, gateway.client() as client:
        assert await loaded(client, [*ours, *theirs]) == {**ours, **theirs}


@pytest.mark.spdk
async def test_a_client_of_an_spdk_target_writes_through_the_reservation_of_the_gateway(home: Path) -> None:
    objects = payloads(4)
    with spdk_target() as (port, nqn):
        url = f"nvme+tcp://127.0.0.1:{port}/{nqn}"
        assert (await run(home, "card", "format", url)).code == ExitCode.OK
        async with (
            serving(home / "state", "--card", url, card=None, **DIRECT) as gateway,
            gateway.client() as client,
            direct_client(client) as direct,
        ):
            await gateway.until(lambda status: status["card"]["state"] == "online")
            assert await direct.store(objects) == [StoreStatus.STORED] * len(objects)
            assert await direct.read(list(objects)) == list(objects.values())
            assert await loaded(client, list(objects)) == objects
            assert (await gateway.status())["card"]["run"]["reservation"] == "held"


async def test_it_is_not_there_unless_the_operator_wants_it(home: Path) -> None:
    async with serving(home / "state", card=CARD) as gateway, gateway.client() as client:
        hello = await client.hello("direct")
        assert "direct" not in hello.features
        assert hello.direct_grace_ms is None
        for attempt, field in (
            (client.lookup(NS, SCOPE, [b"a"], lease_ms=5, extents=True), "extents"),
            (client.reserve(NS, SCOPE, [b"a"], [1], ttl_ms=5), "op"),
            (client.commit(b"t" * 16, [1]), "op"),
            (client.abort(b"t" * 16, settled=True), "op"),
        ):
            with pytest.raises(RpcError) as caught:
                await attempt
            expected = ErrorCode.UNKNOWN_OP if field == "op" else ErrorCode.BAD_REQUEST
            assert (caught.value.code, caught.value.field) == (expected, field)


async def test_no_key_opens_it_whatever_it_was_granted(home: Path) -> None:
    keys = key_directory(home)
    everything = read_client_keys(keys.new("everything", None))
    curve = {"XKV_CONTROL__CURVE__BIND_ADDRESS": "127.0.0.1", "XKV_CONTROL__CURVE__PORT": "0"}
    async with serving(home / "state", card=CARD, **DIRECT, **curve) as gateway:
        endpoint = f"tcp://{gateway.said_at('with keys')}"
        async with gateway.client() as local, AsyncClient(endpoint, with_keys(everything)) as client:
            mine = await local.reserve(NS, SCOPE, [b"a"], [1], ttl_ms=60_000)
            assert mine.ticket is not None
            await local.store(NS, SCOPE, [b"b"], [b"payload"])
            hello = await client.hello("direct")
            assert "direct" not in hello.features
            assert hello.direct_grace_ms is None
            assert hello.target is None
            for attempt in (
                client.lookup(NS, SCOPE, [b"b"], lease_ms=5, extents=True),
                client.reserve(NS, SCOPE, [b"c"], [1], ttl_ms=5),
                client.commit(mine.ticket, [None]),
                client.abort(mine.ticket, settled=True),
            ):
                with pytest.raises(RpcError) as caught:
                    await attempt
                assert caught.value.code is ErrorCode.FORBIDDEN
            assert await local.commit(mine.ticket, [None]) == [StoreStatus.STORED]


async def test_it_is_refused_together_with_an_endpoint_for_everybody(home: Path) -> None:
    refused = await run(home, "serve", XKV_CONTROL__DIRECT="true", XKV_CONTROL__ALLOW_UNAUTHENTICATED="true")
    assert refused.code == ExitCode.CONFIG
    assert "control.direct" in refused.err


async def test_a_commit_that_is_repeated_has_the_same_answer_also_from_elsewhere(home: Path) -> None:
    async with (
        serving(home / "state", card=CARD, **DIRECT) as gateway,
        gateway.client() as client,
        gateway.client() as other,
        direct_client(client) as direct,
    ):
        reply = await client.reserve(NS, SCOPE, [b"a", b"b"], [4096, 4096], ttl_ms=60_000)
        assert reply.ticket is not None
        again = await other.reserve(NS, SCOPE, [b"a", b"c"], [4096, 4096], ttl_ms=60_000)
        assert again.results == [StoreStatus.IN_PROGRESS, StoreStatus.RESERVED]
        assert await direct.held([b"a"]) == [None]
        with pytest.raises(RpcError, match="one checksum for each"):
            await client.commit(reply.ticket, [1])
        await client.delete(NS, SCOPE, [b"b"])
        expected = [StoreStatus.STORED, StoreStatus.CANCELLED]
        answers = await asyncio.gather(
            *(each.commit(reply.ticket, [None, None]) for each in (client, other) * 3)
        )
        assert answers == [expected] * 6
        assert await other.commit(reply.ticket, [1, 2]) == expected
        for ticket in (reply.ticket, b"never given out"):
            with pytest.raises(RpcError) as caught:
                await client.abort(ticket, settled=True)
            assert caught.value.code is ErrorCode.UNKNOWN_TICKET
        assert again.ticket is not None
        usage = (await gateway.status())["usage"]
        assert (usage["tickets"], usage["ticket_bytes"]) == (1, 4096)
        await other.abort(again.ticket, settled=True)
        usage = (await gateway.status())["usage"]
        assert (usage["tickets"], usage["reserved_bytes"], usage["quarantined_bytes"]) == (0, 0, 0)


async def test_the_blocking_client_has_the_same_calls(home: Path) -> None:
    def work(endpoint: str) -> None:
        with Client(endpoint, PATIENT) as client:
            assert client.hello("direct").direct_grace_ms == 30_000
            reply = client.reserve(NS, SCOPE, [b"a", b"b"], [5, 0], ttl_ms=60_000)
            assert reply.results == [StoreStatus.RESERVED] * 2
            assert reply.ticket is not None
            assert client.commit(reply.ticket, [None, None]) == [StoreStatus.STORED] * 2
            found = client.lookup(NS, SCOPE, [b"a", b"b"], lease_ms=1000, extents=True)
            assert found.extents == [reply.extents[0], []]
            assert found.checksums is not None
            assert found.checksums[1] == xxhash.xxh3_64_intdigest(b"")
            other = client.reserve(NS, SCOPE, [b"c"], [5], ttl_ms=60_000)
            assert other.ticket is not None
            client.abort(other.ticket, settled=False)
            with pytest.raises(RpcError) as caught:
                client.abort(other.ticket, settled=True)
            assert caught.value.code is ErrorCode.UNKNOWN_TICKET

    async with serving(home / "state", card=CARD, **DIRECT) as gateway:
        await asyncio.to_thread(work, f"tcp://127.0.0.1:{gateway.control_port}")


async def filled(direct: DirectClient, name: str) -> dict[bytes, bytes]:
    """Store objects through the gateway until no room is left."""
    stored: dict[bytes, bytes] = {}
    rng = random.Random(name)
    for number in range(100):
        objects = {f"{name} {number} {at}".encode(): rng.randbytes(1 << 16) for at in range(32)}
        statuses = await direct.gateway.store(NS, SCOPE, list(objects), list(objects.values()))
        assert set(statuses) <= {StoreStatus.STORED, StoreStatus.NO_SPACE}
        stored |= {
            key: payload
            for (key, payload), status in zip(objects.items(), statuses, strict=True)
            if status is StoreStatus.STORED
        }
        if StoreStatus.NO_SPACE in statuses:
            return stored
    raise AssertionError("the card is never full")


async def test_a_late_write_of_an_ended_ticket_harms_nobody(home: Path) -> None:
    async with (
        serving(home / "state", card=CARD, **FULL) as gateway,
        gateway.client() as client,
        direct_client(client) as direct,
    ):
        reply = await client.reserve(NS, SCOPE, [b"late"], [1 << 20], ttl_ms=1)
        (ranges,) = reply.extents
        assert reply.ticket is not None
        assert ranges is not None
        await gateway.until(lambda status: status["usage"]["tickets"] == 0)
        objects = await filled(direct, "others")
        await direct.write(ranges, b"x" * (1 << 20))
        with pytest.raises(RpcError) as caught:
            await client.commit(reply.ticket, [None])
        assert caught.value.code is ErrorCode.UNKNOWN_TICKET
        assert await loaded(client, list(objects)) == objects
        # After the grace time the space is used again.
        await gateway.until(lambda status: status["usage"]["quarantined_bytes"] == 0)
        more = await filled(direct, "more")
        assert sum(map(len, more.values())) >= 1 << 20


async def test_a_gateway_that_is_killed_between_reserve_and_commit_leaves_the_space_to_its_client(
    home: Path,
) -> None:
    async with target(home / "card.img", CARD) as url:
        assert (await run(home, "card", "format", url)).code == ExitCode.OK
        async with (
            serving(home / "state", "--card", url, card=None, **FULL) as gateway,
            gateway.client() as client,
            direct_client(client) as direct,
        ):
            kept = payloads(3)
            assert await direct.store(kept, ttl_ms=2000) == [StoreStatus.STORED] * len(kept)
            reply = await client.reserve(NS, SCOPE, [b"cut off"], [1 << 20], ttl_ms=2000)
            (ranges,) = reply.extents
            assert reply.ticket is not None
            assert ranges is not None
            gateway.process.kill()
            await gateway.process.wait()
            async with serving(home / "state", "--card", url, card=None, **FULL) as second:
                await second.until(lambda status: status["card"]["state"] == "online")
                async with second.client() as again:
                    after = DirectClient(again, direct.device)
                    assert await after.held([b"cut off"]) == [None]
                    with pytest.raises(RpcError) as caught:
                        await again.commit(reply.ticket, [None])
                    assert caught.value.code is ErrorCode.UNKNOWN_TICKET
                    objects = await filled(after, "others")
                    # The client does not know yet.
                    await direct.write(ranges, b"x" * (1 << 20))
                    assert await loaded(again, list(objects)) == objects
                    assert await loaded(again, list(kept)) == kept
                    await second.until(lambda status: status["usage"]["doomed_bytes"] == 0)
                    assert sum(map(len, (await filled(after, "more")).values())) >= 1 << 20
