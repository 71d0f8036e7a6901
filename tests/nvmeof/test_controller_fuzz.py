"""Invariant: whatever bytes a host sends, the core raises nothing, ends or answers, and keeps no buffer at the end.

Runs from a seed for as many rounds as are named below; `XKV_FUZZ_ROUNDS` asks for more.
"""

from __future__ import annotations

import os
from random import Random

import pytest

from tests.nvmeof.card_bench import BLOCK_BYTES, CardBench, RawHost, make_config, read_entry, write_entry
from xkv_nvmeof import builders, digest
from xkv_nvmeof.command import ConnectCommand, ConnectData, Sgl, SubmissionEntry
from xkv_nvmeof.pdu import ICReq, WireFormat, encode, encode_command

ROUNDS = int(os.environ.get("XKV_FUZZ_ROUNDS", "150"))
MAX_OUTGOING = 4096


def valid_messages(random: Random, host: RawHost) -> list[bytes]:
    """Commands of all kinds, most of them right."""
    cid = random.randrange(0x10000)
    in_capsule = bytes(BLOCK_BYTES)
    entries = [
        (builders.identify(cid, random.choice([0, 1, 2, 3, 6, 0x20]), nsid=random.randrange(3)), b""),
        (builders.get_log_page(cid, random.choice([1, 2, 3, 4, 5, 0x70]), 512), b""),
        (builders.set_features(cid, random.choice([1, 7, 0xB, 0xF]), random.randrange(1 << 32)), b""),
        (builders.async_event_request(cid), b""),
        (builders.property_set(cid, 0x14, 4, random.choice([0, 0x460001, 0x464001])), b""),
        (read_entry(cid, random.randrange(1100), random.randrange(1, 40)), b""),
        (write_entry(cid, random.randrange(1100), 1, in_capsule=True), in_capsule),
        (write_entry(cid, random.randrange(1000), random.randrange(1, 30), in_capsule=False), b""),
        (builders.dataset_management(cid, 1, random.randrange(1, 256), Sgl.transport(4096)), b""),
        (SubmissionEntry(random.randrange(256), cid, random.randrange(3)), b""),
    ]
    chosen = random.choices(entries, k=random.randint(1, 6))
    return [_message(entry, data, host.wire) for entry, data in chosen]


def _message(entry: SubmissionEntry, data: bytes, wire: WireFormat) -> bytes:
    tail = digest.to_wire(digest.crc32c(data)) if data and wire.data_digest else b""
    return encode_command(entry.to_bytes(), len(data), wire) + data + tail


def damage(random: Random, message: bytes) -> bytes:
    """Flip, cut, repeat or replace."""
    kind = random.randrange(6)
    place = random.randrange(len(message))
    if kind == 0:
        return message[:place] + bytes([message[place] ^ 1 << random.randrange(8)]) + message[place + 1 :]
    if kind == 1:
        return message[:place]
    if kind == 2:
        return message + message[:place]
    if kind == 3:
        return random.randbytes(random.randint(1, 300))
    return message


@pytest.mark.parametrize("seed", range(4))
def test_no_input_breaks_the_controller(seed: int) -> None:
    random = Random(seed)
    for _round in range(ROUNDS):
        bench = CardBench(make_config(max_h2c_data_bytes=random.choice([4096, 1 << 20])))
        digests = random.random() < 0.3
        host = bench.host(init=ICReq(random.randint(1, 4), digests, digests))
        host.step_bytes = random.choice([0, 0, 1, 13, 1000])
        qid = random.choice([0, 0, 1])
        if qid:
            bench.admin()
        connect = ConnectCommand(1, qid, 63)
        data = ConnectData(b"h" * 16, 1 if qid else 0xFFFF, bench.card.config.nqn, "nqn.2026-01.example:h")
        messages = [_message(connect.to_entry(), data.to_bytes(), host.wire)]
        messages.append(_message(builders.property_set(2, 0x14, 4, 0x460001), b"", host.wire))
        for _ in range(5):
            messages += valid_messages(random, host)
        for number, message in enumerate(messages):
            sound = number < 2 and random.random() < 0.9
            answer = host.send(message if sound else damage(random, message))
            for r2t in answer.r2ts:
                host.send(damage(random, host.h2c(r2t, bytes(r2t.data_bytes))))
            assert len(host.connection.outgoing) < MAX_OUTGOING
            bench.now_ns += random.choice([0, 1_000_000_000])
            bench.card.tick(bench.now_ns)
        host.connection.lost()
        assert not host.buffers.out
        assert host.connection not in bench.card.take_dirty()


@pytest.mark.parametrize("seed", range(4))
def test_no_first_bytes_break_the_controller(seed: int) -> None:
    random = Random(seed)
    for _round in range(ROUNDS):
        host = RawHost(CardBench())
        answer = host.send(damage(random, encode(ICReq(max_r2t=random.randrange(1, 1 << 32)))))
        assert len(answer.pdus) <= 1 or host.connection.ended
        host.connection.lost()
        assert not host.buffers.out
