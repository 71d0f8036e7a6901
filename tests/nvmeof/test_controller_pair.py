"""The host core joined to the controller core: whatever one sends, however it is cut, the other takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from tests.nvmeof.card_bench import (
    BLOCK_BYTES,
    BLOCKS,
    ENABLE,
    HOST_ID,
    HOST_NQN,
    NQN,
    PORTAL,
    CardBench,
    CountingBuffers,
    make_config,
)
from xkv_nvmeof import builders
from xkv_nvmeof.command import (
    NO_DATA,
    BlockRange,
    ConnectCommand,
    ConnectData,
    Sgl,
    SubmissionEntry,
    encode_ranges,
)
from xkv_nvmeof.controller_types import Sent
from xkv_nvmeof.digest import DigestPolicy
from xkv_nvmeof.host import HostQueue
from xkv_nvmeof.host_command import Exchange, Outcome
from xkv_nvmeof.host_settings import QueueSettings
from xkv_nvmeof.host_states import QueueState
from xkv_nvmeof.spec import Register, Status

QUEUE_ENTRIES = 32
SENT_DATA = Sgl.transport


@dataclass
class Cutting:
    """How many bytes one move of the wire takes."""

    random: Random
    most_bytes: int

    def next(self) -> int:
        return self.random.randint(1, self.most_bytes)


@dataclass
class Pair:
    """A host queue and its controller connection, with a wire that cuts as it likes."""

    bench: CardBench
    host: HostQueue
    cutting: Cutting
    buffers: CountingBuffers = field(default_factory=CountingBuffers)

    def __post_init__(self) -> None:
        connection = self.bench.card.open(self.buffers, PORTAL, self.bench.now_ns)
        assert connection is not None
        self.connection = connection

    def open(self, qid: int, cntlid: int) -> int:
        """ICReq to Connect; returns the controller id."""
        self.host.start(1 << 62)
        self.settle()
        assert self.host.state.value == QueueState.CONNECTING.value
        attributes = 0 if self.host._settings.flow_control else 4
        entry = ConnectCommand(0, qid, QUEUE_ENTRIES - 1, 0, attributes).to_entry()
        data = memoryview(ConnectData(HOST_ID, cntlid, NQN, HOST_NQN).to_bytes())
        exchange = Exchange(bytearray(entry.to_bytes()), send=[data], send_bytes=len(data))
        exchange.reset()
        self.host.submit_connect(exchange)
        self.settle()
        assert exchange.status == 0
        assert self.host.state is QueueState.READY
        return exchange.result & 0xFFFF

    def run(self, entry: SubmissionEntry, send: bytes = b"", receive: bytearray | None = None) -> Exchange:
        exchange = Exchange(
            bytearray(entry.to_bytes()),
            send=[memoryview(send)] if send else (),
            send_bytes=len(send),
            receive=[memoryview(receive)] if receive else (),
            receive_bytes=len(receive) if receive else 0,
        )
        exchange.reset()
        self.host.submit(exchange)
        return exchange

    def settle(self) -> None:
        """Move bytes both ways until nothing moves any more."""
        moved = True
        while moved:
            self.bench.work()
            moved = self._to_card() or self._to_host()
        assert self.host.failure is None, self.host.failure
        assert not self.connection.ended, self.connection.end_reason

    def _to_card(self) -> bool:
        wire = b"".join(bytes(view) for view in self.host.outbox.views())[: self.cutting.next()]
        if not wire:
            return False
        self.host.sent(len(wire))
        chunk = memoryview(wire)
        sink = self.connection.sink()
        if sink is not None:
            taken = min(len(sink), len(chunk))
            sink[:taken] = chunk[:taken]
            self.connection.placed(taken)
            chunk = chunk[taken:]
        self.connection.receive(chunk, self.bench.now_ns)
        return True

    def _to_host(self) -> bool:
        room, wire = self.cutting.next(), bytearray()
        outgoing = self.connection.outgoing
        while outgoing and len(wire) < room:
            item = outgoing.popleft()
            if isinstance(item, Sent):
                self.buffers.release(item.buffer)
                self.connection.transfers.retry()
                continue
            taken = room - len(wire)
            wire += item[:taken]
            if taken < len(item):
                outgoing.appendleft(memoryview(item)[taken:])
        if not wire:
            return False
        chunk = memoryview(bytes(wire))
        views = self.host.direct_views()
        if views:
            placed = 0
            for view in views:
                part = min(len(view), len(chunk) - placed)
                view[:part] = chunk[placed : placed + part]
                placed += part
            self.host.direct_received(views, placed)
            chunk = chunk[placed:]
        self.host.receive(chunk)
        return True


def open_pair(bench: CardBench, seed: int, most_bytes: int, **settings: object) -> Pair:
    random = Random(seed)

    def make() -> Pair:
        host = HostQueue(QueueSettings(QUEUE_ENTRIES, 8192, **settings))  # type: ignore[arg-type]
        return Pair(bench, host, Cutting(random, most_bytes))

    admin = make()
    cntlid = admin.open(0, 0xFFFF)
    enable = admin.run(builders.property_set(0, Register.CC, 4, ENABLE.to_int()))
    admin.settle()
    assert enable.status == 0
    queue = make()
    assert queue.open(1, cntlid) == cntlid
    return queue


@pytest.mark.parametrize("most_bytes", [1, 50, 5000, 1 << 20])
@pytest.mark.parametrize("flow_control", [False, True])
@pytest.mark.parametrize("digests", [DigestPolicy.OFF, DigestPolicy.REQUIRED])
def test_the_card_holds_what_a_plain_array_would_hold(
    most_bytes: int, flow_control: bool, digests: DigestPolicy
) -> None:
    bench = CardBench(make_config(max_h2c_data_bytes=16384))
    queue = open_pair(
        bench,
        most_bytes,
        most_bytes,
        flow_control=flow_control,
        header_digest=digests,
        data_digest=digests,
        max_r2t=2,
        alignment_dwords=4,
    )
    random = Random(7)
    model = bytearray(BLOCKS * BLOCK_BYTES)
    for _round in range(2 if most_bytes == 1 else 20):
        checks: list[tuple[Exchange, bytearray, bytes]] = []
        used: set[int] = set()
        for _command in range(random.randint(1, 6)):
            first, count = random.randrange(0, 96, 12), random.choice([1, 2, 3, 12])
            if first in used:
                continue
            used.add(first)
            span = slice(first * BLOCK_BYTES, (first + count) * BLOCK_BYTES)
            kind = random.choice(["read", "write", "zero", "trim"])
            if kind == "read":
                buffer = bytearray(count * BLOCK_BYTES)
                entry = builders.read(0, 1, first, count, Sgl.transport(len(buffer)))
                checks.append((queue.run(entry, receive=buffer), buffer, bytes(model[span])))
            elif kind == "write":
                data = random.randbytes(count * BLOCK_BYTES)
                queue.run(builders.write(0, 1, first, count, Sgl.transport(len(data))), data)
                model[span] = data
            elif kind == "zero":
                queue.run(builders.write_zeroes(0, 1, first, count))
                model[span] = bytes(count * BLOCK_BYTES)
            else:
                data = encode_ranges([BlockRange(first, count)])
                queue.run(builders.dataset_management(0, 1, 1, Sgl.transport(len(data))), data)
                model[span] = bytes(count * BLOCK_BYTES)
        queue.run(SubmissionEntry(0, 0, 1, NO_DATA))
        queue.settle()
        for exchange in queue.host.take_finished():
            assert exchange.outcome is Outcome.COMPLETED
            assert exchange.status == Status.SUCCESS
        for _exchange, buffer, expected in checks:
            assert buffer == expected
        assert not queue.buffers.out
    assert bench.blocks == model


def test_refusals_reach_the_host_as_they_were_meant() -> None:
    bench = CardBench()
    queue = open_pair(bench, 1, 1 << 20)
    over = queue.run(builders.read(0, 1, BLOCKS, 1, Sgl.transport(4096)), receive=bytearray(4096))
    large = queue.run(builders.write(0, 1, 0, 64, Sgl.transport(64 * 4096)), bytes(64 * 4096))
    unknown = queue.run(SubmissionEntry(0x7E, 0, 1))
    queue.settle()
    assert [exchange.status for exchange in (over, large, unknown)] == [
        Status.LBA_OUT_OF_RANGE,
        Status.INVALID_FIELD,
        Status.INVALID_OPCODE,
    ]
    assert over.do_not_retry
