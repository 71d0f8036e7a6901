"""The operations as methods: what they take and give is the same for both clients, only the waiting differs."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, TypeVar

from xkv_rpc.client_codec import LoadResult, load_result
from xkv_rpc.messages import (
    Abort,
    Commit,
    CommitReply,
    Delete,
    DeleteReply,
    Hello,
    HelloReply,
    Load,
    LoadReply,
    Lookup,
    LookupMode,
    LookupReply,
    Ping,
    Release,
    Renew,
    RenewReply,
    Reply,
    Request,
    Reserve,
    ReserveReply,
    Store,
    StoreReply,
    StoreStatus,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_rpc.calls import Buffer

_R = TypeVar("_R", bound=Reply)


def _as(kind: type[_R], reply: Reply) -> _R:
    assert isinstance(reply, kind), "the parser makes the reply of the request"
    return reply


class BlockingCalls:
    """Every method: `timeout_ms` is the whole call's deadline, None for the client's own.

    Raises (every method):
        GatewayUnavailableError: No answer, or the circuit is open; a subclass says which.
        RpcError: The gateway refused.
        BadReplyError: What answers does not speak the protocol.
        ClientClosedError: The client was closed.
    """

    @abstractmethod
    def call(
        self, request: Request, payloads: Sequence[Buffer] = (), *, timeout_ms: int | None = None
    ) -> tuple[Reply, list[memoryview]]:
        """Send a request and wait for its reply and payloads."""

    def hello(
        self,
        client: str,
        *,
        model: str | None = None,
        tokens_per_key: int | None = None,
        timeout_ms: int | None = None,
    ) -> HelloReply:
        """Say who calls; hear what the gateway is and can do."""
        reply, _ = self.call(Hello(client, model, tokens_per_key), timeout_ms=timeout_ms)
        return _as(HelloReply, reply)

    def ping(self, *, timeout_ms: int | None = None) -> None:
        """Find out that the gateway answers."""
        self.call(Ping(), timeout_ms=timeout_ms)

    def lookup(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_ms: int = 0,
        extents: bool = False,
        timeout_ms: int | None = None,
    ) -> LookupReply:
        """Ask which keys are held; with `lease_ms`, and keep them there for so long; with `extents`, and say where (direct)."""
        reply, _ = self.call(Lookup(ns, scope, keys, mode, lease_ms, extents), timeout_ms=timeout_ms)
        return _as(LookupReply, reply)

    def load(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        *,
        lease: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> LoadResult:
        """Get the bytes of the keys in the reply. They are not copied: a view keeps its whole message alive."""
        request = Load(ns, scope, keys, lease)
        reply, payloads = self.call(request, timeout_ms=timeout_ms)
        return load_result(request, _as(LoadReply, reply), payloads)

    def load_into(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        region: bytes,
        offsets: list[int],
        lengths: list[int],
        *,
        lease: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> LoadResult:
        """Get the bytes of the keys into ranges of a region. A range whose status is not `OK` is zeroed."""
        request = Load(ns, scope, keys, lease, region, offsets, lengths)
        reply, payloads = self.call(request, timeout_ms=timeout_ms)
        return load_result(request, _as(LoadReply, reply), payloads)

    def store(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        payloads: Sequence[Buffer],
        *,
        timeout_ms: int | None = None,
    ) -> list[StoreStatus]:
        """Have these bytes kept, one payload a key. The payloads must not change during the call."""
        flat = [memoryview(payload).cast("B") for payload in payloads]
        request = Store(ns, scope, keys, [len(payload) for payload in flat])
        reply, _ = self.call(request, flat, timeout_ms=timeout_ms)
        return [StoreStatus(result) for result in _as(StoreReply, reply).results]

    def store_from(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        sizes: list[int],
        region: bytes,
        offsets: list[int],
        *,
        timeout_ms: int | None = None,
    ) -> list[StoreStatus]:
        """Have ranges of a region kept. They must not change before the call has ended with an answer."""
        reply, _ = self.call(Store(ns, scope, keys, sizes, region, offsets), timeout_ms=timeout_ms)
        return [StoreStatus(result) for result in _as(StoreReply, reply).results]

    def delete(self, ns: str, scope: bytes, keys: list[bytes], *, timeout_ms: int | None = None) -> int:
        """Have the keys forgotten; returns how many were held."""
        reply, _ = self.call(Delete(ns, scope, keys), timeout_ms=timeout_ms)
        return _as(DeleteReply, reply).deleted

    def renew(self, lease: bytes, lease_ms: int, *, timeout_ms: int | None = None) -> int:
        """Let a lease live on; returns for how many milliseconds from now."""
        reply, _ = self.call(Renew(lease, lease_ms), timeout_ms=timeout_ms)
        return _as(RenewReply, reply).lease_ms

    def release(self, lease: bytes, *, timeout_ms: int | None = None) -> None:
        """End a lease."""
        self.call(Release(lease), timeout_ms=timeout_ms)

    def reserve(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        sizes: list[int],
        *,
        ttl_ms: int,
        timeout_ms: int | None = None,
    ) -> ReserveReply:
        """Have room made that the caller writes to itself (direct).

        It may be written to until `ttl_ms`, or `limits.lease_ms` of `hello` if that is less, after this call was made.
        """
        reply, _ = self.call(Reserve(ns, scope, keys, sizes, ttl_ms), timeout_ms=timeout_ms)
        return _as(ReserveReply, reply)

    def commit(
        self, ticket: bytes, checksums: Sequence[int | None], *, timeout_ms: int | None = None
    ) -> list[StoreStatus]:
        """Say that the reserved keys are written and flushed, and that no write to them can be executed any more. May be repeated.

        Takes the XXH3-64 of each; None: what is there now is read and taken for it.
        """
        reply, _ = self.call(Commit(ticket, list(checksums)), timeout_ms=timeout_ms)
        return [StoreStatus(result) for result in _as(CommitReply, reply).results]

    def abort(self, ticket: bytes, *, settled: bool, timeout_ms: int | None = None) -> None:
        """Give reserved room back; `settled`: all writes to it have been answered, on associations that have not ended."""
        self.call(Abort(ticket, settled), timeout_ms=timeout_ms)


class AsyncCalls:
    """Every method: `timeout_ms` is the whole call's deadline, None for the client's own.

    Raises (every method):
        GatewayUnavailableError: No answer, or the circuit is open; a subclass says which.
        RpcError: The gateway refused.
        BadReplyError: What answers does not speak the protocol.
        ClientClosedError: The client was closed.
    """

    @abstractmethod
    async def call(
        self, request: Request, payloads: Sequence[Buffer] = (), *, timeout_ms: int | None = None
    ) -> tuple[Reply, list[memoryview]]:
        """Send a request and wait for its reply and payloads."""

    async def hello(
        self,
        client: str,
        *,
        model: str | None = None,
        tokens_per_key: int | None = None,
        timeout_ms: int | None = None,
    ) -> HelloReply:
        """Say who calls; hear what the gateway is and can do."""
        reply, _ = await self.call(Hello(client, model, tokens_per_key), timeout_ms=timeout_ms)
        return _as(HelloReply, reply)

    async def ping(self, *, timeout_ms: int | None = None) -> None:
        """Find out that the gateway answers."""
        await self.call(Ping(), timeout_ms=timeout_ms)

    async def lookup(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_ms: int = 0,
        extents: bool = False,
        timeout_ms: int | None = None,
    ) -> LookupReply:
        """Ask which keys are held; with `lease_ms`, and keep them there for so long; with `extents`, and say where (direct)."""
        reply, _ = await self.call(Lookup(ns, scope, keys, mode, lease_ms, extents), timeout_ms=timeout_ms)
        return _as(LookupReply, reply)

    async def load(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        *,
        lease: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> LoadResult:
        """Get the bytes of the keys in the reply. They are not copied: a view keeps its whole message alive."""
        request = Load(ns, scope, keys, lease)
        reply, payloads = await self.call(request, timeout_ms=timeout_ms)
        return load_result(request, _as(LoadReply, reply), payloads)

    async def load_into(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        region: bytes,
        offsets: list[int],
        lengths: list[int],
        *,
        lease: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> LoadResult:
        """Get the bytes of the keys into ranges of a region. A range whose status is not `OK` is zeroed."""
        request = Load(ns, scope, keys, lease, region, offsets, lengths)
        reply, payloads = await self.call(request, timeout_ms=timeout_ms)
        return load_result(request, _as(LoadReply, reply), payloads)

    async def store(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        payloads: Sequence[Buffer],
        *,
        timeout_ms: int | None = None,
    ) -> list[StoreStatus]:
        """Have these bytes kept, one payload a key. The payloads must not change during the call."""
        flat = [memoryview(payload).cast("B") for payload in payloads]
        request = Store(ns, scope, keys, [len(payload) for payload in flat])
        reply, _ = await self.call(request, flat, timeout_ms=timeout_ms)
        return [StoreStatus(result) for result in _as(StoreReply, reply).results]

    async def store_from(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        sizes: list[int],
        region: bytes,
        offsets: list[int],
        *,
        timeout_ms: int | None = None,
    ) -> list[StoreStatus]:
        """Have ranges of a region kept. They must not change before the call has ended with an answer."""
        reply, _ = await self.call(Store(ns, scope, keys, sizes, region, offsets), timeout_ms=timeout_ms)
        return [StoreStatus(result) for result in _as(StoreReply, reply).results]

    async def delete(self, ns: str, scope: bytes, keys: list[bytes], *, timeout_ms: int | None = None) -> int:
        """Have the keys forgotten; returns how many were held."""
        reply, _ = await self.call(Delete(ns, scope, keys), timeout_ms=timeout_ms)
        return _as(DeleteReply, reply).deleted

    async def renew(self, lease: bytes, lease_ms: int, *, timeout_ms: int | None = None) -> int:
        """Let a lease live on; returns for how many milliseconds from now."""
        reply, _ = await self.call(Renew(lease, lease_ms), timeout_ms=timeout_ms)
        return _as(RenewReply, reply).lease_ms

    async def release(self, lease: bytes, *, timeout_ms: int | None = None) -> None:
        """End a lease."""
        await self.call(Release(lease), timeout_ms=timeout_ms)

    async def reserve(
        self,
        ns: str,
        scope: bytes,
        keys: list[bytes],
        sizes: list[int],
        *,
        ttl_ms: int,
        timeout_ms: int | None = None,
    ) -> ReserveReply:
        """Have room made that the caller writes to itself (direct).

        It may be written to until `ttl_ms`, or `limits.lease_ms` of `hello` if that is less, after this call was made.
        """
        reply, _ = await self.call(Reserve(ns, scope, keys, sizes, ttl_ms), timeout_ms=timeout_ms)
        return _as(ReserveReply, reply)

    async def commit(
        self, ticket: bytes, checksums: Sequence[int | None], *, timeout_ms: int | None = None
    ) -> list[StoreStatus]:
        """Say that the reserved keys are written and flushed, and that no write to them can be executed any more. May be repeated.

        Takes the XXH3-64 of each; None: what is there now is read and taken for it.
        """
        reply, _ = await self.call(Commit(ticket, list(checksums)), timeout_ms=timeout_ms)
        return [StoreStatus(result) for result in _as(CommitReply, reply).results]

    async def abort(self, ticket: bytes, *, settled: bool, timeout_ms: int | None = None) -> None:
        """Give reserved room back; `settled`: all writes to it have been answered, on associations that have not ended."""
        await self.call(Abort(ticket, settled), timeout_ms=timeout_ms)
