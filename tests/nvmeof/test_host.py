"""The pure host side of a queue pair, driven by hand."""

from __future__ import annotations

import random
from itertools import product

import pytest

from xkv_nvmeof import builders
from xkv_nvmeof.command import ConnectCommand, Sgl, SubmissionEntry
from xkv_nvmeof.digest import DigestPolicy
from xkv_nvmeof.framing import FrameReader, controller_limits
from xkv_nvmeof.host import HostQueue
from xkv_nvmeof.host_command import CommandSlots, Exchange, Outcome
from xkv_nvmeof.host_settings import (
    ClosedByHost,
    DeadlinePassed,
    NegotiationRefused,
    QueueSettings,
)
from xkv_nvmeof.host_states import OVER, TRANSITIONS, ImpossibleTransition, QueueEvent, QueueState, advance
from xkv_nvmeof.pdu import FatalStatus, H2CTermReq, ICReq, ICResp, PeerViolation, WireFormat, encode

from .broken import BAD_READS, BAD_WRITES, Answer
from .fake_target import FakeConnection, FakeTarget
from .hosts import pattern

SIZE = 2048


class Wire:
    """A host queue, and a fake connection to make the controller's PDUs with."""

    def __init__(self, settings: QueueSettings, granted: ICResp | None = None, chunk: int = 1 << 20) -> None:
        self.core = HostQueue(settings)
        self.maker = FakeConnection(FakeTarget())
        self.chunk = chunk
        self.sent = bytearray()
        self.finished: list[Exchange] = []
        granted = granted or ICResp()
        self.core.start(1000)
        self.pump()
        self.give(encode(granted))
        self.maker.wire = WireFormat(
            granted.header_digest, granted.data_digest, settings.alignment_dwords * 4
        )

    def pump(self) -> None:
        """Send everything."""
        outbox = self.core.outbox
        while outbox:
            data = b"".join(outbox.views())
            self.sent += data
            self.core.sent(len(data))

    def give(self, *pdus: bytes, direct: bool = False) -> None:
        """Let the host receive, in chunks, perhaps past the parser; then collect what finished."""
        stream = memoryview(b"".join(pdus))
        while stream:
            views = self.core.direct_views() if direct else []
            if views:
                view = views[0][: self.chunk]
                view[: len(stream)] = stream[: len(view)]
                taken = min(len(view), len(stream))
                self.core.direct_received(views, taken)
            else:
                taken = min(self.chunk, len(stream), 40 if direct else len(stream))
                self.core.receive(stream[:taken])
            stream = stream[taken:]
        self.finished += self.core.take_finished()

    def connect(self) -> Exchange:
        data = memoryview(bytes(1024))
        entry = bytearray(ConnectCommand(0, 1, 7).to_entry().to_bytes())
        exchange = Exchange(entry, 2000, send=[data], send_bytes=1024)
        self.core.submit_connect(exchange)
        self.pump()
        self.give(self.maker.response(exchange.cid))
        return exchange

    def read(self, size: int = SIZE, deadline_ns: int = 5000) -> tuple[Exchange, bytearray]:
        buffer = bytearray(size)
        entry = builders.read(0, 1, 0, size // 512, Sgl.transport(size))
        exchange = Exchange(
            bytearray(entry.to_bytes()), deadline_ns, receive=[memoryview(buffer)], receive_bytes=size
        )
        self.core.submit(exchange)
        return exchange, buffer

    def write(self, payload: bytes) -> Exchange:
        entry = builders.write(0, 1, 0, len(payload) // 512, Sgl.transport(len(payload)))
        view = memoryview(payload)
        exchange = Exchange(
            bytearray(entry.to_bytes()), 5000, send=[view[:100], view[100:]], send_bytes=len(payload)
        )
        self.core.submit(exchange)
        return exchange


def ready(chunk: int = 1 << 20, granted: ICResp | None = None, **settings: object) -> Wire:
    wire = Wire(QueueSettings(**({"entries": 8} | settings)), granted, chunk)  # type: ignore[arg-type]
    wire.connect()
    assert wire.core.state is QueueState.READY
    wire.finished.clear()
    wire.sent.clear()
    return wire


def test_every_pair_of_the_table_leads_somewhere_and_no_other_does() -> None:
    for state, event in product(QueueState, QueueEvent):
        if (state, event) in TRANSITIONS:
            assert advance(state, event) is TRANSITIONS[state, event]
            assert state not in OVER
        else:
            with pytest.raises(ImpossibleTransition):
                advance(state, event)


def test_the_first_pdu_asks_for_what_the_settings_say() -> None:
    core = HostQueue(QueueSettings(8, header_digest=DigestPolicy.PREFERRED, alignment_dwords=4, max_r2t=3))
    core.start(1000)
    assert b"".join(core.outbox.views()) == encode(ICReq(4, True, False, 3))
    assert core.next_deadline_ns() == 1000


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize(
    ("answer", "status", "place"), [row[1:] for row in BAD_READS], ids=[r[0] for r in BAD_READS]
)
def test_a_broken_answer_to_a_read_ends_the_queue(
    answer: Answer, status: FatalStatus, place: int, chunk: int
) -> None:
    wire = ready(chunk)
    (exchange, _), (other, _) = wire.read(), wire.read()
    wire.pump()
    wire.sent.clear()
    entry = SubmissionEntry.from_bytes(exchange.sqe)
    wire.give(*answer(wire.maker, entry, pattern(SIZE)))
    assert isinstance(wire.core.failure, PeerViolation)
    assert wire.core.state is QueueState.FAILED
    finished = {id(one): one.outcome for one in wire.finished}
    assert finished[id(other)] is Outcome.LOST
    assert len(wire.finished) == 2
    told = wire.core.outbox.views()
    header = FrameReader(controller_limits(1, 1))
    header.feed(memoryview(b"".join(told)))
    term = header.next_event()
    assert isinstance(term, H2CTermReq)
    assert (term.fatal_status, term.field_offset_bytes) == (status, place)


@pytest.mark.parametrize(
    ("answer", "status", "place"), [row[1:] for row in BAD_WRITES], ids=[r[0] for r in BAD_WRITES]
)
def test_a_broken_answer_to_a_write_ends_the_queue(answer: Answer, status: FatalStatus, place: int) -> None:
    wire = ready()
    exchange = wire.write(pattern(SIZE))
    wire.pump()
    wire.give(*answer(wire.maker, SubmissionEntry.from_bytes(exchange.sqe), b""))
    assert isinstance(wire.core.failure, PeerViolation)
    assert (wire.core.failure.fatal_status, wire.core.failure.field_offset_bytes) == (status, place)
    assert exchange.outcome is Outcome.LOST


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 700, 1 << 20])
def test_a_read_gets_every_byte_however_it_is_received(chunk: int, digests: bool, direct: bool) -> None:
    policy = DigestPolicy.PREFERRED if digests else DigestPolicy.OFF
    wire = ready(chunk, ICResp(1, digests, digests), header_digest=policy, data_digest=policy)
    exchange, buffer = wire.read()
    wire.pump()
    data = pattern(SIZE)
    make = wire.maker.data
    wire.give(
        make(exchange.cid, 0, data[:900]), make(exchange.cid, 900, data[900:], last=True), direct=direct
    )
    assert not wire.finished
    wire.give(wire.maker.response(exchange.cid), direct=direct)
    assert [one.outcome for one in wire.finished] == [Outcome.COMPLETED]
    assert buffer == data


def test_the_load_of_a_queue_is_the_data_in_flight_and_falls_to_nothing() -> None:
    wire = ready()
    small, _ = wire.read(512)
    light = wire.core.load_bytes
    large, _ = wire.read(8 * SIZE)
    assert wire.core.load_bytes - light > 8 * SIZE - 512 > 0
    wire.core.fail(DeadlinePassed("over"))
    assert wire.core.load_bytes == 0
    assert {id(one) for one in wire.core.take_finished()} == {id(small), id(large)}


def test_an_id_comes_back_only_after_all_other_generations() -> None:
    slots = CommandSlots(8, flow_control=False)
    seen = []
    for _ in range(1 << 13):
        exchange = Exchange(bytearray(64))
        cid = slots.take(exchange)
        seen.append(cid)
        slots.give_back(cid)
    assert len(set(seen)) == len(seen)


def test_flow_control_follows_the_head() -> None:
    slots = CommandSlots(4, flow_control=True)
    cids = [slots.take(Exchange(bytearray(64))) for _ in range(3)]
    assert slots.room == 0
    slots.give_back(cids[0])
    assert slots.room == 0
    assert slots.head_moved(2)
    assert slots.room == 1
    assert not slots.head_moved(1)
    assert not slots.head_moved(4)


def test_a_late_completion_of_an_abandoned_read_names_nobody_else() -> None:
    wire = ready()
    exchange, buffer = wire.read()
    wire.pump()
    exchange.abandon()
    wire.give(wire.maker.data(exchange.cid, 0, pattern(SIZE), last=True, success=True))
    assert not any(buffer)
    following, _ = wire.read()
    wire.pump()
    wire.give(wire.maker.response(exchange.cid))
    assert isinstance(wire.core.failure, PeerViolation)
    assert following.outcome is Outcome.LOST


def test_what_never_left_is_known_not_to_be_executed() -> None:
    wire = ready()
    sent, _ = wire.read()
    wire.pump()
    unsent, _ = wire.read()
    wire.core.fail(ClosedByHost("test"))
    assert (sent.outcome, unsent.outcome) == (Outcome.LOST, Outcome.NEVER_SENT)
    assert wire.core.state is QueueState.CLOSED


def test_a_deadline_fails_everything_once() -> None:
    wire = ready()
    exchanges = [wire.read(deadline_ns=deadline)[0] for deadline in (7000, 6000)]
    wire.pump()
    assert wire.core.next_deadline_ns() == 6000
    wire.core.expire(5999)
    assert not wire.core.take_finished()
    wire.core.expire(6000)
    assert isinstance(wire.core.failure, DeadlinePassed)
    wire.core.expire(9000)
    assert [one.outcome for one in wire.core.take_finished()] == [Outcome.LOST] * len(exchanges)


def test_no_termination_is_sent_into_the_middle_of_a_pdu() -> None:
    wire = ready()
    wire.read()
    wire.core.sent(10)
    wire.give(b"\xff" * 8)
    assert isinstance(wire.core.failure, PeerViolation)
    assert not wire.core.outbox


def test_a_write_that_is_failed_early_still_sends_the_rest_of_what_it_began() -> None:
    wire = ready()
    exchange = wire.write(pattern(SIZE))
    wire.pump()
    wire.give(wire.maker.r2t(exchange.cid, 0, SIZE))
    wire.core.sent(50)
    wire.give(wire.maker.response(exchange.cid, 0x280))
    assert not wire.finished
    wire.pump()
    wire.give()
    wire.finished += wire.core.take_finished()
    assert wire.finished == [exchange]
    assert (exchange.outcome, exchange.status) == (Outcome.COMPLETED, 0x280)


@pytest.mark.parametrize(
    "granted",
    [ICResp(pdu_format_version=1), ICResp(alignment_dwords=33), ICResp(max_h2c_data_bytes=1024)],
    ids=str,
)
def test_an_impossible_setup_is_refused(granted: ICResp) -> None:
    assert isinstance(Wire(QueueSettings(8), granted).core.failure, PeerViolation)


def test_a_required_digest_must_be_granted() -> None:
    wire = Wire(QueueSettings(8, data_digest=DigestPolicy.REQUIRED))
    assert isinstance(wire.core.failure, NegotiationRefused)


def test_fuzz_a_damaged_stream_never_completes_a_read_with_wrong_bytes_and_finishes_all_once() -> None:
    # Invariant: with digests on, whatever is damaged, COMPLETED means every byte is right, and nothing finishes twice.
    rng = random.Random(20)
    policy = DigestPolicy.REQUIRED
    outcomes = set()
    for _round in range(200):
        wire = ready(
            rng.choice([1, 17, 300, 5000]), ICResp(1, True, True), header_digest=policy, data_digest=policy
        )
        reads = [wire.read() for _ in range(3)]
        wire.pump()
        data = pattern(SIZE, _round)
        pdus = []
        for exchange, _ in reads:
            split = rng.randrange(1, SIZE)
            pdus.append(wire.maker.data(exchange.cid, 0, data[:split]))
            pdus.append(
                wire.maker.data(exchange.cid, split, data[split:], last=True, success=rng.random() < 0.5)
            )
            if not pdus[-1][1] & 8:
                pdus.append(wire.maker.response(exchange.cid))
        stream = bytearray(b"".join(pdus))
        for _ in range(rng.choice([0, 1, 1, 3])):
            damage = rng.randrange(4)
            place = rng.randrange(len(stream))
            if damage == 0:
                stream[place] ^= 1 << rng.randrange(8)
            elif damage == 1:
                del stream[place : place + rng.randrange(1, 40)]
            elif damage == 2:
                stream[place:place] = rng.randbytes(rng.randrange(1, 40))
            else:
                stream[place:place] = rng.choice(pdus)
        wire.give(bytes(stream), direct=rng.random() < 0.5)
        wire.core.fail(ClosedByHost("end of the stream"))
        wire.finished += wire.core.take_finished()
        assert len({id(one) for one in wire.finished}) == len(wire.finished) == 3
        for exchange, buffer in reads:
            outcomes.add(exchange.outcome)
            assert exchange.outcome is not Outcome.PENDING
            if exchange.outcome is Outcome.COMPLETED and exchange.status == 0:
                assert buffer == data
    assert {Outcome.COMPLETED, Outcome.CORRUPT, Outcome.LOST} <= outcomes
