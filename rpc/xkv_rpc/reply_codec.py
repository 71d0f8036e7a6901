"""The server's side of the wire, replies: data in, header out. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgpack

from xkv_rpc.messages import (
    CHECKSUM_NAME,
    PROTOCOL_VERSION,
    AbortReply,
    CommitReply,
    DeleteReply,
    HelloReply,
    LoadReply,
    LookupReply,
    PingReply,
    ReleaseReply,
    RenewReply,
    Reply,
    ReserveReply,
    StoreReply,
    TargetInfo,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_rpc.codec import Fields
    from xkv_rpc.errors import RpcError


def _hello_fields(reply: HelloReply) -> Fields:
    target = None if reply.target is None else _target_fields(reply.target)
    fields = {
        "server": reply.server,
        "protocol": PROTOCOL_VERSION,
        "card": {
            "uuid": reply.card.uuid,
            "state": reply.card.state.value,
            "block_bytes": reply.card.block_bytes,
            "capacity_bytes": reply.card.capacity_bytes,
        },
        "limits": {
            "keys": reply.limits.keys,
            "object_bytes": reply.limits.object_bytes,
            "inline_bytes": reply.limits.inline_bytes,
            "lease_ms": reply.limits.lease_ms,
        },
        "checksum": CHECKSUM_NAME,
        "features": reply.features,
        "regions": reply.regions,
        "target": target,
    }
    if reply.direct_grace_ms is not None:
        fields["direct_grace_ms"] = reply.direct_grace_ms
    return fields


def _target_fields(target: TargetInfo) -> Fields:
    fields: Fields = {"nqn": target.nqn, "nsid": target.nsid, "addresses": target.addresses}
    if target.host_id is not None:
        fields["host_id"] = target.host_id
    return fields


def _lookup_fields(reply: LookupReply) -> Fields:
    fields: Fields = {
        "hits": reply.hits,
        "sizes": reply.sizes,
        "lease": reply.lease,
        "lease_ms": reply.lease_ms,
    }
    if reply.extents is not None:
        fields["extents"] = reply.extents
        fields["checksums"] = reply.checksums
    return fields


REPLY_FIELDS: Final[dict[type[Reply], Callable[[Any], Fields]]] = {
    HelloReply: _hello_fields,
    PingReply: lambda _: {},
    LookupReply: _lookup_fields,
    LoadReply: lambda r: {"results": r.results, "sizes": r.sizes},
    StoreReply: lambda r: {"results": r.results},
    DeleteReply: lambda r: {"deleted": r.deleted},
    RenewReply: lambda r: {"lease_ms": r.lease_ms},
    ReleaseReply: lambda _: {},
    ReserveReply: lambda r: {"results": r.results, "ticket": r.ticket, "extents": r.extents},
    CommitReply: lambda r: {"results": r.results},
    AbortReply: lambda _: {},
}


class ReplyEncoder:
    """Turns replies into headers. Not for several threads at once: it owns one packer."""

    def __init__(self) -> None:
        self._pack: Callable[[object], bytes] = msgpack.Packer(autoreset=True).pack

    def success(self, request_id: int, reply: Reply) -> bytes:
        """Encode the header of a reply."""
        return self._pack(
            {"v": PROTOCOL_VERSION, "id": request_id, "ok": True, **REPLY_FIELDS[type(reply)](reply)}
        )

    def failure(self, request_id: int | None, error: RpcError) -> bytes:
        """Encode the header of an error; `field` and `retry_after_ms` are there only where they are known."""
        body: dict[str, object] = {"code": error.code.value, "message": error.message}
        if error.field is not None:
            body["field"] = error.field
        if error.retry_after_ms is not None:
            body["retry_after_ms"] = error.retry_after_ms
        return self._pack({"v": PROTOCOL_VERSION, "id": request_id, "ok": False, "error": body})
