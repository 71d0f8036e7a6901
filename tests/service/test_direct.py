"""The feature `direct` at the control port, over a simulated card: order, bounds, repetition, a card that goes away."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import xxhash

from tests.service.test_control import played
from tests.service.test_drain import LIMITS, SETTINGS, UNIT
from tests.sim.faults import Faults
from tests.sim.gateway import RESERVED_BYTES, Gateway, Parts
from tests.sim.loop import SimLoop
from tests.sim.medium import Medium
from xkv_gateway.card.direct import Commit
from xkv_gateway.card.store import CardOffline
from xkv_gateway.core.types import StoreStatus, TicketId
from xkv_rpc import messages as m
from xkv_rpc.errors import ErrorCode, RpcError

PAYLOAD = random.Random(5).randbytes(UNIT)
SUM = xxhash.xxh3_64_intdigest(PAYLOAD)


async def reserved(gateway: Gateway, *keys: bytes, size: int = UNIT, ttl_ms: int = 1000) -> m.ReserveReply:
    reply, _ = await gateway.ask(1, m.Reserve("", b"", list(keys), [size] * len(keys), ttl_ms))
    assert isinstance(reply, m.ReserveReply), reply
    return reply


async def written(gateway: Gateway, reply: m.ReserveReply, payload: bytes = PAYLOAD) -> bytes:
    """Write to all of it, and flush; returns the ticket."""
    for ranges in reply.extents:
        at = 0
        for offset, length in ranges or ():
            piece = payload[at : at + length].ljust(length, b"\0")
            await gateway.device.write_from(offset, [memoryview(piece)])
            at += length
    await gateway.device.flush()
    assert reply.ticket is not None
    return reply.ticket


def code_of(answer: tuple[m.Reply | RpcError, list[bytes]]) -> ErrorCode:
    assert isinstance(answer[0], RpcError), answer
    return answer[0].code


def test_what_comes_behind_a_commit_on_its_connection_sees_its_effect() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        ticket = await written(gateway, await reserved(gateway, b"a"))
        answers = await asyncio.gather(
            gateway.ask(1, m.Commit(ticket, [None])),
            gateway.ask(1, m.Lookup("", b"", [b"a"])),
            gateway.ask(1, m.Commit(ticket, [SUM])),
            gateway.ask(1, m.Load("", b"", [b"a"])),
            gateway.ask(1, m.Abort(ticket, settled=True)),
        )
        assert [reply for reply, _ in answers[:4]] == [
            m.CommitReply(["stored"]),
            m.LookupReply(1, [UNIT]),
            m.CommitReply(["stored"]),
            m.LoadReply(["ok"], [UNIT]),
        ]
        assert [bytes(each) for each in answers[3][1]] == [PAYLOAD]
        assert code_of(answers[4]) is ErrorCode.UNKNOWN_TICKET
        assert not gateway.service._orders
        assert not gateway.service._writing

    played(work)


def test_a_reservation_waits_for_the_store_of_its_connection() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        _, (reply, _) = await asyncio.gather(
            gateway.ask(1, m.Store("", b"", [b"a"], [UNIT]), [PAYLOAD]),
            gateway.ask(1, m.Reserve("", b"", [b"a", b"b"], [UNIT, UNIT], 1000)),
        )
        assert isinstance(reply, m.ReserveReply)
        assert reply.results == ["exists", "reserved"]
        assert reply.extents[0] is None

    played(work)


def test_extents_of_a_lookup_are_where_the_bytes_lie() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        sizes = [0, 1, UNIT, UNIT + 1]
        payloads = [random.Random(size).randbytes(size) for size in sizes]
        keys = [b"%d" % size for size in sizes]
        await gateway.ask(1, m.Store("", b"", keys, sizes), payloads)
        for mode, asked in ((m.LookupMode.PREFIX, [*keys, b"none"]), (m.LookupMode.EACH, [b"none", *keys])):
            reply, _ = await gateway.ask(1, m.Lookup("", b"", asked, mode, 1000, extents=True))
            assert isinstance(reply, m.LookupReply)
            assert reply.extents is not None
            assert reply.checksums == [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
            for ranges, payload in zip(reply.extents, payloads, strict=True):
                found = b"".join(medium.read(offset, length) for offset, length in ranges)
                assert found.rstrip(b"\0") == payload.rstrip(b"\0")
                assert len(found) == -(-len(payload) // medium.block_bytes) * medium.block_bytes
        reply, _ = await gateway.ask(1, m.Lookup("", b"", [b"none"], lease_ms=1000, extents=True))
        assert reply == m.LookupReply(0, [], None, 0, [], [])

    played(work)


def test_a_lease_with_extents_holds_the_bytes_through_delete_and_wipe_and_is_not_renewed_then() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        await gateway.ask(1, m.Store("", b"", [b"a", b"b"], [UNIT, UNIT]), [PAYLOAD, bytes(UNIT)])
        reply, _ = await gateway.ask(1, m.Lookup("", b"", [b"a"], lease_ms=1000, extents=True))
        assert isinstance(reply, m.LookupReply)
        assert reply.lease is not None
        assert reply.extents is not None
        await gateway.ask(1, m.Delete("", b"", [b"a"]))
        gateway.engine.wipe("", None, gateway.clock())
        gateway.store.changed()
        assert code_of(await gateway.ask(1, m.Renew(reply.lease, 1000))) is ErrorCode.UNKNOWN_LEASE
        await fill(gateway)
        ((offset, length),) = reply.extents[0]
        assert medium.read(offset, length) == PAYLOAD

    played(work)


async def fill(gateway: Gateway) -> None:
    for number in range(LIMITS.capacity_au + 1):
        reply, _ = await gateway.ask(2, m.Store("", b"fill", [b"%d" % number], [UNIT]), [bytes(UNIT)])
        assert isinstance(reply, m.StoreReply)
        if reply.results == ["no_space"]:
            return


def test_what_comes_behind_a_reservation_that_waits_for_room_comes_behind_it() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        await fill(gateway)
        filled = [b"%d" % number for number in range(LIMITS.capacity_au + 1)]
        held, _ = await gateway.ask(2, m.Lookup("", b"fill", filled, m.LookupMode.EACH, 1000))
        assert isinstance(held, m.LookupReply)
        assert held.lease is not None
        answers = [
            gateway.ask(1, m.Reserve("", b"", [b"a"], [UNIT], 1000)),
            gateway.ask(1, m.Delete("", b"", [b"a"])),
            gateway.ask(1, m.Lookup("", b"", [b"a"])),
        ]
        await gateway.ask(2, m.Release(held.lease))
        await gateway.ask(2, m.Delete("", b"fill", filled))
        reserve, _, lookup = [reply for reply, _ in await asyncio.gather(*answers)]
        assert isinstance(reserve, m.ReserveReply)
        assert reserve.results == ["reserved"]
        assert lookup == m.LookupReply(0, [])
        ticket = await written(gateway, reserve)
        reply, _ = await gateway.ask(1, m.Commit(ticket, [SUM]))
        assert reply == m.CommitReply(["cancelled"])
        await asyncio.sleep(1)
        assert not gateway.service._orders
        assert not gateway.service._writing

    played(work)


def test_tickets_beyond_the_bounds_of_a_scope_are_busy() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        count = 0
        while True:
            answer = await gateway.ask(1, m.Reserve("", b"", [b"%d" % count], [0], 1000))
            if isinstance(answer[0], RpcError):
                break
            count += 1
        assert count == LIMITS.leases_per_scope_max
        assert code_of(answer) is ErrorCode.BUSY
        assert (await reserved_by_other(gateway)).results == ["reserved"]
        await asyncio.sleep(1.1)
        assert (await reserved(gateway, b"again")).results == ["reserved"]

    played(work)


async def reserved_by_other(gateway: Gateway) -> m.ReserveReply:
    reply, _ = await gateway.ask(1, m.Reserve("", b"other", [b"a"], [0], 1000))
    assert isinstance(reply, m.ReserveReply)
    return reply


def test_more_than_a_scope_may_ever_have_reserved_is_not_worth_another_try() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        most = gateway.engine.tickets.bytes_max
        keys = most // LIMITS.object_bytes_max + 1
        names = [b"%d" % number for number in range(keys)]
        request = m.Reserve("", b"", names, [LIMITS.object_bytes_max] * keys, 1000)
        answer = await gateway.ask(1, request)
        assert code_of(answer) is ErrorCode.TOO_LARGE
        assert isinstance(answer[0], RpcError)
        assert answer[0].field == "sizes"

    played(work)


def test_who_waits_for_a_commit_hears_of_its_end_whenever_that_is() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        ticket = TicketId(await written(gateway, await reserved(gateway, b"a")))
        assert gateway.service._direct is not None
        direct = gateway.service._direct._direct
        first, second = Commit(direct, ticket, [None]), Commit(direct, ticket, [None])
        # The first was over before the second, which had been admitted, had its turn.
        first.give_up()
        with pytest.raises(CardOffline):
            await direct.commit(second)
        assert not gateway.store.saves
        third, fourth = Commit(direct, ticket, [SUM]), Commit(direct, ticket, [None])
        assert gateway.store.saves == 1, "a commit is a store under way"
        assert await direct.commit(third) == [StoreStatus.STORED]
        assert await direct.commit(fourth) == [StoreStatus.STORED]
        assert not gateway.store.saves
        assert not direct._commits

    played(work)


def test_one_checksum_for_each_reserved_key() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        ticket = await written(gateway, await reserved(gateway, b"a", b"b"))
        answer = await gateway.ask(1, m.Commit(ticket, [SUM]))
        assert code_of(answer) is ErrorCode.BAD_REQUEST
        assert isinstance(answer[0], RpcError)
        assert answer[0].field == "checksums"
        reply, _ = await gateway.ask(1, m.Commit(ticket, [SUM, SUM]))
        assert reply == m.CommitReply(["stored", "stored"])

    played(work)


def test_a_commit_while_the_card_is_away_changes_nothing_and_may_be_repeated() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        ticket = await written(gateway, await reserved(gateway, b"a", ttl_ms=60_000))
        gateway.device.break_connection(1_000_000_000)
        assert code_of(await gateway.ask(1, m.Commit(ticket, [None]))) is ErrorCode.CARD_OFFLINE
        assert code_of(await gateway.ask(1, m.Reserve("", b"", [b"b"], [1], 5))) is ErrorCode.CARD_OFFLINE
        reply, _ = await gateway.ask(1, m.Lookup("", b"", [b"a"], lease_ms=5, extents=True))
        assert reply == m.LookupReply(0, [], None, 0, [], [])
        await asyncio.sleep(2)
        reading = gateway.ask(1, m.Commit(ticket, [None]))
        repeated = gateway.ask(2, m.Commit(ticket, [None]))
        await asyncio.sleep(0)
        gateway.device.break_connection(1_000_000_000)
        answers = await asyncio.gather(reading, repeated)
        assert {code_of(answer) for answer in answers} == {ErrorCode.CARD_OFFLINE}
        await asyncio.sleep(2)
        reply, _ = await gateway.ask(2, m.Commit(ticket, [None]))
        assert reply == m.CommitReply(["stored"])
        await asyncio.sleep(1)
        assert not gateway.service._tasks

    played(work)


def test_a_commit_that_is_cancelled_leaves_the_ticket_to_its_client() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        ticket = await written(gateway, await reserved(gateway, b"a"))
        for turns in (0, 1):  # before its first step, and while it reads
            asked = gateway.ask(1, m.Commit(ticket, [None]))
            other = gateway.ask(2, m.Commit(ticket, [None]))
            for _ in range(turns):
                await asyncio.sleep(0)
            next(iter(gateway.service._tasks)).cancel()
            assert code_of(await asked) is ErrorCode.DRAINING
            assert code_of(await other) is ErrorCode.CARD_OFFLINE
            gateway.engine.audit()
        reply, _ = await gateway.ask(1, m.Commit(ticket, [None]))
        assert reply == m.CommitReply(["stored"])

    played(work)


def test_what_cannot_be_read_back_is_not_stored() -> None:
    loop = SimLoop(random.Random(1))

    async def run() -> None:
        medium = Medium(RESERVED_BYTES + LIMITS.capacity_au * UNIT, 512)
        gateway = Gateway(loop, medium, random.Random(1), SETTINGS, Parts(), lambda _: None)
        ticket = await written(gateway, await reserved(gateway, b"a"))
        gateway.device.faults = replace(Faults(), fail_probability=1.0)
        reply, _ = await gateway.ask(1, m.Commit(ticket, [None]))
        assert reply == m.CommitReply(["io_error"])
        usage = gateway.engine.usage()
        assert usage.free_au == LIMITS.capacity_au
        await gateway.kill()

    loop.run(run())
    loop.close()


def test_a_reservation_that_is_cancelled_gives_all_back() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        for turns in range(6):
            asked = gateway.ask(1, m.Reserve("", b"", [b"a"], [UNIT], 1000))
            for _ in range(turns):
                await asyncio.sleep(0)
            if gateway.service._tasks:
                next(iter(gateway.service._tasks)).cancel()
            await asked
            await asyncio.sleep(2 + LIMITS.direct_grace_ns / 1e9)
            gateway.engine.audit()
            assert gateway.engine.usage().free_au == LIMITS.capacity_au
            assert not gateway.engine.tickets.by_id

    played(work)


def test_a_ticket_lives_on_when_its_clients_connection_is_gone() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        ticket = await written(gateway, await reserved(gateway, b"a", ttl_ms=60_000))
        reply, _ = await gateway.ask(77, m.Commit(ticket, [SUM]))
        assert reply == m.CommitReply(["stored"])

    played(work)
