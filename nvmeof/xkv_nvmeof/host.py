"""The host side of one queue pair (NVMe/TCP Transport 1.0, 3.3 to 3.5): pure, no I/O, no clock.

The owner of the socket feeds what it receives, sends what `outbox` holds, and collects `take_finished`. Every
exchange that was submitted appears there exactly once, whatever happens. Time comes in as deadlines of exchanges and
as the argument of `expire`. After a failure `failure` says why; a TermReq may be left in the outbox.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.digest import DigestPolicy
from xkv_nvmeof.framing import DataEnd, FrameReader, host_limits
from xkv_nvmeof.host_checks import (
    CID_OF_DATA,
    CID_OF_RESPONSE,
    bad_head,
    judge_data,
    judge_r2t,
    judge_setup,
    judge_success,
    not_in_flight,
)
from xkv_nvmeof.host_command import NO_DEADLINE, Exchange, cut
from xkv_nvmeof.host_settings import (
    ClosedByHost,
    DeadlinePassed,
    NegotiationRefused,
    PeerTerminated,
    QueueSettings,
)
from xkv_nvmeof.host_states import OVER, QueueEvent, QueueState, advance
from xkv_nvmeof.host_table import CommandTable
from xkv_nvmeof.host_usual import take_usual
from xkv_nvmeof.pdu import (
    PLAIN,
    R2T,
    C2HData,
    C2HTermReq,
    CapsuleResp,
    H2CTermReq,
    ICReq,
    ICResp,
    PeerViolation,
    WireFormat,
    encode,
    h2c_data_header,
)
from xkv_nvmeof.spec import FABRICS_IN_CAPSULE_BYTES

if TYPE_CHECKING:
    from xkv_nvmeof.framing import Event
    from xkv_nvmeof.host_outbox import Outbox

_CQE: Final = Struct("<QHHHH")
_NOTHING: Final = memoryview(b"")
MAX_DIRECT_VIEWS: Final = 64
"""Buffers of a read that one system call fills."""


class HostQueue:
    """One queue pair, host side. See the module's docstring for how it is driven."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self.state = QueueState.NEW
        self.failure: Exception | None = None
        self.granted: ICResp | None = None
        """The ICResp that was accepted."""
        self._table = CommandTable(settings.entries, flow_control=settings.flow_control)
        self.outbox: Outbox = self._table.outbox
        self._reader = FrameReader(host_limits(settings.max_receive_bytes))
        self._setup_deadline_ns = NO_DEADLINE
        self._connect: Exchange | None = None
        self._takes_usual = False
        self._max_whole_bytes = 0
        """Up to so much data leaves as one PDU of header and data alone."""
        self._reading: Exchange | None = None
        """The read whose data comes next."""
        self._reading_success = False
        """Whether the end of that data is the completion (SUCCESS flag)."""

    def start(self, deadline_ns: int) -> None:
        """Queue the ICReq; the ICResp must come before `deadline_ns`."""
        self.state = advance(self.state, QueueEvent.START)
        settings = self._settings
        self._setup_deadline_ns = deadline_ns
        request = ICReq(
            settings.alignment_dwords,
            settings.header_digest is not DigestPolicy.OFF,
            settings.data_digest is not DigestPolicy.OFF,
            settings.max_r2t,
        )
        self.outbox.put(encode(request))

    def submit_connect(self, exchange: Exchange) -> None:
        """Send the Fabrics Connect; the queue pair is ready when it completes with success (Base 6.3)."""
        assert self.state is QueueState.CONNECTING
        assert self._connect is None
        self._connect = exchange
        self._table.submit(exchange, in_capsule=True)

    def submit(self, exchange: Exchange) -> None:
        """Send a command. The queue must be ready and have room."""
        assert self.state is QueueState.READY
        self._table.submit(exchange, in_capsule=0 < exchange.send_bytes <= self._settings.in_capsule_bytes)

    def submit_fabrics(self, exchange: Exchange) -> None:
        """Send a Fabrics command. Its data is in the capsule, where every queue has room for it, whatever IOCCSZ says (TCP 3.3.1).

        Linux's target requests no data of so few bytes: it takes for granted that they are in the capsule.
        """
        assert self.state is QueueState.READY
        assert exchange.send_bytes <= FABRICS_IN_CAPSULE_BYTES
        self._table.submit(exchange, in_capsule=exchange.send_bytes > 0)

    @property
    def over(self) -> bool:
        """Whether the queue pair has ended."""
        return self.failure is not None

    @property
    def room(self) -> int:
        """How many commands may be submitted now."""
        return self._table.slots.room if self.state is QueueState.READY else 0

    @property
    def load_bytes(self) -> int:
        """What is in flight: the data of the commands, and a little for each."""
        return self._table.load_bytes

    def receive(self, chunk: memoryview) -> None:
        """Handle bytes of the connection. `chunk` may be reused afterwards."""
        if self.over:
            return
        reader = self._reader
        if reader.plain and self._takes_usual and not self._table.draining:
            at, reading = take_usual(
                chunk, self._table, self._settings.max_receive_bytes, self._max_whole_bytes, self._requested
            )
            if reading is not None:
                self._reading, self._reading_success = reading, True
                reader.begin_data(reading.receive_bytes - reading.received_bytes)
            if at == len(chunk):
                return
            chunk = chunk[at:]
        try:
            reader.feed(chunk)
            while (event := reader.next_event()) is not None:
                if type(event) is memoryview:
                    assert self._reading is not None
                    self._reading.place(event)
                else:
                    self._handle(event)
                    if self.failure is not None:
                        return
        except (PeerViolation, NegotiationRefused) as failure:
            self.fail(failure)

    def direct_views(self) -> list[memoryview]:
        """Return where the connection's next bytes belong, when they are data of a read; else nothing."""
        pending = self._reader.data_pending_bytes
        reading = self._reading
        if not pending or reading is None:
            return []
        return reading.direct_views(pending, MAX_DIRECT_VIEWS)

    @property
    def data_pending(self) -> bool:
        """Whether the connection's next bytes are data."""
        return self._reader.data_pending_bytes > 0

    def direct_received(self, views: list[memoryview], count: int, behind: memoryview = _NOTHING) -> None:
        """Tell that `count` bytes were received into `views`, the answer of `direct_views`.

        `behind` is what came behind them when they were filled, and may be reused afterwards.
        """
        reading, reader = self._reading, self._reader
        assert reading is not None
        reading.placed(count)
        if reader.wire.data_digest:
            reader.data_placed(*cut(views, 0, count))
            if not reader.data_pending_bytes:
                self.receive(behind)
        elif reader.plain_placed(count):
            self._end_data(reading, DataEnd.INTACT)
            if behind:
                self.receive(behind)

    def sent(self, count: int) -> None:
        """Tell that the connection took the next `count` bytes of the outbox."""
        self._table.sent(count)

    def take_finished(self) -> list[Exchange]:
        """Return the exchanges that ended since the last call, in order."""
        return self._table.take_finished()

    def next_deadline_ns(self) -> int:
        """Return the earliest moment at which `expire` would fail the queue pair (`NO_DEADLINE`: none)."""
        return min(self._table.next_deadline_ns(), self._setup_deadline_ns)

    def expire(self, now_ns: int) -> None:
        """Fail the queue pair when a deadline has passed."""
        if self.state not in OVER and self.next_deadline_ns() <= now_ns:
            self.fail(DeadlinePassed(f"no answer in time while {self.state.value}"))

    def fail(self, failure: Exception) -> None:
        """End the queue pair; a protocol error is told to the peer. A second failure changes nothing."""
        if self.state in OVER:
            return
        closed = isinstance(failure, ClosedByHost)
        self.state = advance(self.state, QueueEvent.CLOSE if closed else QueueEvent.FAIL)
        self.failure = failure
        self._setup_deadline_ns = NO_DEADLINE
        self._reading = None
        between_pdus = self._table.fail_all()
        if isinstance(failure, PeerViolation) and between_pdus:
            told = H2CTermReq(failure.fatal_status, failure.field_offset_bytes, failure.header)
            self.outbox.put(encode(told))

    # -- what the controller sends -----------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        match event:
            case C2HData():
                self._on_data(event)
            case DataEnd():
                assert self._reading is not None
                self._end_data(self._reading, event)
            case CapsuleResp():
                self._on_response(event)
            case R2T():
                self._on_r2t(event)
            case ICResp():
                self._on_setup(event)
            case C2HTermReq():
                status, place = event.fatal_status, event.field_offset_bytes
                reason = f"the controller ended the connection: fatal error status {status}, field {place}"
                self.fail(PeerTerminated(reason, fatal_status=status, field_offset_bytes=place))
            case _:
                raise AssertionError(f"framing let {type(event).__name__} through")

    def _on_setup(self, granted: ICResp) -> None:
        settings = self._settings
        judge_setup(settings, granted)
        digests = granted.header_digest, granted.data_digest
        self.granted = granted
        self.outbox.wire = wire = WireFormat(*digests, granted.alignment_dwords * 4)
        self._max_whole_bytes = granted.max_h2c_data_bytes if wire == PLAIN else 0
        self._reader.establish(WireFormat(*digests, settings.alignment_dwords * 4))
        self._setup_deadline_ns = NO_DEADLINE
        self.state = advance(self.state, QueueEvent.IC_GRANTED)

    def _on_data(self, pdu: C2HData) -> None:
        exchange = self._table.find(pdu.command_id)
        if exchange is None:
            raise not_in_flight(pdu.command_id, pdu, CID_OF_DATA, self._reader.wire)
        judge_data(exchange, pdu, self._reader.wire, flow_control=self._settings.flow_control)
        exchange.saw_last = pdu.last
        self._reading, self._reading_success = exchange, pdu.success

    def _end_data(self, exchange: Exchange, end: DataEnd) -> None:
        self._reading = None
        if end is DataEnd.CORRUPT:
            exchange.corrupt = True
        if self._reading_success:
            exchange.status = exchange.result = 0
            self._table.complete(exchange)

    def _on_response(self, pdu: CapsuleResp) -> None:
        table, wire = self._table, self._reader.wire
        result, head, _qid, cid, field = _CQE.unpack(pdu.cqe)
        exchange = table.find(cid)
        if exchange is None:
            raise not_in_flight(cid, pdu, CID_OF_RESPONSE, wire)
        if not table.slots.head_moved(head):
            raise bad_head(head, pdu, wire)
        exchange.status = status = (field >> 1) & 0x7FF
        exchange.do_not_retry = field & 0x8000 != 0
        exchange.result = result
        if status == 0:
            judge_success(exchange, pdu, wire, unsent=table.unsent(exchange))
        table.complete(exchange)
        if exchange is self._connect:
            self._connect = None
            if status == 0:
                self.state = advance(self.state, QueueEvent.CONNECT_GRANTED)
                self._takes_usual = not self._settings.flow_control

    def _on_r2t(self, pdu: R2T) -> None:
        exchange = self._table.find(pdu.command_id)
        if exchange is None:
            raise not_in_flight(pdu.command_id, pdu, CID_OF_DATA, self._reader.wire)
        outbox = self.outbox
        if exchange.r2t_ends:
            exchange.r2t_ends = tuple(end for end in exchange.r2t_ends if end > outbox.sent_bytes)
        judge_r2t(exchange, pdu, self._reader.wire, max_r2t=self._settings.max_r2t)
        self._requested(exchange, pdu.transfer_tag, pdu.offset_bytes, pdu.data_bytes)

    def _requested(self, exchange: Exchange, tag: int, start: int, length: int) -> None:
        """Queue the data that was asked for, in PDUs of at most MAXH2CDATA."""
        assert self.granted is not None
        outbox, limit = self.outbox, self.granted.max_h2c_data_bytes
        exchange.requested_bytes = end = start + length
        while start < end:
            size = min(limit, end - start)
            header = h2c_data_header(exchange.cid, tag, start, size, outbox.wire, last=start + size == end)
            exchange.send_end = outbox.put(header, cut(exchange.send, start, size), size)
            start += size
        exchange.r2t_ends += (exchange.send_end,)
