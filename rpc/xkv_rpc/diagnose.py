"""Why a header cannot be decoded: the slow, exact walk over a header that the fast decoder refused. Pure and bounded.

The fast decoder only says no. The sender deserves to hear which field is at fault, whether it is too large or malformed,
and the id of its request wherever that can still be read.
"""

from __future__ import annotations

import contextlib
from typing import Final, TypeGuard

import msgpack

from xkv_rpc.errors import ErrorCode, RpcError, XkvRpcError
from xkv_rpc.messages import KEY_BYTES_MAX, PROTOCOL_VERSION, TEXT_BYTES_MAX, UINT64_MAX

FIELDS_WALKED_MAX: Final = 17
"""One more than a header may have, so that the walk stays short whatever a map's length field claims."""
FIELD_NAME_CHARACTERS_MAX: Final = 64
"""Longer names are cut before they are sent back."""
_INTEGERS: Final = frozenset(
    bytes([lead]) for lead in (*range(0x80), *range(0xCC, 0xD4), *range(0xE0, 0x100))
)
"""First bytes of integers in msgpack."""
_ARRAYS: Final = frozenset({"keys", "sizes", "offsets", "lengths"})


class RequestRefusedError(XkvRpcError):
    """A message that is not a request of this protocol.

    Attributes:
        request_id: The id to answer with; None where it cannot be read.
        error: What to answer.
    """

    def __init__(self, request_id: int | None, error: RpcError) -> None:
        super().__init__(str(error))
        self.request_id = request_id
        self.error = error


def bad_request(field: str | None, message: str) -> RpcError:
    """Make the error of a malformed request; `field` is cut to a sane length, since it may come from the sender."""
    if field is not None and (len(field) > FIELD_NAME_CHARACTERS_MAX or not field.isprintable()):
        field = field[:FIELD_NAME_CHARACTERS_MAX].encode("unicode_escape").decode("ascii")
    return RpcError(ErrorCode.BAD_REQUEST, message, field=field)


def too_large(field: str | None, message: str) -> RpcError:
    """Make the error of a request beyond a limit."""
    return RpcError(ErrorCode.TOO_LARGE, message, field=field)


def is_uint64(value: object) -> TypeGuard[int]:
    """Whether this is an unsigned 64-bit integer and no boolean."""
    return type(value) is int and 0 <= value <= UINT64_MAX


def explain(header: bytes, keys_max: int, header_bytes_max: int) -> RequestRefusedError:
    """Find out what is wrong with a header that was refused.

    Args:
        header: The frame.
        keys_max: The longest array that a request may have.
        header_bytes_max: What lies beyond this many bytes is not looked at.
    """
    if not header:
        return RequestRefusedError(None, bad_request(None, "the header is empty"))
    return _Walk(header[:header_bytes_max], keys_max, whole=len(header) <= header_bytes_max).run()


def id_of(header: bytes) -> int | None:
    """Return the id of a request that is not decoded; None where it cannot be read."""
    return explain(header, 0, len(header)).request_id


class _Walk:
    """One pass over a header, field by field; every array element is read on its own, and must be a scalar."""

    def __init__(self, header: bytes, keys_max: int, *, whole: bool) -> None:
        self._header = header
        self._keys_max = keys_max
        self._whole = whole
        self._field: str | None = None
        self._unpacker = self._unpacker_of_header()

    def _unpacker_of_header(self) -> msgpack.Unpacker:
        # Elements may not be containers, so depth and allocation are bounded by the walk itself.
        unpacker = msgpack.Unpacker(
            raw=False, max_buffer_size=len(self._header), max_array_len=0, max_map_len=0, max_ext_len=0
        )
        unpacker.feed(self._header)
        return unpacker

    def run(self) -> RequestRefusedError:
        try:
            error = self._fields()
        except msgpack.OutOfData:
            error = (
                bad_request(self._field, "the header ends too early")
                if self._whole
                else too_large(None, "the header is larger than any valid one")
            )
        except ValueError:
            error = bad_request(self._field, "not valid msgpack of scalars and one level of arrays")
        found = self._envelope()
        version, request_id = found["v"], found["id"]
        if type(version) is int and version != PROTOCOL_VERSION:
            # What is wrong by our rules may be right by those of the version that the sender speaks.
            error = RpcError(ErrorCode.UNSUPPORTED_VERSION, "this server speaks version 1", field="v")
        return RequestRefusedError(request_id if is_uint64(request_id) else None, error)

    def _envelope(self) -> dict[str, object]:
        """Read `id` and `v`, also where they lie behind the fault: all other values are passed over unseen.

        None: there is none, there are several, or what comes before it cannot be passed over.
        """
        found: dict[str, object] = {"id": None, "v": None}
        seen: set[str] = set()
        unpacker = self._unpacker_of_header()
        with contextlib.suppress(ValueError, msgpack.OutOfData):
            for _ in range(min(unpacker.read_map_header(), FIELDS_WALKED_MAX)):
                name = unpacker.unpack()
                if type(name) is not str or name not in found:
                    unpacker.skip()
                    continue
                value = None
                if self._header[unpacker.tell() : unpacker.tell() + 1] in _INTEGERS:
                    value = unpacker.unpack()
                else:
                    unpacker.skip()
                found[name] = None if name in seen else value
                seen.add(name)
        return found

    def _fields(self) -> RpcError:
        first = self._header[0]
        if not (0x80 <= first <= 0x8F or first in {0xDE, 0xDF}):
            return bad_request(None, "the header is not a map")
        count = self._unpacker.read_map_header()
        seen: set[object] = set()
        for _ in range(min(count, FIELDS_WALKED_MAX)):
            self._field = None
            name = self._unpacker.unpack()
            if type(name) is not str:
                return bad_request(None, "the name of a field is not a string")
            self._field = name
            if name in seen:
                return bad_request(name, "given twice")
            seen.add(name)
            error = self._value(name)
            if error is not None:
                return error
        last, self._field = self._field, None
        if count >= FIELDS_WALKED_MAX:
            return bad_request(last, "more fields than any request has")
        if self._unpacker.tell() < len(self._header):
            return bad_request(None, "bytes after the end of the header")
        return bad_request(None, "not a valid header")

    def _value(self, name: str) -> RpcError | None:
        start = self._unpacker.tell()
        if start >= len(self._header):
            raise msgpack.OutOfData
        lead = self._header[start]
        if name in _ARRAYS and (0x90 <= lead <= 0x9F or lead in {0xDC, 0xDD}):
            count = self._unpacker.read_array_header()
            if count > self._keys_max:
                return too_large(name, f"more than {self._keys_max} elements")
            for _ in range(count):
                error = _oversized(name, self._unpacker.unpack())
                if error is not None:
                    return error
            return None
        return _oversized(name, self._unpacker.unpack())


def _oversized(name: str, value: object) -> RpcError | None:
    if len(name) > TEXT_BYTES_MAX:
        return bad_request(name, "unknown field")
    if type(value) is str and len(value.encode()) > TEXT_BYTES_MAX:
        if name == "op":
            return RpcError(ErrorCode.UNKNOWN_OP, "this server has no such operation", field="op")
        return bad_request(name, f"text longer than {TEXT_BYTES_MAX} bytes")
    if type(value) is bytes and len(value) > KEY_BYTES_MAX:
        return bad_request(name, f"binary longer than {KEY_BYTES_MAX} bytes")
    return None
