"""The server's side of the wire, requests: header in, data out. Pure, strict and bounded.

A header is decoded in one call of msgpack with tight bounds, and batches are checked by C-speed idioms. Whatever that
refuses goes to `diagnose`, which walks the header slowly and finds out what to say about it. Nothing is ever unpickled,
and nothing is allocated because a length field asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import msgpack

from xkv_rpc.diagnose import RequestRefusedError, bad_request, explain, is_uint64, too_large
from xkv_rpc.errors import ErrorCode, RpcError
from xkv_rpc.messages import (
    DEFAULT_NAME,
    KEY_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    PROTOCOL_VERSION,
    SCOPE_BYTES_MAX,
    TEXT_BYTES_MAX,
    Abort,
    Commit,
    Delete,
    Hello,
    Limits,
    Load,
    Lookup,
    LookupMode,
    Ping,
    Release,
    Renew,
    Request,
    Reserve,
    Store,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Fields: TypeAlias = dict[str, Any]
"""A decoded header: nothing about its values is known yet, and `Any` is what a decoder honestly returns."""
_T = TypeVar("_T")

MAP_FIELDS_MAX: Final = 16
"""Fields of a header; no request has more than ten."""
_HEADER: Final = frozenset({"v", "id", "op"})
_IDENTITY: Final = ("ns", "scope", "keys")

REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "hello": ("client",),
    "ping": (),
    "lookup": _IDENTITY,
    "load": _IDENTITY,
    "store": (*_IDENTITY, "sizes"),
    "delete": _IDENTITY,
    "renew": ("lease", "lease_ms"),
    "release": ("lease",),
    "reserve": (*_IDENTITY, "sizes", "ttl_ms"),
    "commit": ("ticket", "checksums"),
    "abort": ("ticket", "settled"),
}
OPTIONAL: Final[dict[str, tuple[str, ...]]] = {
    "hello": ("model", "tokens_per_key"),
    "ping": (),
    "lookup": ("mode", "lease_ms", "extents"),
    "load": ("lease", "region", "offsets", "lengths"),
    "store": ("region", "offsets"),
    "delete": (),
    "renew": (),
    "release": (),
    "reserve": (),
    "commit": (),
    "abort": (),
}
_ALLOWED: Final = {op: _HEADER.union(REQUIRED[op], OPTIONAL[op]) for op in REQUIRED}
_MODES: Final = {mode.value: mode for mode in LookupMode}


class _RepeatedKeyMap(dict[str, Any]):
    """A map of which a key came twice. Not a dict by exact type, so every check for one refuses it."""

    repeated: str = ""


def _pairs(pairs: list[tuple[Any, Any]]) -> Fields:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    marked = _RepeatedKeyMap(fields)
    seen: set[object] = set()
    for name, _ in pairs:
        if name in seen:
            marked.repeated = name if isinstance(name, str) else repr(name)
            break
        seen.add(name)
    return marked


class RequestDecoder:
    """Turns a header, and the lengths of the payload frames that came with it, into a request; `direct`: that is offered."""

    def __init__(self, limits: Limits, *, direct: bool = False) -> None:
        self._limits = limits
        self._direct = direct
        # Key with its length header, and three integers for each key at their longest.
        self._header_bytes_max = limits.keys * (KEY_BYTES_MAX + 3 + 3 * 9) + 4096
        self._decoders: dict[str, Callable[[Fields, Sequence[int]], Request]] = {
            "hello": self._hello,
            "ping": self._ping,
            "lookup": self._lookup,
            "load": self._load,
            "store": self._store,
            "delete": self._delete,
            "renew": self._renew,
            "release": self._release,
        }
        if direct:
            self._decoders |= {"reserve": self._reserve, "commit": self._commit, "abort": self._abort}

    def decode(self, header: bytes, payload_lengths: Sequence[int]) -> tuple[int, Request]:
        """Decode one request.

        Args:
            header: Frame 0 of the message.
            payload_lengths: Bytes of each further frame; where there are more than the key limit, the rest may be missing.

        Returns:
            The request's id and the request.

        Raises:
            RequestRefusedError: Carries the error to answer and the id to answer it with (None where it cannot be read).
        """
        if len(header) > self._header_bytes_max:
            raise explain(header, self._limits.keys, self._header_bytes_max)
        try:
            fields = msgpack.unpackb(
                header,
                raw=False,
                object_pairs_hook=_pairs,
                max_array_len=self._limits.keys,
                max_map_len=MAP_FIELDS_MAX,
                max_bin_len=KEY_BYTES_MAX,
                max_str_len=TEXT_BYTES_MAX,
                max_ext_len=0,
            )
        except ValueError:  # every refusal of msgpack, bad UTF-8 among them, is one
            raise explain(header, self._limits.keys, self._header_bytes_max) from None
        if type(fields) is not dict:
            if type(fields) is _RepeatedKeyMap:
                raise _repeated(fields)
            raise RequestRefusedError(None, bad_request(None, "the header is not a map"))
        request_id = fields.get("id")
        if not is_uint64(request_id):
            error = bad_request("id", "missing" if "id" not in fields else "not an unsigned 64-bit integer")
            raise RequestRefusedError(None, error)
        try:
            return request_id, self._request(fields, payload_lengths)
        except RpcError as error:
            raise RequestRefusedError(request_id, error) from None

    def _request(self, fields: Fields, payload_lengths: Sequence[int]) -> Request:
        _version(fields)
        op = fields.get("op")
        if type(op) is not str:
            raise bad_request("op", "missing" if "op" not in fields else "not a string")
        decoder = self._decoders.get(op)
        if decoder is None:
            raise RpcError(ErrorCode.UNKNOWN_OP, "this server has no such operation", field="op")
        if not _ALLOWED[op].issuperset(fields):
            raise bad_request(min(str(name) for name in fields.keys() - _ALLOWED[op]), "unknown field")
        for name in REQUIRED[op]:
            if name not in fields:
                raise bad_request(name, "missing")
        return decoder(fields, payload_lengths)

    # --- one method an operation; `REQUIRED` fields are there

    def _hello(self, fields: Fields, lengths: Sequence[int]) -> Request:
        client = _text(fields, "client", TEXT_BYTES_MAX)
        model = _text(fields, "model", TEXT_BYTES_MAX) if "model" in fields else None
        tokens_per_key = _uint(fields, "tokens_per_key") if "tokens_per_key" in fields else None
        _no_payloads(lengths)
        return Hello(client, model, tokens_per_key)

    def _ping(self, fields: Fields, lengths: Sequence[int]) -> Request:
        del fields
        _no_payloads(lengths)
        return Ping()

    def _lookup(self, fields: Fields, lengths: Sequence[int]) -> Request:
        ns, scope, keys = self._identity(fields)
        mode = LookupMode.PREFIX
        if "mode" in fields:
            name = _exact(fields, "mode", str, "a string")
            if name not in _MODES:
                raise bad_request("mode", "neither prefix nor each")
            mode = _MODES[name]
        lease_ms = min(_uint(fields, "lease_ms"), self._limits.lease_ms) if "lease_ms" in fields else 0
        extents = "extents" in fields and _exact(fields, "extents", bool, "a boolean")
        if extents and not self._direct:
            raise bad_request("extents", "the feature `direct` is not offered")
        if extents and not lease_ms:
            raise bad_request("extents", "they stay where they are under a lease only")
        _no_payloads(lengths)
        return Lookup(ns, scope, keys, mode, lease_ms, extents)

    def _load(self, fields: Fields, lengths: Sequence[int]) -> Request:
        ns, scope, keys = self._identity(fields)
        lease = _binary(fields, "lease") if "lease" in fields else None
        _no_payloads(lengths)
        if "region" not in fields:
            _needs_region(fields, "offsets", "lengths")
            return Load(ns, scope, keys, lease)
        region = _binary(fields, "region")
        starts = _uints(fields, "offsets", len(keys))
        rooms = _uints(fields, "lengths", len(keys))
        _disjoint(starts, rooms)
        return Load(ns, scope, keys, lease, region, starts, rooms)

    def _store(self, fields: Fields, lengths: Sequence[int]) -> Request:
        ns, scope, keys = self._identity(fields)
        sizes = self._sizes(fields, keys)
        if "region" in fields:
            region = _binary(fields, "region")
            starts = _uints(fields, "offsets", len(keys))
            _disjoint(starts, sizes)
            _no_payloads(lengths)
            return Store(ns, scope, keys, sizes, region, starts)
        _needs_region(fields, "offsets")
        if sum(sizes) > self._limits.inline_bytes:
            raise too_large("sizes", f"more than {self._limits.inline_bytes} inline bytes a message")
        if len(lengths) != len(keys):
            raise bad_request("payloads", "not one payload frame a key")
        if list(lengths) != sizes:
            raise bad_request("payloads", "a payload frame has another length than its size")
        return Store(ns, scope, keys, sizes)

    def _delete(self, fields: Fields, lengths: Sequence[int]) -> Request:
        ns, scope, keys = self._identity(fields)
        _no_payloads(lengths)
        return Delete(ns, scope, keys)

    def _renew(self, fields: Fields, lengths: Sequence[int]) -> Request:
        lease = _binary(fields, "lease")
        lease_ms = _uint(fields, "lease_ms")
        if lease_ms == 0:
            raise bad_request("lease_ms", "a lease is renewed for at least 1 ms")
        _no_payloads(lengths)
        return Renew(lease, min(lease_ms, self._limits.lease_ms))

    def _release(self, fields: Fields, lengths: Sequence[int]) -> Request:
        lease = _binary(fields, "lease")
        _no_payloads(lengths)
        return Release(lease)

    def _reserve(self, fields: Fields, lengths: Sequence[int]) -> Request:
        ns, scope, keys = self._identity(fields)
        sizes = self._sizes(fields, keys)
        ttl_ms = _uint(fields, "ttl_ms")
        if ttl_ms == 0:
            raise bad_request("ttl_ms", "a ticket lives for at least 1 ms")
        _no_payloads(lengths)
        return Reserve(ns, scope, keys, sizes, min(ttl_ms, self._limits.lease_ms))

    @staticmethod
    def _commit(fields: Fields, lengths: Sequence[int]) -> Request:
        ticket = _binary(fields, "ticket")
        checksums = cast("list[int | None]", _exact(fields, "checksums", list, "an array"))
        if not all(each is None or is_uint64(each) for each in checksums):
            raise bad_request("checksums", "an element is neither nil nor an unsigned 64-bit integer")
        _no_payloads(lengths)
        return Commit(ticket, checksums)

    @staticmethod
    def _abort(fields: Fields, lengths: Sequence[int]) -> Request:
        ticket = _binary(fields, "ticket")
        settled = _exact(fields, "settled", bool, "a boolean")
        _no_payloads(lengths)
        return Abort(ticket, settled)

    def _sizes(self, fields: Fields, keys: list[bytes]) -> list[int]:
        """Read what objects are to come: each key once, with its size."""
        if len(set(keys)) != len(keys):
            raise bad_request("keys", "a key occurs twice")
        sizes = _uints(fields, "sizes", len(keys))
        if sizes and max(sizes) > self._limits.object_bytes:
            raise too_large("sizes", f"more than {self._limits.object_bytes} bytes an object")
        return sizes

    def _identity(self, fields: Fields) -> tuple[str, bytes, list[bytes]]:
        ns = _text(fields, "ns", NAMESPACE_BYTES_MAX)
        if ns == DEFAULT_NAME:
            raise bad_request("ns", "reserved; the default namespace is the empty string")
        scope = _exact(fields, "scope", bytes, "binary")
        if len(scope) > SCOPE_BYTES_MAX:
            raise bad_request("scope", f"longer than {SCOPE_BYTES_MAX} bytes")
        if scope == DEFAULT_NAME.encode():
            raise bad_request("scope", "reserved; the default scope is empty")
        keys = _exact(fields, "keys", list, "an array")
        # msgpack has refused more keys than the limit, and longer ones than KEY_BYTES_MAX. Joining them is the fastest
        # way to hear of one that is not binary: a third of what looking at the types costs.
        try:
            b"".join(keys)
        except TypeError:
            raise bad_request("keys", "a key is not binary") from None
        if not all(keys):
            raise bad_request("keys", "a key is empty")
        return ns, scope, keys


def _repeated(fields: _RepeatedKeyMap) -> RequestRefusedError:
    request_id = fields.get("id")
    readable = is_uint64(request_id) and fields.repeated != "id"
    return RequestRefusedError(request_id if readable else None, bad_request(fields.repeated, "given twice"))


def _version(fields: Fields) -> None:
    version = fields.get("v")
    if type(version) is not int:
        raise bad_request("v", "missing" if "v" not in fields else "not an integer")
    if version != PROTOCOL_VERSION:
        raise RpcError(ErrorCode.UNSUPPORTED_VERSION, "this server speaks version 1", field="v")


def _exact(fields: Fields, name: str, kind: type[_T], what: str) -> _T:
    value = fields[name]
    if type(value) is not kind:  # exact: True is not 1
        raise bad_request(name, f"not {what}")
    return value


def _text(fields: Fields, name: str, bytes_max: int) -> str:
    value = _exact(fields, name, str, "a string")
    if len(value) > bytes_max or (not value.isascii() and len(value.encode()) > bytes_max):
        raise bad_request(name, f"longer than {bytes_max} bytes of UTF-8")
    return value


def _binary(fields: Fields, name: str) -> bytes:
    """Read a token. Its length is not checked: one that has another than 16 bytes is unknown, like any other."""
    return _exact(fields, name, bytes, "binary")


def _uint(fields: Fields, name: str) -> int:
    value = _exact(fields, name, int, "an unsigned integer")
    if value < 0:
        raise bad_request(name, "negative")
    return value


def _uints(fields: Fields, name: str, count: int) -> list[int]:
    if name not in fields:
        raise bad_request(name, "missing")
    values = cast("list[int]", _exact(fields, name, list, "an array"))
    if len(values) != count:
        raise bad_request(name, "not one a key")
    if values and set(map(type, values)) != {int}:
        raise bad_request(name, "an element is not an unsigned integer")
    if values and min(values) < 0:
        raise bad_request(name, "an element is negative")
    return values


def _needs_region(fields: Fields, *names: str) -> None:
    for name in names:
        if name in fields:
            raise bad_request(name, "means nothing without a region")


def _no_payloads(lengths: Sequence[int]) -> None:
    if lengths:
        raise bad_request("payloads", "this request has no payload frames")


def _disjoint(offsets: list[int], lengths: list[int]) -> None:
    end = 0
    for start, length in sorted(zip(offsets, lengths, strict=True)):
        if length and start < end:
            raise bad_request("offsets", "ranges overlap")
        end = max(end, start + length)
