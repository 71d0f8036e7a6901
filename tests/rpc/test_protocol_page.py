"""The page says what the code does: operations, fields, error codes, bounds; and golden messages stay as they are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgpack
import pytest

from tests.rpc.test_client_codec import HELLO_REPLY
from xkv_rpc.client_codec import encode_request
from xkv_rpc.codec import OPTIONAL, REQUIRED
from xkv_rpc.errors import ERRORS, ErrorCode, RpcError
from xkv_rpc.messages import (
    OPS,
    Abort,
    AbortReply,
    Commit,
    CommitReply,
    Delete,
    DeleteReply,
    Hello,
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
    scope_of,
)
from xkv_rpc.reply_codec import ReplyEncoder
from xkv_rpc.session import ServerBounds
from xkv_rpc.zmtp_peer import FRAMES_MAX

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "rpc" / "PROTOCOL.md").read_text()
GOLDEN: Final = ROOT / "tests" / "golden" / "control.txt"

REQUESTS: Final[dict[str, Request]] = {
    "hello": Hello("connector", "model", 16),
    "ping": Ping(),
    "lookup": Lookup("ns", b"scope", [b"k1", b"k2"], LookupMode.EACH, 5000),
    "lookup-defaults": Lookup("", b"", [b"k"]),
    "load": Load("ns", b"scope", [b"k1"], b"L" * 16),
    "load-region": Load("ns", b"scope", [b"k1"], None, b"R" * 16, [4096], [65536]),
    "store": Store("ns", b"scope", [b"k1"], [3]),
    "store-region": Store("ns", b"scope", [b"k1"], [65536], b"R" * 16, [4096]),
    "delete": Delete("ns", b"scope", [b"k1"]),
    "renew": Renew(b"L" * 16, 1000),
    "release": Release(b"L" * 16),
    "lookup-extents": Lookup("ns", b"scope", [b"k1"], LookupMode.PREFIX, 5000, extents=True),
    "reserve": Reserve("ns", b"scope", [b"k1"], [65536], 5000),
    "commit": Commit(b"T" * 16, [1, None]),
    "abort": Abort(b"T" * 16, settled=True),
}
REPLIES: Final[dict[str, Reply]] = {
    "hello": HELLO_REPLY,
    "ping": PingReply(),
    "lookup": LookupReply(1, [65536, None], b"L" * 16, 5000),
    "load": LoadReply(["ok", "miss"], [65536, None]),
    "store": StoreReply(["stored"]),
    "delete": DeleteReply(1),
    "renew": RenewReply(1000),
    "release": ReleaseReply(),
    "hello-direct": replace(
        HELLO_REPLY,
        features=["region", "direct"],
        target=TargetInfo("nqn.2026-01.test:card", 1, ["192.0.2.1:4420"], b"H" * 16),
        direct_grace_ms=30_000,
    ),
    "lookup-extents": LookupReply(1, [65536], b"L" * 16, 5000, [[[1048576, 65536]]], [2**64 - 1]),
    "reserve": ReserveReply(["reserved", "exists"], b"T" * 16, [[[1048576, 65536]], None]),
    "commit": CommitReply(["stored"]),
    "abort": AbortReply(),
}
WITH_DIRECT: Final = {"hello": "hello-direct", "lookup": "lookup-extents"}
"""Replies with the fields that only the feature `direct` brings."""
FAILURES: Final = {
    "bad_request": (7, RpcError(ErrorCode.BAD_REQUEST, "missing", field="keys")),
    "busy": (7, RpcError(ErrorCode.BUSY, "later", retry_after_ms=20)),
    "unreadable": (None, RpcError(ErrorCode.BAD_REQUEST, "the header is not a map")),
}


def table(heading: str) -> list[list[str]]:
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]


def test_the_operations_and_their_fields_are_those_of_the_code() -> None:
    rows = {row[0].strip("`"): row for row in table("Operations")}
    assert list(rows) == list(OPS)
    for op, row in rows.items():
        names = re.findall(r"`(\w+)(\??)`", row[1])
        assert tuple(name for name, optional in names if not optional) == REQUIRED[op]
        assert tuple(name for name, optional in names if optional) == OPTIONAL[op]
        names = re.findall(r"`(\w+)(\??)`", row[2])
        assert [name for name, optional in names if not optional] == fields_of(REPLIES[op])
        if op in WITH_DIRECT:
            assert [name for name, _ in names] == fields_of(REPLIES[WITH_DIRECT[op]])


def fields_of(reply: Reply) -> list[str]:
    header = msgpack.unpackb(ReplyEncoder().success(1, reply))
    return [name for name in header if name not in {"v", "id", "ok"}]


def test_the_error_codes_are_those_of_the_code() -> None:
    rows = {row[0].strip("`"): row for row in table("What is refused, and how")}
    assert list(rows) == [code.value for code in ErrorCode] == [code.value for code in ERRORS]
    for code, info in ERRORS.items():
        expected = [
            info.fault.value,
            str(info.exit_code),
            str(info.http_status),
            "yes" if info.retryable else "no",
        ]
        assert rows[code.value][1:5] == expected
    codes = [info.exit_code for info in ERRORS.values()]
    assert len(set(codes)) == len(codes)


def test_the_bounds_are_those_of_the_code() -> None:
    limits, bounds = Limits(), ServerBounds()
    values = [row[1] for row in table("Bounds")]
    mib = 1 << 20
    assert values == [
        str(limits.keys),
        f"{limits.object_bytes // mib} MiB",
        f"{limits.inline_bytes // mib} MiB",
        f"{limits.lease_ms} ms",
        "16 MiB more than an object",
        str(FRAMES_MAX),
        str(bounds.peer_requests_max),
        str(bounds.total_requests_max),
        f"{bounds.payload_bytes_max // mib} MiB",
        f"{bounds.partial_bytes_max // mib} MiB",
        f"{bounds.peer_reply_bytes_busy // mib} MiB",
        f"{bounds.peer_reply_bytes_max // mib} MiB",
    ]


def test_the_statuses_are_those_of_the_code() -> None:
    for status in (*LoadStatus, *StoreStatus):
        assert f"`{status.value}`" in PAGE


def messages() -> dict[str, bytes]:
    encoder = ReplyEncoder()
    return {
        **{f"request {name}": encode_request(7, request) for name, request in REQUESTS.items()},
        **{f"reply {name}": encoder.success(7, reply) for name, reply in REPLIES.items()},
        **{f"failure {name}": encoder.failure(*failure) for name, failure in FAILURES.items()},
    }


def test_every_message_has_the_bytes_that_it_always_had() -> None:
    golden = dict(line.rsplit(" ", 1) for line in GOLDEN.read_text().splitlines() if not line.startswith("#"))
    assert {name: raw.hex() for name, raw in messages().items()} == golden


def test_a_scope_is_made_from_a_salt_as_the_protocol_says() -> None:
    assert scope_of("-e-E44q1cFy6AnPDukBHaNvoPQh1m_w-Z9dC7NIn2E4").hex() == "32a2f15b58e32fc0fc691c82a6fbb54f"
    assert scope_of("") == b""
    assert len(scope_of("x" * 128)) == 16
    assert scope_of("a") != scope_of("A")


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129, "_default", "secret\ud800"])
def test_a_salt_that_is_refused_is_not_in_the_error(salt: str) -> None:
    with pytest.raises(ValueError, match="the salt") as caught:
        scope_of(salt)
    assert salt not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
