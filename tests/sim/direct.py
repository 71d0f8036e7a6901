"""Clients inside the simulation that write to the card themselves: most of them well, some of them give up, some come too late."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from tests.sim.values import payload_of
from xkv_nvmeof.blockdev import DeviceError
from xkv_rpc import messages as m
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.sim.client import Client
    from tests.sim.gateway import Gateway
    from tests.sim.oracle import Attempt

LATE_NS = 500_000_000
"""So long after the end of its ticket a client begins its last write: what has slept, or waited, in between."""
NOTICED_S = 0.01
"""By then the gateway has noticed that a ticket has ended."""


async def write_direct(client: Client, gateway: Gateway) -> None:
    """Reserve, write, and commit, or not."""
    rng, oracle = client.rng, client.oracle
    contents = []
    for identity in client.draw():
        version = oracle.next_version()
        contents.append((identity, version, payload_of(identity, version, client.swarm.size_bytes(rng))))
    first, payloads = contents[0][0], [payload for _, _, payload in contents]
    errors_before = gateway.device.injected.errors
    attempts = oracle.store_asked(client.peer, contents)
    ttl_ms = rng.choice((1, 20, 300))
    client.note(
        f"client {client.peer}: reserve {', '.join(f'{i} version {v}' for i, v, _ in contents)} for {ttl_ms} ms"
    )
    keys, sizes = [identity.key for identity, _, _ in contents], list(map(len, payloads))
    ends_ns = gateway.clock() + ttl_ms * 1_000_000

    def judge(reply: m.ReserveReply | RpcError) -> None:
        results = reply.results if isinstance(reply, m.ReserveReply) else ["refused"] * len(attempts)
        answered = [at for at, status in enumerate(results) if status != m.StoreStatus.RESERVED]
        oracle.store_answered(
            [attempts[at] for at in answered], [results[at] for at in answered], errors_before
        )

    request = m.Reserve(first.namespace, first.scope, keys, sizes, ttl_ms)
    reply, _ = await gateway.ask(client.peer, request, (), judge)
    client.say("reserve", reply)
    granted_ns = gateway.clock()
    if not isinstance(reply, m.ReserveReply) or reply.ticket is None:
        return
    mine = [at for at, status in enumerate(reply.results) if status == m.StoreStatus.RESERVED]
    held = _Held(client, gateway, reply.ticket, [attempts[at] for at in mine], errors_before, ends_ns)
    ranges = [extents for extents in reply.extents if extents is not None]
    what = rng.choice(("commit", "commit", "commit", "settled", "unsettled", "late"))
    written = what != "late" and await held.write(ranges, flush=True)
    in_time = gateway.clock() < ends_ns
    if what == "commit" and written and in_time:
        faults = client.swarm.settings.faults
        # What is read back wrongly gets the checksum of that, and is found corrupt later: only a client's own word helps.
        may_misread = (
            faults.transient_flip_probability or faults.misdirect_probability or faults.digest_probability
        )
        await held.commit([bool(may_misread) or rng.random() < 0.7 for _ in mine])
    elif what == "settled" and written:
        await held.abort(settled=True)
    elif what != "late":
        await held.abort(settled=False)
        await held.write(ranges, flush=False)
    else:
        await asyncio.sleep(max(0.0, (ends_ns - gateway.clock()) / 1e9))
        held.end_of_time(granted_ns + ttl_ms * 1_000_000)
        await held.write(ranges, flush=False)


class _Held:
    """What a client holds under a ticket."""

    def __init__(
        self,
        client: Client,
        gateway: Gateway,
        ticket: bytes,
        attempts: list[Attempt],
        errors_before: int,
        ends_ns: int,
    ) -> None:
        self._client = client
        self._gateway = gateway
        self._ticket = ticket
        self._attempts = attempts
        self._errors_before = errors_before
        self._latest_ns = ends_ns + LATE_NS

    async def write(self, ranges: Sequence[list[list[int]]], *, flush: bool) -> bool:
        """Write everything; tells whether all of it was answered, and flushed, in one incarnation of the card."""
        device = self._gateway.device
        incarnation = device.incarnation
        try:
            for extents, attempt in zip(ranges, self._attempts, strict=True):
                rest = attempt.payload.ljust(sum(length for _, length in extents), b"\0")
                for offset, length in extents:
                    if self._gateway.clock() > self._latest_ns:
                        return False
                    await self._gateway.while_it_lives(
                        partial(device.write_from, offset, [memoryview(rest[:length])])
                    )
                    rest = rest[length:]
            if flush:
                await self._gateway.while_it_lives(device.flush)
        except DeviceError:
            return False
        return device.incarnation == incarnation

    async def commit(self, told: Sequence[bool]) -> None:
        """Commit, now and then twice."""
        sums = [
            xxhash.xxh3_64_intdigest(attempt.payload) if tell else None
            for attempt, tell in zip(self._attempts, told, strict=True)
        ]
        answers = await asyncio.gather(
            *(self._ask_commit(sums) for _ in range(self._client.rng.choice((1, 1, 2)))),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        results = {tuple(answer) for answer in answers if isinstance(answer, list)}
        if len(results) > 1:
            self._client.oracle.blame(f"two answers to one commit: {results}")

    async def _ask_commit(self, sums: list[int | None]) -> list[str] | None:
        oracle, attempts = self._client.oracle, self._attempts

        def judge(reply: m.CommitReply | RpcError) -> None:
            if attempts[0].answered is not None:
                return
            if isinstance(reply, m.CommitReply):
                oracle.store_answered(attempts, reply.results, self._errors_before)
            else:
                # Also one that comes too late; and one that was cut short may have taken effect.
                unknown = reply.code in {ErrorCode.DRAINING, ErrorCode.CARD_OFFLINE}
                oracle.store_answered(attempts, ["unknown" if unknown else "refused"] * len(attempts), 0)

        request = m.Commit(self._ticket, sums)
        reply, _ = await self._gateway.ask(self._client.peer, request, (), judge)
        self._client.say("commit", reply)
        return reply.results if isinstance(reply, m.CommitReply) else None

    async def abort(self, *, settled: bool) -> None:
        """Give it up."""

        def judge(_reply: m.AbortReply | RpcError) -> None:
            self._client.oracle.store_answered(self._attempts, ["refused"] * len(self._attempts), 0)

        self._latest_ns = min(self._latest_ns, self._gateway.clock() + LATE_NS)
        request = m.Abort(self._ticket, settled)
        reply, _ = await self._gateway.ask(self._client.peer, request, (), judge)
        self._client.say("abort", reply)

    def end_of_time(self, ended_ns: int) -> None:
        """Its time is over for its client; for the gateway at `ended_ns`, which it notices soon."""

        def noticed() -> None:
            self._client.oracle.store_answered(self._attempts, ["refused"] * len(self._attempts), 0)

        delay_s = max(0, ended_ns - self._gateway.clock()) / 1e9 + NOTICED_S
        asyncio.get_running_loop().call_later(delay_s, noticed)
