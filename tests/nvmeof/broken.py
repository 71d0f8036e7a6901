"""Answers of a broken controller to a read and to a write, with what the host's TermReq then says.

Each row: name, the PDUs made from (connection, command, the data that would be right), status, place of the bad field.
"""

from __future__ import annotations

from collections.abc import Callable

from xkv_nvmeof.command import SubmissionEntry
from xkv_nvmeof.pdu import FatalStatus

from .fake_target import FakeConnection

Answer = Callable[[FakeConnection, SubmissionEntry, bytes], list[bytes]]


def changed(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value) :]


BAD_READS: list[tuple[str, Answer, FatalStatus, int]] = [
    ("offset skips 512", lambda c, e, d: [c.data(e.cid, 0, d[:512]), c.data(e.cid, 1024, d[1024:], last=True)], FatalStatus.OUT_OF_RANGE, 12),
    ("overlap", lambda c, e, d: [c.data(e.cid, 0, d[:1024]), c.data(e.cid, 512, d[512:], last=True)], FatalStatus.OUT_OF_RANGE, 12),
    ("starts late", lambda c, e, d: [c.data(e.cid, 512, d[512:], last=True)], FatalStatus.OUT_OF_RANGE, 12),
    ("too much", lambda c, e, d: [c.data(e.cid, 0, d + d, last=True)], FatalStatus.OUT_OF_RANGE, 16),
    ("last too early", lambda c, e, d: [c.data(e.cid, 0, d[:512], last=True)], FatalStatus.OUT_OF_RANGE, 16),
    ("short, then success", lambda c, e, d: [c.data(e.cid, 0, d[:512]), c.response(e.cid)], FatalStatus.OUT_OF_RANGE, 0),
    ("no data, then success", lambda c, e, d: [c.response(e.cid)], FatalStatus.OUT_OF_RANGE, 0),
    ("data after the last", lambda c, e, d: [c.data(e.cid, 0, d, last=True), c.data(e.cid, len(d), b"more")], FatalStatus.SEQUENCE_ERROR, 0),
    ("data for a stranger", lambda c, e, d: [c.data(e.cid ^ 0x4000, 0, d, last=True)], FatalStatus.INVALID_HEADER_FIELD, 8),
    ("response for a stranger", lambda c, e, d: [c.response(e.cid ^ 0x4000)], FatalStatus.INVALID_HEADER_FIELD, 20),
    ("R2T for a read", lambda c, e, d: [c.r2t(e.cid, 0, 512)], FatalStatus.OUT_OF_RANGE, 16),
    ("SUCCESS without LAST", lambda c, e, d: [c.data(e.cid, 0, d, success=True)], FatalStatus.INVALID_HEADER_FIELD, 1),
    ("SUCCESS with data missing", lambda c, e, d: [c.data(e.cid, 0, d[:512], last=True, success=True)], FatalStatus.OUT_OF_RANGE, 16),
    ("HLEN wrong", lambda c, e, d: [changed(c.data(e.cid, 0, d, last=True), 2, b"\x20")], FatalStatus.INVALID_HEADER_FIELD, 2),
    ("type unknown", lambda c, e, d: [changed(c.response(e.cid), 0, b"\x0b")], FatalStatus.INVALID_HEADER_FIELD, 0),
    ("PLEN of 4 GiB", lambda c, e, d: [changed(c.data(e.cid, 0, d), 4, b"\xff" * 4)], FatalStatus.LIMIT_EXCEEDED, 4),
    ("PLEN and DATAL of 4 GiB", lambda c, e, d: [changed(changed(c.data(e.cid, 0, d), 4, b"\xff" * 4), 16, b"\xe7" + b"\xff" * 3)], FatalStatus.LIMIT_EXCEEDED, 4),
    ("garbage", lambda c, e, d: [b"HTTP/1.1 400 Bad Request\r\n\r\n"], FatalStatus.INVALID_HEADER_FIELD, 0),
]  # fmt: skip

BAD_WRITES: list[tuple[str, Answer, FatalStatus, int]] = [
    ("R2T skips", lambda c, e, _: [c.r2t(e.cid, 512, 512)], FatalStatus.OUT_OF_RANGE, 12),
    ("R2T for too much", lambda c, e, _: [c.r2t(e.cid, 0, e.sgl.length_bytes + 4)], FatalStatus.OUT_OF_RANGE, 16),
    ("R2T for nothing", lambda c, e, _: [c.r2t(e.cid, 0, 0)], FatalStatus.OUT_OF_RANGE, 16),
    ("R2T for a stranger", lambda c, e, _: [c.r2t(e.cid ^ 0x4000, 0, 512)], FatalStatus.INVALID_HEADER_FIELD, 8),
    ("two R2Ts at once", lambda c, e, _: [c.r2t(e.cid, 0, 512), c.r2t(e.cid, 512, 512)], FatalStatus.LIMIT_EXCEEDED, 0),
    ("success without taking the data", lambda c, e, _: [c.response(e.cid)], FatalStatus.SEQUENCE_ERROR, 0),
    ("read data for a write", lambda c, e, _: [c.data(e.cid, 0, b"x" * 512)], FatalStatus.OUT_OF_RANGE, 16),
]  # fmt: skip
