"""Replies: what the server's core encodes the client's core reads, and what is new to it does not disturb it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_rpc.client_codec import decode_reply, load_result, parse_reply
from xkv_rpc.errors import BadReplyError, ErrorCode, RpcError
from xkv_rpc.messages import (
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
    TargetInfo,
)
from xkv_rpc.reply_codec import ReplyEncoder

HELLO_REPLY = HelloReply(
    "xkv-gateway 0.1.0",
    CardInfo("00000000-0000-4000-8000-000000000001", CardState.ONLINE, 4096, 1 << 34),
    Limits(),
    ["region"],
    "/run/regions.sock",
    TargetInfo("nqn.2026-01.test:card", 1, ["192.0.2.1:4420"]),
)
PAIRS: list[tuple[Request, Reply]] = [
    (Hello("c"), HELLO_REPLY),
    (Hello("c"), HelloReply("s", CardInfo("", CardState.OFFLINE, 0, 0), Limits(1, 2, 3, 4))),
    (Ping(), PingReply()),
    (Lookup("", b"", [b"a", b"b"]), LookupReply(1, [5], b"L" * 16, 100)),
    (Lookup("", b"", [b"a", b"b"], LookupMode.EACH), LookupReply(1, [None, 5])),
    (Load("", b"", [b"a", b"b"]), LoadReply(["ok", "miss"], [5, None])),
    (Store("", b"", [b"a"], [1]), StoreReply(["exists"])),
    (Delete("", b"", [b"a"]), DeleteReply(1)),
    (Renew(b"L", 5), RenewReply(5)),
    (Release(b"L"), ReleaseReply()),
    (
        Lookup("", b"", [b"a", b"b"], LookupMode.EACH, 5, extents=True),
        LookupReply(1, [None, 5], b"L" * 16, 5, [[[4096, 4096], [0, 4096]]], [2**64 - 1]),
    ),
    (Lookup("", b"", [b"a"], LookupMode.PREFIX, 5, extents=True), LookupReply(1, [5])),
    (
        Reserve("", b"", [b"a", b"b", b"c"], [5, 5, 0], 9),
        ReserveReply(["reserved", "exists", "reserved"], b"T" * 16, [[[0, 4096]], None, []]),
    ),
    (Reserve("", b"", [b"a"], [5], 9), ReserveReply(["no_space"], None, [None])),
    (Commit(b"T", [1, None]), CommitReply(["stored", "cancelled"])),
    (Abort(b"T", settled=True), AbortReply()),
    (
        Hello("c"),
        replace(
            HELLO_REPLY,
            features=["region", "direct"],
            target=TargetInfo("nqn.2026-01.test:card", 1, ["192.0.2.1:4420"], b"H" * 16),
            direct_grace_ms=30_000,
        ),
    ),
]
RESERVE = Reserve("", b"", [b"a"], [5000], 9)
LOOKUP_EXTENTS = Lookup("", b"", [b"a"], LookupMode.PREFIX, 5, extents=True)
LOAD = Load("", b"", [b"a", b"b"])


def reply(**fields: Any) -> bytes:
    return bytes(msgpack.packb({"v": 1, "id": 7, "ok": True, **fields}))


@pytest.mark.parametrize(("request_", "reply_"), PAIRS)
def test_what_the_server_encodes_the_client_reads(request_: Request, reply_: Reply) -> None:
    header = decode_reply(ReplyEncoder().success(7, reply_))
    assert header.request_id == 7
    assert parse_reply(request_, header) == reply_


@pytest.mark.parametrize(("request_", "reply_"), PAIRS)
def test_fields_that_are_new_to_the_client_are_ignored(request_: Request, reply_: Reply) -> None:
    fields = msgpack.unpackb(ReplyEncoder().success(7, reply_))
    fields["new"] = {"a": [1]}
    for nested in ("card", "limits", "target"):
        if isinstance(fields.get(nested), dict):
            fields[nested]["new"] = 1
    assert parse_reply(request_, decode_reply(msgpack.packb(fields))) == reply_


def test_a_status_that_is_new_to_the_client_is_a_miss_or_a_failure() -> None:
    load = parse_reply(LOAD, decode_reply(reply(results=["ok", "teleported"], sizes=[1, 2])))
    assert load == LoadReply(["ok", "miss"], [1, 2])
    store = parse_reply(Store("", b"", [b"a"], [1]), decode_reply(reply(results=["teleported"])))
    assert store == StoreReply(["io_error"])
    reserved = parse_reply(Store("", b"", [b"a"], [1]), decode_reply(reply(results=["reserved"])))
    assert reserved == StoreReply(["io_error"]), "only of what was reserved"
    fields = msgpack.unpackb(ReplyEncoder().success(7, HELLO_REPLY))
    fields["card"]["state"] = "dreaming"
    hello = parse_reply(Hello("c"), decode_reply(msgpack.packb(fields)))
    assert isinstance(hello, HelloReply)
    assert hello.card.state is CardState.OFFLINE


def test_an_error_keeps_its_fields_and_an_unknown_code_is_internal() -> None:
    error = RpcError(ErrorCode.BUSY, "later", field="keys", retry_after_ms=20)
    with pytest.raises(RpcError) as caught:
        parse_reply(Ping(), decode_reply(ReplyEncoder().failure(7, error)))
    assert vars(caught.value) == vars(error)
    raw = msgpack.packb(
        {"v": 1, "id": None, "ok": False, "error": {"code": "tired", "message": 5, "field": 5}}
    )
    with pytest.raises(RpcError) as caught:
        parse_reply(Ping(), decode_reply(raw))
    assert (caught.value.code, caught.value.field) == (ErrorCode.INTERNAL, None)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 2000,
        b"\x80\x80",
        reply(v=2),
        reply(id=-1),
        reply(id="7"),
        reply(ok=1),
        reply(ok=False),
        reply(ok=False, error=[]),
        reply(ok=False, error={"message": "m"}),
    ],
)
def test_what_is_no_reply_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(BadReplyError):
        decode_reply(raw)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (Lookup("", b"", [b"a"]), {"hits": 2, "sizes": [1, 1], "lease": None, "lease_ms": 0}),
        (Lookup("", b"", [b"a"]), {"hits": 1, "sizes": [], "lease": None, "lease_ms": 0}),
        (Lookup("", b"", [b"a"]), {"hits": True, "sizes": [1], "lease": None, "lease_ms": 0}),
        (Lookup("", b"", [b"a"]), {"hits": 1, "sizes": ["1"], "lease": None, "lease_ms": 0}),
        (Lookup("", b"", [b"a"]), {"hits": 1, "sizes": [1], "lease": "x", "lease_ms": 0}),
        (LOAD, {"results": ["ok"], "sizes": [1, 2]}),
        (LOAD, {"results": ["ok", 1], "sizes": [1, 2]}),
        (LOAD, {"results": ["ok", "ok"], "sizes": [1]}),
        (Store("", b"", [b"a"], [1]), {}),
        (Delete("", b"", [b"a"]), {"deleted": None}),
        (Hello("c"), {"server": "s"}),
        (RESERVE, {"results": ["reserved"], "ticket": None, "extents": [[[0, 8192]]]}),
        (RESERVE, {"results": ["reserved"], "ticket": b"T", "extents": [[[0, 4096]]]}),
        (RESERVE, {"results": ["reserved"], "ticket": b"T", "extents": [[[0, -8192]]]}),
        (RESERVE, {"results": ["reserved"], "ticket": b"T", "extents": [None]}),
        (RESERVE, {"results": ["reserved"], "ticket": b"T", "extents": []}),
        (Commit(b"T", [1]), {"results": []}),
        (LOOKUP_EXTENTS, {"hits": 1, "sizes": [5], "lease": b"L", "lease_ms": 5}),
        (
            LOOKUP_EXTENTS,
            {"hits": 1, "sizes": [5], "lease": b"L", "lease_ms": 5, "extents": [[[0]]], "checksums": [1]},
        ),
        (
            LOOKUP_EXTENTS,
            {"hits": 1, "sizes": [5], "lease": b"L", "lease_ms": 5, "extents": [[[0, 9]]], "checksums": []},
        ),
    ],
)
def test_a_reply_that_does_not_fit_its_request_is_refused(request_: Request, fields: dict[str, Any]) -> None:
    with pytest.raises(BadReplyError):
        parse_reply(request_, decode_reply(reply(**fields)))


def test_payloads_are_dealt_to_the_keys_that_are_ok() -> None:
    frame = memoryview(b"12345")
    result = load_result(LOAD, LoadReply(["miss", "ok"], [None, 5]), [frame])
    assert result.payloads == [None, frame]
    for results, sizes, frames in (
        (["ok", "ok"], [5, 5], [frame]),
        (["miss", "miss"], [None, None], [frame]),
        (["ok", "miss"], [4, None], [frame]),
    ):
        with pytest.raises(BadReplyError):
            load_result(LOAD, LoadReply(results, list(sizes)), frames)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.sampled_from(PAIRS), st.data())
def test_a_damaged_reply_is_read_or_refused(pair: tuple[Request, Reply], data: st.DataObject) -> None:
    raw = bytearray(ReplyEncoder().success(7, pair[1]))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadReplyError, RpcError):
        parse_reply(pair[0], decode_reply(bytes(raw)))
