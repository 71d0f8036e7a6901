"""Framing: the same events however the bytes are cut, and a refusal with the right place of every bad header."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_nvmeof import digest
from xkv_nvmeof.framing import DataEnd, FrameReader, controller_limits, host_limits
from xkv_nvmeof.pdu import (
    R2T,
    C2HData,
    C2HTermReq,
    CapsuleCmd,
    CapsuleResp,
    FatalStatus,
    H2CData,
    ICReq,
    ICResp,
    Pdu,
    PeerViolation,
    WireFormat,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable

WIRES = [
    WireFormat(header, data, align) for header in (False, True) for data in (False, True) for align in (4, 64)
]


def with_data(pdu: Pdu, payload: bytes, wire: WireFormat) -> bytes:
    tail = digest.to_wire(digest.crc32c(payload)) if wire.data_digest else b""
    return encode(pdu, wire) + payload + tail


def controller_stream(wire: WireFormat) -> bytes:
    payload = bytes(range(200))
    return (
        encode(ICResp(1, wire.header_digest, wire.data_digest))
        + with_data(C2HData(5, 0, 200, True, True), payload, wire)
        + encode(CapsuleResp(b"x" * 16), wire)
        + encode(R2T(1, 2, 3, 4), wire)
        + with_data(C2HData(6, 0, 3, False, False), b"abc", wire)
        + encode(C2HTermReq(1, 2, b"offending header"))
    )


def host_stream(wire: WireFormat) -> bytes:
    return (
        encode(ICReq(1, wire.header_digest, wire.data_digest))
        + with_data(CapsuleCmd(b"s" * 64, 100), b"d" * 100, wire)
        + encode(CapsuleCmd(b"t" * 64), wire)
        + with_data(H2CData(1, 2, 0, 64, True), b"e" * 64, wire)
    )


def parse(reader: FrameReader, stream: bytes, wire: WireFormat, cut: Callable[[], int]) -> list[object]:
    """Feed `stream` in chunks of `cut()` bytes; adjacent data is joined."""
    events: list[object] = []
    view, at = memoryview(stream), 0
    while at < len(view):
        size = cut()
        reader.feed(view[at : at + size])
        at += size
        while (event := reader.next_event()) is not None:
            if isinstance(event, ICReq | ICResp):
                reader.establish(wire)
            if not isinstance(event, memoryview):
                events.append(event)
            elif events and isinstance(events[-1], bytes):
                events[-1] += bytes(event)
            else:
                events.append(bytes(event))
    return events


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("side", ["host", "controller"])
def test_byte_by_byte_gives_the_same_as_all_at_once(side: str, wire: WireFormat) -> None:
    limits, stream = (
        (host_limits(1000), controller_stream(wire))
        if side == "host"
        else (controller_limits(1000, 1000), host_stream(wire))
    )
    whole = parse(FrameReader(limits), stream, wire, lambda: len(stream))
    assert parse(FrameReader(limits), stream, wire, lambda: 1) == whole
    rng = random.Random(7)
    for _ in range(20):
        assert parse(FrameReader(limits), stream, wire, lambda: rng.randint(1, 90)) == whole
    assert len(whole) == (10 if side == "host" else 8)


def established(wire: WireFormat = WIRES[0]) -> FrameReader:
    reader = FrameReader(host_limits(1000))
    reader.feed(memoryview(encode(ICResp(1, wire.header_digest, wire.data_digest))))
    assert isinstance(reader.next_event(), ICResp)
    reader.establish(wire)
    return reader


def drain(reader: FrameReader, chunks: list[bytes]) -> None:
    for chunk in chunks:
        reader.feed(memoryview(chunk))
        while reader.next_event() is not None:
            pass


def changed(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value) :]


DATA = with_data(C2HData(5, 0, 8, True, False), b"12345678", WIRES[0])
RESPONSE = encode(CapsuleResp(bytes(16)))
BAD: list[tuple[str, bytes, FatalStatus, int]] = [
    ("unknown type", changed(RESPONSE, 0, b"\x0a"), FatalStatus.INVALID_HEADER_FIELD, 0),
    ("a type that only hosts send", encode(CapsuleCmd(bytes(64))), FatalStatus.INVALID_HEADER_FIELD, 0),
    ("a second setup", encode(ICResp()), FatalStatus.SEQUENCE_ERROR, 0),
    ("a flag that the type has not", changed(RESPONSE, 1, b"\x04"), FatalStatus.INVALID_HEADER_FIELD, 1),
    ("a digest flag without a digest", changed(RESPONSE, 1, b"\x01"), FatalStatus.INVALID_HEADER_FIELD, 1),
    ("a data digest flag without one", changed(DATA, 1, b"\x06"), FatalStatus.INVALID_HEADER_FIELD, 1),
    ("HLEN too small", changed(DATA, 2, b"\x17"), FatalStatus.INVALID_HEADER_FIELD, 2),
    ("HLEN too large", changed(RESPONSE, 2, b"\x20"), FatalStatus.INVALID_HEADER_FIELD, 2),
    ("PDO inside the header", changed(DATA, 3, b"\x14"), FatalStatus.INVALID_HEADER_FIELD, 3),
    ("PDO not aligned", changed(DATA, 3, b"\x1a"), FatalStatus.INVALID_HEADER_FIELD, 3),
    ("PLEN of 4 GiB", changed(DATA, 4, b"\xff\xff\xff\xff"), FatalStatus.LIMIT_EXCEEDED, 4),
    ("PLEN without data", changed(DATA, 4, b"\x18\0\0\0"), FatalStatus.INVALID_HEADER_FIELD, 4),
    ("PLEN too large for a response", changed(RESPONSE, 4, b"\x19\0\0\0"), FatalStatus.INVALID_HEADER_FIELD, 4),
    ("PLEN too small for a response", changed(RESPONSE, 4, b"\x10\0\0\0"), FatalStatus.INVALID_HEADER_FIELD, 4),
    ("DATAL not what PLEN says", changed(DATA, 16, b"\x09"), FatalStatus.INVALID_HEADER_FIELD, 16),
    ("a termination with too much", changed(encode(C2HTermReq(1, 0, b"x")), 4, b"\xff\xff\0\0"), FatalStatus.INVALID_HEADER_FIELD, 4),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "status", "place"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_header_is_refused_with_its_place(bad: bytes, status: FatalStatus, place: int) -> None:
    for chunks in ([bad], [bad[i : i + 1] for i in range(len(bad))]):
        reader = established()
        with pytest.raises(PeerViolation) as caught:
            drain(reader, chunks)
        assert (caught.value.fatal_status, caught.value.field_offset_bytes) == (status, place)
        assert bad.startswith(caught.value.header)


def test_nothing_but_the_setup_comes_first() -> None:
    reader = FrameReader(host_limits(1000))
    reader.feed(memoryview(RESPONSE))
    with pytest.raises(PeerViolation) as caught:
        reader.next_event()
    assert caught.value.fatal_status is FatalStatus.SEQUENCE_ERROR


def test_a_flipped_header_bit_is_a_header_digest_error_that_tells_the_digest() -> None:
    wire = WireFormat(header_digest=True)
    good = encode(CapsuleResp(bytes(16)), wire)
    for bit in range(8 * 8, 24 * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        reader = established(wire)
        reader.feed(memoryview(bad))
        with pytest.raises(PeerViolation) as caught:
            reader.next_event()
        assert caught.value.fatal_status is FatalStatus.HEADER_DIGEST_ERROR
        assert caught.value.field_offset_bytes == digest.from_wire(good, 24)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_flipped_data_bit_spoils_the_data_and_not_the_stream(size: int) -> None:
    wire = WireFormat(data_digest=True)
    stream = bytearray(with_data(C2HData(5, 0, 8, True, False), b"12345678", wire))
    stream[26] ^= 0x10
    stream += encode(CapsuleResp(bytes(16)), wire)
    events = parse(established(wire), bytes(stream), wire, lambda: size)
    assert events[2:] == [DataEnd.CORRUPT, CapsuleResp(bytes(16))]


@pytest.mark.parametrize("wire", WIRES, ids=str)
@given(data=st.data())
@settings(max_examples=40, derandomize=True, deadline=None)
def test_data_received_past_the_parser_counts_like_data_through_it(
    wire: WireFormat, data: st.DataObject
) -> None:
    payload = data.draw(st.binary(min_size=1, max_size=300))
    stream = memoryview(
        with_data(C2HData(5, 0, len(payload), True, False), payload, wire) + encode(R2T(1, 2, 3, 4), wire)
    )
    reader, found, at = established(wire), bytearray(), 0
    events: list[object] = []
    while at < len(stream):
        pending = reader.data_pending_bytes
        if pending and data.draw(st.booleans()):
            piece = stream[at : at + data.draw(st.integers(1, pending))]
            reader.data_placed(piece)
            found += piece
            reader.feed(memoryview(b""))
        else:
            piece = stream[at : at + data.draw(st.integers(1, 100))]
            reader.feed(piece)
        at += len(piece)
        while (event := reader.next_event()) is not None:
            if isinstance(event, memoryview):
                found += event
            else:
                events.append(event)
    assert bytes(found) == payload
    assert events == [C2HData(5, 0, len(payload), True, False), DataEnd.INTACT, R2T(1, 2, 3, 4)]
