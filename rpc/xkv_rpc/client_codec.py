"""The client's side of the wire: requests out, replies in. Pure.

Strict about what the protocol says of a reply, and blind to what it does not say: unknown fields are ignored, an unknown
status counts as a miss or a failure, an unknown error code as an internal one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgpack

from xkv_rpc.diagnose import is_uint64
from xkv_rpc.errors import BadReplyError, ErrorCode, RpcError
from xkv_rpc.messages import (
    OP_OF,
    PROTOCOL_VERSION,
    Abort,
    AbortReply,
    CardInfo,
    CardState,
    Commit,
    CommitReply,
    Delete,
    DeleteReply,
    Hello,
    HelloReply,
    Limits,
    Load,
    LoadReply,
    LoadStatus,
    Lookup,
    LookupMode,
    LookupReply,
    Ping,
    PingReply,
    Release,
    ReleaseReply,
    Renew,
    RenewReply,
    Reply,
    Request,
    Reserve,
    ReserveReply,
    Store,
    StoreReply,
    StoreStatus,
    TargetInfo,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Fields: TypeAlias = dict[str, Any]
_T = TypeVar("_T")

_LOAD_STATUS: Final = {status.value: status for status in LoadStatus}
_RESERVE_STATUS: Final = {status.value: status for status in StoreStatus}
_STORE_STATUS: Final = {
    value: status for value, status in _RESERVE_STATUS.items() if status is not StoreStatus.RESERVED
}
_CARD_STATE: Final = {state.value: state for state in CardState}
_ERROR_CODE: Final = {code.value: code for code in ErrorCode}
_SIZE_TYPES: Final = {int, type(None)}


# --- out --------------------------------------------------------------------------------------------------


def _hello(request: Hello) -> Fields:
    fields: Fields = {"client": request.client}
    if request.model is not None:
        fields["model"] = request.model
    if request.tokens_per_key is not None:
        fields["tokens_per_key"] = request.tokens_per_key
    return fields


def _lookup(request: Lookup) -> Fields:
    fields: Fields = {"ns": request.ns, "scope": request.scope, "keys": request.keys}
    if request.mode is not LookupMode.PREFIX:
        fields["mode"] = request.mode.value
    if request.lease_ms:
        fields["lease_ms"] = request.lease_ms
    if request.extents:
        fields["extents"] = True
    return fields


def _load(request: Load) -> Fields:
    fields: Fields = {"ns": request.ns, "scope": request.scope, "keys": request.keys}
    if request.lease is not None:
        fields["lease"] = request.lease
    if request.region is not None:
        fields["region"] = request.region
        fields["offsets"] = request.offsets
        fields["lengths"] = request.lengths
    return fields


def _store(request: Store) -> Fields:
    fields: Fields = {
        "ns": request.ns,
        "scope": request.scope,
        "keys": request.keys,
        "sizes": request.sizes,
    }
    if request.region is not None:
        fields["region"] = request.region
        fields["offsets"] = request.offsets
    return fields


REQUEST_FIELDS: Final[dict[type[Request], Callable[[Any], Fields]]] = {
    Hello: _hello,
    Ping: lambda _: {},
    Lookup: _lookup,
    Load: _load,
    Store: _store,
    Delete: lambda r: {"ns": r.ns, "scope": r.scope, "keys": r.keys},
    Renew: lambda r: {"lease": r.lease, "lease_ms": r.lease_ms},
    Release: lambda r: {"lease": r.lease},
    Reserve: lambda r: {
        "ns": r.ns,
        "scope": r.scope,
        "keys": r.keys,
        "sizes": r.sizes,
        "ttl_ms": r.ttl_ms,
    },
    Commit: lambda r: {"ticket": r.ticket, "checksums": r.checksums},
    Abort: lambda r: {"ticket": r.ticket, "settled": r.settled},
}


def encode_request(request_id: int, request: Request) -> bytes:
    """Encode the header of a request.

    Raises:
        TypeError: A field has a value that msgpack cannot carry.
        OverflowError: An integer has more than 64 bits.
    """
    kind = type(request)
    packed: bytes = msgpack.packb(
        {"v": PROTOCOL_VERSION, "id": request_id, "op": OP_OF[kind], **REQUEST_FIELDS[kind](request)}
    )
    return packed


# --- in ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplyHeader:
    """A reply of which only the envelope has been checked."""

    request_id: int | None
    fields: Fields
    error: RpcError | None
    """None: the request succeeded."""


def decode_reply(header: bytes) -> ReplyHeader:
    """Decode the envelope of a reply.

    Raises:
        BadReplyError: It is not a reply of this protocol.
    """
    try:
        fields = msgpack.unpackb(header, raw=False)
    except ValueError:
        raise BadReplyError("the reply is not valid msgpack") from None
    if type(fields) is not dict or fields.get("v") != PROTOCOL_VERSION:
        raise BadReplyError("the reply is not one of protocol 1")
    request_id = fields.get("id")
    if request_id is not None and not is_uint64(request_id):
        raise BadReplyError("the id of the reply is not an unsigned integer")
    ok = fields.get("ok")
    if ok is True:
        return ReplyHeader(request_id, fields, None)
    if ok is not False:
        raise BadReplyError("the reply does not say whether it is one of success")
    return ReplyHeader(request_id, fields, _error(fields.get("error")))


def _error(body: object) -> RpcError:
    if type(body) is not dict or type(body.get("code")) is not str:
        raise BadReplyError("the reply has no valid error")
    message, name, retry_after_ms = body.get("message"), body.get("field"), body.get("retry_after_ms")
    return RpcError(
        _ERROR_CODE.get(body["code"], ErrorCode.INTERNAL),
        message if type(message) is str else "",
        field=name if type(name) is str else None,
        retry_after_ms=retry_after_ms if is_uint64(retry_after_ms) else None,
    )


def _get(fields: Fields, name: str, kind: type[_T]) -> _T:
    value = fields.get(name)
    if type(value) is not kind:
        raise BadReplyError(f"`{name}` of the reply is missing or of a wrong type")
    return value


def _optional(fields: Fields, name: str, kind: type[_T]) -> _T | None:
    return None if fields.get(name) is None else _get(fields, name, kind)


def _texts(fields: Fields, name: str) -> list[str]:
    values = _get(fields, name, list)
    if not all(type(value) is str for value in values):
        raise BadReplyError(f"an element of `{name}` is not a string")
    return values


def _sizes(fields: Fields, count: int) -> list[int | None]:
    sizes = _get(fields, "sizes", list)
    if len(sizes) != count or not _SIZE_TYPES.issuperset(map(type, sizes)):
        raise BadReplyError("`sizes` of the reply is not one size a key")
    return sizes


def _hit_sizes(fields: Fields, count: int) -> list[int | None]:
    """Read sizes of which none is missing. Summing them finds what is no number, faster than looking at the types."""
    sizes = _get(fields, "sizes", list)
    try:
        total = sum(sizes)
    except TypeError:
        total = None
    if len(sizes) != count or type(total) is not int:
        raise BadReplyError("`sizes` of the reply is not one size a hit")
    return sizes


def _hello_reply(_: Request, fields: Fields) -> HelloReply:
    card, limits, target = (
        _get(fields, "card", dict),
        _get(fields, "limits", dict),
        _optional(fields, "target", dict),
    )
    return HelloReply(
        server=_get(fields, "server", str),
        card=CardInfo(
            uuid=_get(card, "uuid", str),
            # A state that is not known yet is none in which the card serves.
            state=_CARD_STATE.get(_get(card, "state", str), CardState.OFFLINE),
            block_bytes=_get(card, "block_bytes", int),
            capacity_bytes=_get(card, "capacity_bytes", int),
        ),
        limits=Limits(**{name: _get(limits, name, int) for name in Limits.__slots__}),
        features=_texts(fields, "features"),
        regions=_optional(fields, "regions", str),
        target=None
        if target is None
        else TargetInfo(
            _get(target, "nqn", str),
            _get(target, "nsid", int),
            [str(a) for a in _get(target, "addresses", list)],
            _optional(target, "host_id", bytes),
        ),
        direct_grace_ms=_optional(fields, "direct_grace_ms", int),
    )


def _lookup_reply(request: Lookup, fields: Fields) -> LookupReply:
    hits = _get(fields, "hits", int)
    if not 0 <= hits <= len(request.keys):
        raise BadReplyError("more hits than keys")
    prefix = request.mode is LookupMode.PREFIX
    sizes = _hit_sizes(fields, hits) if prefix else _sizes(fields, len(request.keys))
    reply = LookupReply(hits, sizes, _optional(fields, "lease", bytes), _get(fields, "lease_ms", int))
    if not request.extents or reply.lease is None:
        return reply
    extents, checksums = _get(fields, "extents", list), _get(fields, "checksums", list)
    if len(extents) != hits or len(checksums) != hits or not all(map(is_uint64, checksums)):
        raise BadReplyError("not one list of extents, and one checksum, for each hit")
    held = [size for size in sizes if size is not None]
    for ranges, size in zip(extents, held, strict=True):
        _require_ranges(ranges, size)
    return replace(reply, extents=extents, checksums=checksums)


def _require_ranges(ranges: object, size_bytes: int) -> None:
    """Refuse what is not a list of ranges that has room for so many bytes: it would be read, or written, by the client itself."""
    good = type(ranges) is list and all(
        type(pair) is list and len(pair) == 2 and all(map(is_uint64, pair)) for pair in ranges
    )
    if not good or sum(pair[1] for pair in ranges) < size_bytes:  # type: ignore[attr-defined]  # it is a list
        raise BadReplyError("extents of the reply are not ranges that hold the object")


def _results(fields: Fields, statuses: Mapping[str, _T], unknown: _T, count: int) -> list[_T]:
    results = _texts(fields, "results")
    if len(results) != count:
        raise BadReplyError("`results` of the reply is not one status a key")
    return [statuses.get(result, unknown) for result in results]


def _load_reply(request: Load, fields: Fields) -> LoadReply:
    count = len(request.keys)
    return LoadReply(
        [*_results(fields, _LOAD_STATUS, LoadStatus.MISS, count)],
        _sizes(fields, count),
    )


def _store_reply(request: Store, fields: Fields) -> StoreReply:
    return StoreReply([*_results(fields, _STORE_STATUS, StoreStatus.IO_ERROR, len(request.keys))])


def _reserve_reply(request: Reserve, fields: Fields) -> ReserveReply:
    count = len(request.keys)
    results = _results(fields, _RESERVE_STATUS, StoreStatus.IO_ERROR, count)
    ticket, extents = _optional(fields, "ticket", bytes), _get(fields, "extents", list)
    if len(extents) != count:
        raise BadReplyError("`extents` of the reply is not one a key")
    for status, size, ranges in zip(results, request.sizes, extents, strict=True):
        if status is StoreStatus.RESERVED:
            _require_ranges(ranges, size)
    if ticket is None and StoreStatus.RESERVED in results:
        raise BadReplyError("keys are reserved, and there is no ticket")
    return ReserveReply([*results], ticket, extents)


def _commit_reply(request: Commit, fields: Fields) -> CommitReply:
    return CommitReply([*_results(fields, _STORE_STATUS, StoreStatus.IO_ERROR, len(request.checksums))])


_PARSERS: Final[dict[type[Request], Callable[[Any, Fields], Reply]]] = {
    Hello: _hello_reply,
    Ping: lambda _, __: PingReply(),
    Lookup: _lookup_reply,
    Load: _load_reply,
    Store: _store_reply,
    Delete: lambda _, fields: DeleteReply(_get(fields, "deleted", int)),
    Renew: lambda _, fields: RenewReply(_get(fields, "lease_ms", int)),
    Release: lambda _, __: ReleaseReply(),
    Reserve: _reserve_reply,
    Commit: _commit_reply,
    Abort: lambda _, __: AbortReply(),
}


def parse_reply(request: Request, header: ReplyHeader) -> Reply:
    """Read a reply as the one to `request`.

    Raises:
        RpcError: It is an error.
        BadReplyError: The protocol does not allow this reply to this request.
    """
    if header.error is not None:
        raise header.error
    return _PARSERS[type(request)](request, header.fields)


# --- results ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of each key of a load."""

    statuses: list[LoadStatus]
    sizes: list[int | None]
    payloads: list[memoryview | None]
    """Inline: the bytes of each key that is `OK`, None elsewhere. Into a region: all None, the bytes are there."""


def load_result(request: Load, reply: LoadReply, payloads: list[memoryview]) -> LoadResult:
    """Deal the payload frames out to the keys that are `ok`.

    Raises:
        BadReplyError: Their number or lengths do not fit.
    """
    statuses = [LoadStatus(result) for result in reply.results]
    dealt: list[memoryview | None] = [None] * len(statuses)
    if request.region is None:
        held = [index for index, status in enumerate(statuses) if status is LoadStatus.OK]
        if len(held) != len(payloads):
            raise BadReplyError("not one payload for each key that is ok")
        for index, payload in zip(held, payloads, strict=True):
            if reply.sizes[index] != len(payload):
                raise BadReplyError("a payload has another length than its size")
            dealt[index] = payload
    elif payloads:
        raise BadReplyError("payloads came with a load into a region")
    return LoadResult(statuses, reply.sizes, dealt)
