"""A client inside the simulation: asks over its own connection, and tells the oracle what it heard."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.direct import write_direct
from tests.sim.gateway import Gateway, GatewayGone, SimRegion
from tests.sim.values import Identity, payload_of
from xkv_rpc import messages as m
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from tests.sim.oracle import LoadAsked, Oracle
    from tests.sim.workload import Swarm

EXPECTED_ERRORS = frozenset(
    {
        ErrorCode.CARD_OFFLINE,
        ErrorCode.RECOVERING,
        ErrorCode.BUSY,
        ErrorCode.TOO_LARGE,
        ErrorCode.UNKNOWN_LEASE,
        ErrorCode.UNKNOWN_TICKET,
    }
)


class Client:
    """One connection."""

    def __init__(
        self, peer: int, swarm: Swarm, rng: random.Random, oracle: Oracle, note: Callable[[str], None]
    ) -> None:
        self.peer = peer
        self.swarm = swarm
        self.rng = rng
        self.oracle = oracle
        self.note = note
        self._regions = 0

    async def do(self, operation: str, gateway: Gateway) -> None:
        """Carry out one operation. A gateway that goes meanwhile is no failure."""
        work: dict[str, Callable[[Gateway], Awaitable[None]]] = {
            "store": self.store,
            "load": self.load,
            "lookup": self.lookup,
            "lease": self.lease,
            "leased_load": self.leased_load,
            "renew": self.renew,
            "release": self.release,
            "delete": self.delete,
            "replace": self.replace,
            "direct": partial(write_direct, self),
        }
        try:
            await work[operation](gateway)
        except GatewayGone:
            self.note(f"client {self.peer}: the gateway went during {operation}")

    def draw(self) -> list[Identity]:
        return self.swarm.identities(self.rng, self.swarm.home(self.rng))

    async def store(self, gateway: Gateway) -> None:
        oracle = self.oracle
        contents = []
        for identity in self.draw():
            version = oracle.next_version()
            contents.append(
                (identity, version, payload_of(identity, version, self.swarm.size_bytes(self.rng)))
            )
        await self.store_these(gateway, contents)

    async def store_these(self, gateway: Gateway, contents: list[tuple[Identity, int, bytes]]) -> list[str]:
        """Store (identity, version, payload), all of one home. Returns the statuses."""
        oracle, first = self.oracle, contents[0][0]
        payloads = [payload for _, _, payload in contents]
        sizes = [len(payload) for payload in payloads]
        errors_before = gateway.device.injected.errors
        attempts = oracle.store_asked(self.peer, contents)
        said = ", ".join(
            f"{identity} version {version} ({len(p)} bytes)" for identity, version, p in contents
        )
        self.note(f"client {self.peer}: store {said}")
        keys = [identity.key for identity, _, _ in contents]
        token, region = self._region(gateway, sizes)
        if region is None:
            request = m.Store(first.namespace, first.scope, keys, sizes)
        else:
            offsets = [sum(sizes[:at]) for at in range(len(sizes))]
            for offset, payload in zip(offsets, payloads, strict=True):
                region.view(offset, len(payload))[:] = payload
            request = m.Store(first.namespace, first.scope, keys, sizes, token, offsets)

        def judge(reply: m.StoreReply | RpcError) -> None:
            if isinstance(reply, m.StoreReply):
                oracle.store_answered(attempts, reply.results, errors_before)
            else:
                # Cancelled in the middle: nobody knows whether it came to be stored.
                status = "unknown" if reply.code is ErrorCode.DRAINING else "refused"
                oracle.store_answered(attempts, [status] * len(attempts), errors_before)

        reply, _ = await gateway.ask(self.peer, request, [] if region else payloads, judge)
        _close_region(token, region, gateway, self.oracle)
        self.say("store", reply)
        return reply.results if isinstance(reply, m.StoreReply) else []

    async def load(self, gateway: Gateway) -> None:
        await self.load_these(gateway, self.draw(), None)

    async def leased_load(self, gateway: Gateway) -> None:
        """Load under a lease, now and then a key that it does not cover."""
        if not self.oracle.leases:
            return
        lease = self.rng.choice(list(self.oracle.leases))
        known = self.oracle.leases[lease]
        covered = sorted(known.identities, key=str)
        chosen = self.rng.sample(covered, self.rng.randint(1, len(covered)))
        if self.rng.random() < 0.2:
            chosen += self.swarm.identities(self.rng, (known.namespace, known.scope))
        await self.load_these(gateway, chosen, lease)

    async def load_these(self, gateway: Gateway, identities: list[Identity], lease: bytes | None) -> None:
        """Load identities of one home, inline or through a region."""
        first = identities[0]
        self.note(f"client {self.peer}: load {', '.join(map(str, identities))}{' leased' if lease else ''}")
        keys = [identity.key for identity in identities]
        room_bytes = self.swarm.settings.limits.object_bytes_max
        rooms = [room_bytes if self.rng.random() < 0.95 else 100 for _ in keys]
        token, region = self._region(gateway, rooms)
        request = m.Load(first.namespace, first.scope, keys, lease)
        if region is not None:
            offsets = [sum(rooms[:at]) for at in range(len(rooms))]
            request = m.Load(first.namespace, first.scope, keys, lease, token, offsets, rooms)
        asked = self.oracle.load_asked(identities, lease)

        def judge(reply: m.LoadReply | RpcError) -> None:
            if region is not None and isinstance(reply, m.LoadReply):
                self.oracle.load_answered(asked, reply.results, self._from_region(region, request, reply))

        reply, payloads = await gateway.ask(self.peer, request, (), judge)
        if region is None and isinstance(reply, m.LoadReply):
            self._judge_inline(asked, reply, payloads)
        _close_region(token, region, gateway, self.oracle)
        self.say("load", reply)

    def _judge_inline(self, asked: LoadAsked, reply: m.LoadReply, payloads: list[bytes]) -> None:
        arrived = iter(payloads)
        found = [next(arrived) if status == "ok" else None for status in reply.results]
        if next(arrived, None) is not None or any(
            payload is not None and len(payload) != size
            for payload, size in zip(found, reply.sizes, strict=True)
        ):
            self.oracle.blame("a load whose payloads are not those of its sizes")
        self.oracle.load_answered(asked, reply.results, found)

    def _from_region(self, region: SimRegion, request: m.Load, reply: m.LoadReply) -> list[bytes | None]:
        found: list[bytes | None] = []
        for at, status in enumerate(reply.results):
            room = bytes(region.view(request.offsets[at], request.lengths[at]))
            if status == "ok":
                found.append(room[: reply.sizes[at]])
                continue
            if any(room):
                self.oracle.blame(f"a load that is {status} left bytes in the region")
            found.append(None)
        return found

    async def lookup(self, gateway: Gateway) -> None:
        await self._look_up(gateway, 0)

    async def lease(self, gateway: Gateway) -> None:
        await self._look_up(gateway, self.rng.randint(1, 2000))

    async def _look_up(self, gateway: Gateway, lease_ms: int) -> None:
        identities = self.draw()
        first = identities[0]
        mode = self.rng.choice(list(m.LookupMode))
        request = m.Lookup(first.namespace, first.scope, [i.key for i in identities], mode, lease_ms)

        def judge(reply: m.LookupReply | RpcError) -> None:
            if isinstance(reply, m.LookupReply):
                sizes = reply.sizes
                if reply.hits != sum(size is not None for size in sizes):
                    self.oracle.blame("a lookup whose hits are not those of its sizes")
                self.oracle.lookup_answered(identities, sizes, reply.lease, reply.lease_ms * 1_000_000)

        self.note(f"client {self.peer}: lookup {', '.join(map(str, identities))} lease {lease_ms} ms")
        reply, _ = await gateway.ask(self.peer, request, (), judge)
        self.say("lookup", reply)

    async def renew(self, gateway: Gateway) -> None:
        if not self.oracle.leases:
            return
        lease = self.rng.choice(list(self.oracle.leases))
        known = self.oracle.leases[lease]

        def judge(reply: m.RenewReply | RpcError) -> None:
            if isinstance(reply, m.RenewReply):
                if known.wiped:
                    self.oracle.blame("a lease that was wiped is renewed")
                known.ends_ns = gateway.clock() + reply.lease_ms * 1_000_000

        known.ends_ns = min(known.ends_ns, gateway.clock())  # until it is answered nobody knows
        reply, _ = await gateway.ask(self.peer, m.Renew(lease, self.rng.randint(1, 2000)), (), judge)
        self.say("renew", reply)

    async def release(self, gateway: Gateway) -> None:
        if not self.oracle.leases:
            return
        lease = self.rng.choice(list(self.oracle.leases))
        self.oracle.leases.pop(lease).ends_ns = 0
        reply, _ = await gateway.ask(self.peer, m.Release(lease))
        self.say("release", reply)

    async def delete(self, gateway: Gateway) -> None:
        await self.delete_these(gateway, self.draw())

    async def replace(self, gateway: Gateway) -> None:
        """Delete keys and store them anew at once: the order of a connection makes that safe."""
        identities = self.draw()
        contents = []
        for identity in identities:
            version = self.oracle.next_version()
            contents.append(
                (identity, version, payload_of(identity, version, self.swarm.size_bytes(self.rng)))
            )
        both = (self.delete_these(gateway, identities), self.store_these(gateway, contents))
        for result in await asyncio.gather(*both, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def delete_these(self, gateway: Gateway, identities: list[Identity]) -> None:
        """Delete identities of one home."""
        gone = self.oracle.removal_asked(self.peer, identities)
        first = identities[0]
        self.note(f"client {self.peer}: delete {', '.join(map(str, identities))}")

        def judge(reply: m.DeleteReply | RpcError) -> None:
            if isinstance(reply, m.DeleteReply):
                self.oracle.removal_answered(gone)

        request = m.Delete(first.namespace, first.scope, [i.key for i in identities])
        reply, _ = await gateway.ask(self.peer, request, (), judge)
        self.say("delete", reply)

    # --- inside -----------------------------------------------------------------------------------------------

    def _region(self, gateway: Gateway, sizes: list[int]) -> tuple[bytes | None, SimRegion | None]:
        if self.rng.random() >= self.swarm.region_share:
            return None, None
        self._regions += 1
        token = b"%8d%8d" % (self.peer, self._regions)
        region = gateway.regions.by_token[token] = SimRegion(sum(sizes))
        return token, region

    def say(self, what: str, reply: m.Reply | RpcError) -> None:
        if isinstance(reply, RpcError):
            self.note(f"client {self.peer}: {what} -> {reply.code}")
            if reply.code not in EXPECTED_ERRORS | {ErrorCode.DRAINING}:
                self.oracle.blame(f"a {what} was answered with {reply.code}")
        else:
            results = getattr(reply, "results", None)
            self.note(
                f"client {self.peer}: {what} -> {', '.join(results) if results is not None else 'done'}"
            )


def _close_region(token: bytes | None, region: SimRegion | None, gateway: Gateway, oracle: Oracle) -> None:
    if token is None or region is None:
        return
    if not region.guards_intact():
        oracle.blame("bytes were written outside of a region")
    del gateway.regions.by_token[token]
