"""One TCP connection of the controller side: PDUs in, commands for the shell, PDUs out (TCP 3.3, 3.6). Pure.

The owner of the socket feeds `receive` (or receives straight into `sink` and tells `placed`), executes what
`take_commands` returns, gives each back with `complete`, and sends what `outgoing` holds, in order. After any call
into the core, connections with something to do are in `Card.take_dirty()`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from xkv_nvmeof import digest
from xkv_nvmeof.command import CompletionEntry, SubmissionEntry
from xkv_nvmeof.controller_io import Inbound, execute, judge
from xkv_nvmeof.controller_states import CONNECTION_TABLE, ConnectionEvent, ConnectionState
from xkv_nvmeof.controller_transfers import MAX_PENDING_R2T, Transfers
from xkv_nvmeof.controller_types import (
    SETUP_DEADLINE_NS,
    IoCommand,
    Outgoing,
    Reply,
    Sent,
    ShutdownCommand,
    WriteCommand,
)
from xkv_nvmeof.framing import DataEnd, FrameReader, controller_limits
from xkv_nvmeof.pdu import (
    PLAIN,
    R2T,
    C2HData,
    C2HTermReq,
    CapsuleCmd,
    FatalStatus,
    H2CData,
    H2CTermReq,
    ICReq,
    ICResp,
    PeerViolation,
    WireFormat,
    encode,
    encode_c2h_data,
    encode_response,
)
from xkv_nvmeof.spec import CONNECT_DATA_BYTES, FABRICS_OPCODE, FabricsType, SglType, Status

if TYPE_CHECKING:
    from xkv_nvmeof.controller import Controller
    from xkv_nvmeof.controller_card import Card
    from xkv_nvmeof.controller_types import Buffers

_RETRYABLE: Final = frozenset(
    {
        Status.COMMAND_INTERRUPTED,
        Status.TRANSIENT_TRANSPORT_ERROR,
        Status.INTERNAL_ERROR,
        Status.ABORT_REQUESTED,
        Status.ABORTED_SQ_DELETION,
        Status.NAMESPACE_NOT_READY,
        Status.UNRECOVERED_READ_ERROR,
        Status.WRITE_FAULT,
        Status.CONNECT_CONTROLLER_BUSY,
    }
)
"""Failures that may go away by themselves: the DNR bit stays clear."""
_CLOSED: Final = frozenset({ConnectionState.ENDING, ConnectionState.CLOSED})


class ControllerConnection:
    """The controller's end of one queue. `io_queue_id` is known after Connect: 0 is the admin queue."""

    def __init__(self, card: Card, buffers: Buffers, now_ns: int) -> None:
        config = card.config
        self._card = card
        self._buffers = buffers
        self._reader = FrameReader(controller_limits(config.in_capsule_bytes, config.max_h2c_data_bytes))
        self._transfers = Transfers(self, buffers, config.max_h2c_data_bytes)
        self._wire: WireFormat = PLAIN
        self._commands: list[IoCommand] = []
        self._inflight: set[int] = set()
        self._capsule: SubmissionEntry | None = None
        self._target: memoryview | None = None
        self._placed_bytes = 0
        self._head = 0
        self._entries = 1
        self._flow_control = True
        self.state = ConnectionState.WAIT_ICREQ
        self.setup_deadline_ns = now_ns + SETUP_DEADLINE_NS
        self.controller: Controller | None = None
        self.queue_id = 0
        self.outgoing: deque[Outgoing] = deque()
        self.end_reason = ""

    # ---- the shell's side ------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the socket is to be closed once `outgoing` is sent."""
        return self.state in _CLOSED

    @property
    def starved(self) -> bool:
        """Whether writes wait for a buffer: call `buffers_available` when one was released."""
        return self._transfers.starved

    def receive(self, chunk: memoryview, now_ns: int) -> None:
        """Take what was received. `chunk` may be reused afterwards."""
        if self.state in _CLOSED:
            return
        self._reader.feed(chunk)
        try:
            self._drain(now_ns)
        except PeerViolation as violation:
            self._violate(violation)

    def sink(self) -> memoryview | None:
        """Where the next bytes of the connection belong, when they are payload with a known place."""
        if self._target is None or self.state in _CLOSED or not self._reader.data_pending_bytes:
            return None
        at = self._placed_bytes
        return self._target[at : at + self._reader.data_pending_bytes]

    def placed(self, length_bytes: int) -> None:
        """Tell that so many bytes were received into `sink`; `receive` (even of nothing) must follow."""
        assert self._target is not None
        at = self._placed_bytes
        self._reader.data_placed(self._target[at : at + length_bytes])
        self._placed_bytes = at + length_bytes

    def take_commands(self) -> list[IoCommand]:
        """Return the commands to execute that came in since the last call, in order."""
        commands, self._commands = self._commands, []
        return commands

    def complete(
        self, command: IoCommand, status: int = Status.SUCCESS, data: memoryview | None = None
    ) -> None:
        """Finish a command. A read that succeeded brings `data`; it is handed back by a `Sent` marker."""
        if isinstance(command, ShutdownCommand):
            if self.controller is not None:
                self.controller.shutdown_done()
            return
        self._card.count(command, status)
        if isinstance(command, WriteCommand) and command.pooled:
            self._buffers.release(command.data)
        if self.state in _CLOSED:
            if data is not None:
                self._buffers.release(data)
            return
        if data is not None and status == Status.SUCCESS:
            self._send_data(command.cid, data)
            self.outgoing.append(Sent(data))
        else:
            if data is not None:
                self._buffers.release(data)
            self.reply(command.cid, Reply(status))

    def buffers_available(self) -> None:
        """Try again to start the writes that waited for a buffer."""
        if self.state not in _CLOSED:
            self._transfers.retry()

    def lost(self) -> None:
        """The TCP connection is gone, from either side."""
        was_live = self.state is ConnectionState.LIVE
        self._step(ConnectionEvent.LOST)
        self._drop_transfers()
        self._card.connection_lost(self, unexpected=was_live)

    # ---- the controller's side -------------------------------------------------------------------------------

    def reply(self, cid: int, reply: Reply) -> None:
        """Send the completion of a command, and its data before it."""
        if self.state in _CLOSED or cid not in self._inflight:
            return
        if reply.data and reply.status == Status.SUCCESS:
            self._send_data(cid, memoryview(reply.data))
            return
        self._inflight.discard(cid)
        self._send_completion(cid, reply)

    def hand_over(self, command: IoCommand) -> None:
        """Give the shell something to execute that no entry of this queue asked for."""
        self._commands.append(command)
        self._card.mark_dirty(self)

    def connected(self, controller: Controller, queue_id: int, entries: int, *, flow_control: bool) -> None:
        """Connect succeeded: the connection is this queue from now on."""
        self._step(ConnectionEvent.CONNECTED)
        self.controller = controller
        self.queue_id = queue_id
        self._entries = entries
        self._head = 1 % entries if flow_control else 0
        self._flow_control = flow_control

    def send_r2t(self, pdu: R2T) -> None:
        """Send an R2T."""
        self.outgoing.append(encode(pdu, self._wire))
        self._card.mark_dirty(self)

    def transfer_done(self, entry: SubmissionEntry, buffer: memoryview, *, intact: bool) -> None:
        """Execute a command whose data came in PDUs of its own."""
        if not intact:
            self._buffers.release(buffer)
            self.reply(entry.cid, Reply(Status.TRANSIENT_TRANSPORT_ERROR))
            return
        command = execute(entry, buffer, self._card.config, pooled=True)
        if not isinstance(command, WriteCommand):
            self._buffers.release(buffer)
        self._start(entry.cid, command)

    def end(self, reason: str) -> None:
        """Process nothing any more; what is queued is still sent before the socket closes."""
        if self.state in _CLOSED:
            return
        self._step(ConnectionEvent.END)
        self.end_reason = reason
        self._drop_transfers()
        self._card.mark_dirty(self)

    # ---- receiving -------------------------------------------------------------------------------------------

    def _step(self, event: ConnectionEvent) -> None:
        self.state = CONNECTION_TABLE[self.state, event]

    def _violate(self, violation: PeerViolation) -> None:
        """End the connection with a TermReq that says how the host broke the protocol (TCP 3.6.2.5, 3.5)."""
        term = C2HTermReq(violation.fatal_status, violation.field_offset_bytes, violation.header)
        self.outgoing.append(encode(term))
        self._step(ConnectionEvent.VIOLATED)
        self.end_reason = f"protocol error: {violation.reason}"
        self._drop_transfers()
        self._card.protocol_error(self)

    def _drop_transfers(self) -> None:
        self._transfers.drop()
        self._target = None
        for command in self._commands:
            if isinstance(command, WriteCommand) and command.pooled:
                self._buffers.release(command.data)
        self._commands = [command for command in self._commands if isinstance(command, ShutdownCommand)]

    def _drain(self, now_ns: int) -> None:
        reader = self._reader
        while self.state not in _CLOSED and (event := reader.next_event()) is not None:
            if isinstance(event, memoryview):
                if self._target is not None:
                    at = self._placed_bytes
                    self._target[at : at + len(event)] = event
                    self._placed_bytes = at + len(event)
            elif isinstance(event, CapsuleCmd):
                self._on_capsule(event, now_ns)
            elif isinstance(event, H2CData):
                self._target = self._transfers.accept(event)
                self._placed_bytes = 0
            elif isinstance(event, DataEnd):
                self._on_data_end(event, now_ns)
            elif isinstance(event, ICReq):
                self._on_init(event)
            else:
                assert isinstance(event, H2CTermReq)  # framing lets nothing else through
                self._on_term(event)

    def _on_term(self, pdu: H2CTermReq) -> None:
        """The host ends the connection, and with it the association (TCP 3.5)."""
        self.end(f"the host ended the connection: fatal error status {pdu.fatal_status}")
        self._card.protocol_error(self)

    def _on_init(self, request: ICReq) -> None:
        if request.pdu_format_version != 0:
            raise PeerViolation("PDU format version", FatalStatus.UNSUPPORTED_PARAMETER, 8, encode(request))
        if request.alignment_dwords > 32:
            raise PeerViolation("HPDA", FatalStatus.INVALID_HEADER_FIELD, 10, encode(request))
        config = self._card.config
        header_digest = request.header_digest and config.header_digest
        data_digest = request.data_digest and config.data_digest
        self._transfers.max_r2t = min(request.max_r2t, MAX_PENDING_R2T)
        self._wire = WireFormat(header_digest, data_digest, request.alignment_dwords * 4)
        self._reader.establish(WireFormat(header_digest, data_digest))
        self._step(ConnectionEvent.INITIALIZED)
        response = ICResp(1, header_digest, data_digest, config.max_h2c_data_bytes)
        self.outgoing.append(encode(response))
        self._card.mark_dirty(self)

    def _on_capsule(self, pdu: CapsuleCmd, now_ns: int) -> None:
        entry = SubmissionEntry.from_bytes(pdu.sqe)
        if self._flow_control:
            self._head = (self._head + 1) % self._entries
        if len(self._inflight) >= max(self._entries, 1):
            raise PeerViolation("more commands than the queue holds", FatalStatus.SEQUENCE_ERROR, 0)
        if entry.cid in self._inflight:
            self._capsule = None
            self._target = None
            self._send_completion(entry.cid, Reply(Status.COMMAND_ID_CONFLICT))
            return
        self._inflight.add(entry.cid)
        if not pdu.data_bytes:
            self._dispatch(entry, memoryview(b""), now_ns)
            return
        self._capsule = entry
        self._target = memoryview(bytearray(pdu.data_bytes))
        self._placed_bytes = 0

    def _on_data_end(self, end: DataEnd, now_ns: int) -> None:
        target, self._target = self._target, None
        entry, self._capsule = self._capsule, None
        if entry is None:
            if target is not None:
                self._transfers.finish(end)
            return  # without a target it was the data of a command that is refused already
        assert target is not None
        if end is DataEnd.CORRUPT:
            self.reply(entry.cid, Reply(Status.TRANSIENT_TRANSPORT_ERROR))
        else:
            self._dispatch(entry, target, now_ns)

    # ---- commands --------------------------------------------------------------------------------------------

    def _dispatch(self, entry: SubmissionEntry, data: memoryview, now_ns: int) -> None:
        fabrics = entry.opcode == FABRICS_OPCODE
        controller = self.controller
        if controller is None:
            if fabrics and entry.fabrics_type == FabricsType.CONNECT:
                self._connect(entry, data, now_ns)
            else:
                self.reply(entry.cid, Reply(Status.COMMAND_SEQUENCE_ERROR))
        elif fabrics:
            self._fabrics(controller, entry)
        elif self.queue_id == 0:
            reply = controller.admin(entry, len(data), now_ns)
            if reply is not None:
                self.reply(entry.cid, reply)
        elif not controller.ready:
            self.reply(entry.cid, Reply(Status.COMMAND_SEQUENCE_ERROR))
        else:
            self._io(entry, data)

    def _connect(self, entry: SubmissionEntry, data: memoryview, now_ns: int) -> None:
        if entry.sgl.kind != SglType.IN_CAPSULE_OFFSET or len(data) != CONNECT_DATA_BYTES:
            self.reply(entry.cid, Reply(Status.DATA_SGL_LENGTH_INVALID))
            return
        reply = self._card.connect(self, entry, data, now_ns)
        self._inflight.discard(entry.cid)
        # SQHD of FFFFh grants that the host does without SQ flow control (Base 6.3).
        agreed = reply.status == Status.SUCCESS and not self._flow_control
        self._send_completion(entry.cid, reply, 0xFFFF if agreed else self._head)

    def _fabrics(self, controller: Controller, entry: SubmissionEntry) -> None:
        if entry.fabrics_type == FabricsType.DISCONNECT and self.queue_id != 0:
            self.reply(entry.cid, Reply())
            controller.disconnected(self)
            self.end("the host disconnected the queue")
        elif entry.fabrics_type == FabricsType.CONNECT:
            self.reply(entry.cid, Reply(Status.COMMAND_SEQUENCE_ERROR))
        elif self.queue_id != 0:
            self.reply(entry.cid, Reply(Status.INVALID_OPCODE))
        else:
            self.reply(entry.cid, controller.fabrics(entry))

    def _io(self, entry: SubmissionEntry, data: memoryview) -> None:
        config = self._card.config
        judgement = judge(entry, len(data), config)
        if isinstance(judgement, Inbound):
            if data:
                self._start(entry.cid, execute(entry, data, config, pooled=False))
            else:
                self._transfers.begin(entry, judgement.length_bytes)
        else:
            self._start(entry.cid, judgement)

    def _start(self, cid: int, command: IoCommand | Status) -> None:
        if isinstance(command, Status):
            self._card.count(None, command)
            self.reply(cid, Reply(command))
        else:
            self._commands.append(command)
            self._card.mark_dirty(self)

    # ---- sending ---------------------------------------------------------------------------------------------

    def _send_data(self, cid: int, data: memoryview) -> None:
        """Send a command's data, and its completion: the SUCCESS flag stands for it where allowed (TCP 3.3.2.1)."""
        success = not self._flow_control
        outgoing = self.outgoing
        outgoing.append(encode_c2h_data(C2HData(cid, 0, len(data), last=True, success=success), self._wire))
        outgoing.append(data)
        if self._wire.data_digest:
            outgoing.append(digest.to_wire(digest.crc32c(data)))
        self._inflight.discard(cid)
        if success:
            self._card.mark_dirty(self)
        else:
            self._send_completion(cid, Reply())

    def _send_completion(self, cid: int, reply: Reply, sqhd: int | None = None) -> None:
        failed = reply.status != Status.SUCCESS
        entry = CompletionEntry(
            cid,
            reply.status,
            self._head if sqhd is None else sqhd,
            self.queue_id,
            reply.dw0,
            reply.dw1,
            do_not_retry=failed and reply.status not in _RETRYABLE,
        )
        self.outgoing.append(encode_response(entry.to_bytes(), self._wire))
        self._card.mark_dirty(self)
