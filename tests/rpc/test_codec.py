"""Requests: what the client's core encodes the server's core decodes, and everything else is refused by name."""

from __future__ import annotations

import contextlib
import os
import pickle
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rpc.some_requests import payload_lengths, requests
from xkv_rpc.client_codec import encode_request
from xkv_rpc.codec import OPTIONAL, REQUIRED, RequestDecoder
from xkv_rpc.diagnose import RequestRefusedError
from xkv_rpc.errors import ErrorCode
from xkv_rpc.messages import (
    OPS,
    Limits,
    Lookup,
    Renew,
    Request,
    Reserve,
)

DECODER = RequestDecoder(Limits(), direct=True)
WITHOUT_DIRECT = RequestDecoder(Limits())
CI = settings(derandomize=True, max_examples=150, deadline=None)

VALID: dict[str, dict[str, Any]] = {
    "hello": {"client": "c", "model": "m", "tokens_per_key": 16},
    "ping": {},
    "lookup": {
        "ns": "n",
        "scope": b"s",
        "keys": [b"a", b"b"],
        "mode": "each",
        "lease_ms": 5,
        "extents": False,
    },
    "load": {
        "ns": "n",
        "scope": b"",
        "keys": [b"a", b"b"],
        "lease": b"l" * 16,
        "region": b"r" * 16,
        "offsets": [0, 8],
        "lengths": [8, 8],
    },
    "store": {
        "ns": "",
        "scope": b"s",
        "keys": [b"a", b"b"],
        "sizes": [4, 8],
        "region": b"r" * 16,
        "offsets": [0, 4],
    },
    "delete": {"ns": "n", "scope": b"s", "keys": [b"a"]},
    "renew": {"lease": b"l" * 16, "lease_ms": 10},
    "release": {"lease": b"l" * 16},
    "reserve": {"ns": "n", "scope": b"s", "keys": [b"a", b"b"], "sizes": [4, 0], "ttl_ms": 5},
    "commit": {"ticket": b"t" * 16, "checksums": [2**64 - 1, None]},
    "abort": {"ticket": b"t" * 16, "settled": True},
}
WRONG_TYPES: list[Any] = [None, True, 1.5, {}, [[]], msgpack.ExtType(1, b""), {"a": 1}]
FIELD_OF_OP = [(op, name) for op in OPS for name in (*REQUIRED[op], *OPTIONAL[op])]


def packed(op: str, fields: dict[str, Any], **envelope: Any) -> bytes:
    return bytes(msgpack.packb({"v": 1, "id": 7, "op": op, **fields, **envelope}))


def refusal(
    raw: bytes, lengths: list[int] | None = None, decoder: RequestDecoder = DECODER
) -> RequestRefusedError:
    with pytest.raises(RequestRefusedError) as caught:
        decoder.decode(raw, lengths or [])
    return caught.value


@CI
@given(requests(), st.integers(0, 2**64 - 1))
def test_what_the_client_encodes_the_server_decodes(request_: Request, request_id: int) -> None:
    assert DECODER.decode(encode_request(request_id, request_), payload_lengths(request_)) == (
        request_id,
        request_,
    )


@pytest.mark.parametrize("op", OPS)
def test_a_request_with_every_field_is_accepted(op: str) -> None:
    request_id, request = DECODER.decode(packed(op, VALID[op]), [])
    assert request_id == 7
    assert type(request) is OPS[op]


@pytest.mark.parametrize("op", OPS)
def test_an_unknown_field_is_named(op: str) -> None:
    caught = refusal(packed(op, VALID[op], surplus=1))
    assert (caught.request_id, caught.error.code, caught.error.field) == (7, ErrorCode.BAD_REQUEST, "surplus")


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in REQUIRED[op]])
def test_a_missing_field_is_named(op: str, name: str) -> None:
    fields = {key: value for key, value in VALID[op].items() if key != name}
    caught = refusal(packed(op, fields))
    assert (caught.error.code, caught.error.field) == (ErrorCode.BAD_REQUEST, name)


@pytest.mark.parametrize(("op", "name"), FIELD_OF_OP)
def test_a_field_of_a_wrong_type_is_named(op: str, name: str) -> None:
    valid = VALID[op][name]
    for wrong in [*WRONG_TYPES, "text", b"bin", 1, -1, [], [b"a", "b"], [1, True], [0, -1]]:
        if type(wrong) is type(valid) and not isinstance(wrong, list) and not (wrong == -1 and valid != -1):
            continue
        if wrong == [] and name in {"keys", "checksums"}:
            continue  # asking for nothing is a request
        caught = refusal(packed(op, {**VALID[op], name: wrong}))
        assert caught.request_id == 7
        assert caught.error.code is ErrorCode.BAD_REQUEST
        assert caught.error.field == name, wrong


@pytest.mark.parametrize(("op", "name"), [*FIELD_OF_OP, ("ping", "v"), ("ping", "op"), ("ping", "id")])
def test_a_repeated_field_is_named(op: str, name: str) -> None:
    fields = {"v": 1, "id": 7, "op": op, **VALID[op]}
    packer = msgpack.Packer()
    body = b"".join(packer.pack(k) + packer.pack(v) for k, v in [*fields.items(), (name, fields[name])])
    caught = refusal(packer.pack_map_header(len(fields) + 1) + body)
    assert (caught.error.code, caught.error.field) == (ErrorCode.BAD_REQUEST, name)
    assert caught.request_id == (None if name == "id" else 7)


@pytest.mark.parametrize("request_id", [None, -1, True, 1.0, "7", b"7", [], -(2**63)])
def test_an_id_that_is_not_unsigned_is_refused_with_nil(request_id: Any) -> None:
    caught = refusal(packed("ping", {}, id=request_id))
    assert (caught.request_id, caught.error.code, caught.error.field) == (None, ErrorCode.BAD_REQUEST, "id")


def test_the_whole_range_of_ids_is_taken() -> None:
    for request_id in (0, 2**63, 2**64 - 1):
        assert DECODER.decode(packed("ping", {}, id=request_id), [])[0] == request_id


@pytest.mark.parametrize("version", [0, 2, -1, 2**63])
def test_another_version_is_said_to_be_unsupported_whatever_else_is_in_it(version: int) -> None:
    for extra in ({}, {"strange": {"a": {"b": 1}}}, {f"f{i}": i for i in range(40)}, {"keys": [b"x" * 999]}):
        caught = refusal(packed("ping", extra, v=version))
        assert (caught.request_id, caught.error.code) == (7, ErrorCode.UNSUPPORTED_VERSION)


@pytest.mark.parametrize("version", [True, None, "1", 1.0, b"1"])
def test_a_version_that_is_no_integer_is_a_bad_request(version: Any) -> None:
    caught = refusal(packed("ping", {}, v=version))
    assert (caught.error.code, caught.error.field) == (ErrorCode.BAD_REQUEST, "v")


@pytest.mark.parametrize(
    "op", ["", "PING", "reserve", "commit", "abort", "extents", "x" * 300, "x" * 2000, "ping\0"]
)
def test_an_operation_that_is_not_offered_is_unknown(op: str) -> None:
    caught = refusal(packed(op, {}), decoder=WITHOUT_DIRECT)
    assert (caught.request_id, caught.error.code, caught.error.field) == (7, ErrorCode.UNKNOWN_OP, "op")


def test_without_the_direct_path_extents_are_a_bad_request() -> None:
    caught = refusal(packed("lookup", {**VALID["lookup"], "extents": True}), decoder=WITHOUT_DIRECT)
    assert (caught.error.code, caught.error.field) == (ErrorCode.BAD_REQUEST, "extents")
    WITHOUT_DIRECT.decode(packed("lookup", VALID["lookup"]), [])


def test_a_ticket_beyond_the_limit_is_clamped() -> None:
    _, request = DECODER.decode(packed("reserve", {**VALID["reserve"], "ttl_ms": 2**40}), [])
    assert isinstance(request, Reserve)
    assert request.ttl_ms == 60_000


@pytest.mark.parametrize(
    ("op", "change", "field"),
    [
        ("lookup", {"ns": "_default"}, "ns"),
        ("lookup", {"scope": b"_default"}, "scope"),
        ("lookup", {"ns": "n" * 65}, "ns"),
        ("lookup", {"ns": "\u00e9" * 33}, "ns"),
        ("lookup", {"ns": "n" * 3000}, "ns"),
        ("lookup", {"scope": b"s" * 33}, "scope"),
        ("lookup", {"scope": b"s" * 999}, "scope"),
        ("lookup", {"keys": [b"a", b""]}, "keys"),
        ("lookup", {"keys": [b"a", b"k" * 257]}, "keys"),
        ("lookup", {"keys": [b"a", "b"]}, "keys"),
        ("lookup", {"mode": "Prefix"}, "mode"),
        ("lookup", {"extents": True, "lease_ms": 0}, "extents"),
        ("reserve", {"ttl_ms": 0}, "ttl_ms"),
        ("reserve", {"sizes": [1]}, "sizes"),
        ("reserve", {"keys": [b"a", b"a"]}, "keys"),
        ("commit", {"checksums": [2**64 - 1, -1]}, "checksums"),
        ("lookup", {"lease_ms": -1}, "lease_ms"),
        ("hello", {"client": "c" * 1025}, "client"),
        ("renew", {"lease_ms": 0}, "lease_ms"),
        ("store", {"keys": [b"a", b"a"]}, "keys"),
        ("store", {"sizes": [1]}, "sizes"),
        ("store", {"sizes": [1, 2, 3]}, "sizes"),
        ("store", {"sizes": [1, -2]}, "sizes"),
        ("store", {"offsets": [0]}, "offsets"),
        ("store", {"offsets": [0, 3]}, "offsets"),
        ("store", {"offsets": [4, 0], "sizes": [4, 5]}, "offsets"),
        ("load", {"offsets": [0, 7]}, "offsets"),
        ("load", {"lengths": [9, 8]}, "offsets"),
        ("load", {"lengths": [8]}, "lengths"),
    ],
)
def test_a_value_out_of_its_range_is_named(op: str, change: dict[str, Any], field: str) -> None:
    caught = refusal(packed(op, {**VALID[op], **change}))
    assert (caught.request_id, caught.error.code, caught.error.field) == (7, ErrorCode.BAD_REQUEST, field)


@pytest.mark.parametrize(("op", "name"), [("load", "offsets"), ("load", "lengths"), ("store", "offsets")])
def test_ranges_without_a_region_are_refused(op: str, name: str) -> None:
    fields = {key: VALID[op][key] for key in (*REQUIRED[op], name)}
    assert refusal(packed(op, fields)).error.field == name


@pytest.mark.parametrize("name", ["offsets", "lengths"])
def test_a_region_without_ranges_is_refused(name: str) -> None:
    fields = {key: value for key, value in VALID["load"].items() if key != name}
    assert refusal(packed("load", fields)).error.field == name


def test_ranges_that_touch_and_empty_ranges_do_not_overlap() -> None:
    fields = {**VALID["load"], "keys": [b"a", b"b", b"c"], "offsets": [8, 0, 8], "lengths": [8, 8, 0]}
    DECODER.decode(packed("load", fields), [])


def test_names_at_their_limits_are_accepted() -> None:
    fields = {"ns": "\u00e9" * 32, "scope": b"s" * 32, "keys": [b"k" * 256, b"k"]}
    DECODER.decode(packed("lookup", fields), [])


def test_a_lease_beyond_the_limit_is_clamped() -> None:
    _, request = DECODER.decode(packed("lookup", {**VALID["lookup"], "lease_ms": 2**40}), [])
    assert isinstance(request, Lookup)
    assert request.lease_ms == 60_000
    _, request = DECODER.decode(packed("renew", {"lease": b"l", "lease_ms": 2**64 - 1}), [])
    assert request == Renew(b"l", 60_000)


def test_one_key_more_than_the_limit_is_too_large_and_the_limit_is_not() -> None:
    limits = Limits(keys=8)
    decoder = RequestDecoder(limits)
    for op in ("lookup", "delete"):
        many = {**VALID[op], "keys": [b"k"] * 8}
        decoder.decode(packed(op, many), [])
        for count in (9, 5000):
            caught = refusal(packed(op, {**many, "keys": [b"k"] * count}), decoder=decoder)
            assert (caught.request_id, caught.error.code, caught.error.field) == (
                7,
                ErrorCode.TOO_LARGE,
                "keys",
            )


def test_a_header_beyond_any_valid_one_is_too_large_and_keeps_its_id() -> None:
    for fields in ({"keys": [os.urandom(256)] * 10_000}, {"ns": "n" * 5_000_000}):
        caught = refusal(packed("lookup", fields))
        assert (caught.request_id, caught.error.code) == (7, ErrorCode.TOO_LARGE)


def test_sizes_beyond_the_limits_are_too_large() -> None:
    mib = 1 << 20
    inline = {"ns": "", "scope": b"", "keys": [b"a", b"b"]}
    for sizes in ([64 * mib + 1, 0], [40 * mib, 40 * mib], [2**64 - 1, 2**64 - 1]):
        caught = refusal(packed("store", {**inline, "sizes": sizes}), sizes)
        assert (caught.error.code, caught.error.field) == (ErrorCode.TOO_LARGE, "sizes")
    DECODER.decode(packed("store", {**inline, "sizes": [64 * mib, 0]}), [64 * mib, 0])


@pytest.mark.parametrize("op", OPS)
def test_payload_frames_that_do_not_belong_are_named(op: str) -> None:
    for lengths in ([0], [4], [4] * 7):
        assert refusal(packed(op, VALID[op]), lengths).error.field == "payloads"


@pytest.mark.parametrize("lengths", [[], [4], [4, 7], [8, 4], [4, 8, 0], [4, 8, 9]])
def test_payload_frames_must_be_one_a_key_and_of_their_sizes(lengths: list[int]) -> None:
    fields = {key: VALID["store"][key] for key in ("ns", "scope", "keys", "sizes")}
    assert refusal(packed("store", fields), lengths).error.field == "payloads"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


HOSTILE = {
    "array of four billion": b"\xdd\xff\xff\xff\xff",
    "map of four billion": b"\xdf\xff\xff\xff\xff",
    "binary of four billion": b"\xc6\xff\xff\xff\xff",
    "text of four billion": b"\xdb\xff\xff\xff\xff",
    "extension of four billion": b"\xc9\xff\xff\xff\xff\x01",
    "very deep": b"\x91" * 100_000 + b"\xc0",
    "deep": b"\x91" * 500 + b"\xc0",
    "deep maps": b"\x81\xa1a" * 500 + b"\xc0",
    "deep and wide": b"\xdc\x10\x00" * 500,
    "empty": b"",
    "two maps": b"\x80\x80",
    "not UTF-8": b"\xa1\xff",
    "field not UTF-8": b"\x81\xa1\xff\x01",
    "unused type": b"\xc1",
    "pickle": pickle.dumps(Bomb()),
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "integer as name": b"\x81\x01\x02",
    "cut off": packed("lookup", VALID["lookup"])[:-3],
    "bytes after": packed("ping", {}) + b"\x00",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_a_bad_request(name: str) -> None:
    assert refusal(HOSTILE[name]).error.code is ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    "tail",
    [
        b"\xa4keys\xdd\xff\xff\xff\xff",
        b"\xa4keys" + b"\x91" * 2000,
        b"\xa4keys\x91\xa1\xff",
        b"\xa2ns\xa1\xff",
        b"\xa2ns\xd9",
        b"\xa2ns",
        b"\xa5extra\xc7\x04\x01abcd",
        b"\xa5extra\xc1",
        b"\xff",
    ],
)
def test_the_id_is_told_wherever_it_can_be_read(tail: bytes) -> None:
    caught = refusal(b"\x84\xa1v\x01\xa2id\x07\xa2op\xa6lookup" + tail)
    assert caught.request_id == 7
    assert caught.error.code in {ErrorCode.BAD_REQUEST, ErrorCode.TOO_LARGE}


def test_a_field_name_that_is_sent_back_is_short_and_printable() -> None:
    for name in ("x" * 200, "x" * 5000, "\x1b[31m\n", "\u202e"):
        field = refusal(packed("ping", {name: 1})).error.field
        assert field is not None
        assert len(field) <= 800
        assert field.isprintable()


@CI
@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(raw: bytes) -> None:
    with contextlib.suppress(RequestRefusedError):
        DECODER.decode(raw, [])


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.sampled_from(sorted(OPS)), st.data())
def test_a_damaged_request_is_decoded_or_refused(op: str, data: st.DataObject) -> None:
    raw = bytearray(packed(op, VALID[op]))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RequestRefusedError):
        request_id, request = DECODER.decode(bytes(raw), [])
        assert DECODER.decode(encode_request(request_id, request), []) == (request_id, request)
