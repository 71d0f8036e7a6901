"""One TCP connection of the controller side: PDUs in, commands for the shell, PDUs out (TCP 3.3, 3.6). Pure.

The owner of the socket feeds `receive` (or receives straight into `sink` and tells `placed`), executes what
`take_commands` returns, gives each back with `complete`, and sends what `outgoing` holds, in order. After any call
into the core, connections with something to do are in `Card.take_dirty()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_nvmeof.command import SubmissionEntry
from xkv_nvmeof.controller_dispatch import dispatch, start
from xkv_nvmeof.controller_gate import Gate, is_step
from xkv_nvmeof.controller_io import execute
from xkv_nvmeof.controller_sender import Sender
from xkv_nvmeof.controller_states import CONNECTION_TABLE, ConnectionEvent, ConnectionState
from xkv_nvmeof.controller_transfers import MAX_PENDING_R2T, Transfers
from xkv_nvmeof.controller_types import (
    SETUP_DEADLINE_NS,
    AuthenticateCommand,
    IoCommand,
    Reply,
    Sent,
    ShutdownCommand,
    WriteCommand,
)
from xkv_nvmeof.digest import DigestPolicy
from xkv_nvmeof.framing import DataEnd, FrameReader, controller_limits
from xkv_nvmeof.pdu import (
    DIGEST_FIELD,
    PLAIN,
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
)
from xkv_nvmeof.spec import Status

if TYPE_CHECKING:
    from collections import deque

    from xkv_nvmeof.controller import Controller
    from xkv_nvmeof.controller_card import Card
    from xkv_nvmeof.controller_types import Buffers, Outgoing
    from xkv_nvmeof.discovery import Portal

_CLOSED: Final = frozenset({ConnectionState.ENDING, ConnectionState.CLOSED})


class ControllerConnection:
    """The controller's end of one queue. `queue_id` is known after Connect: 0 is the admin queue."""

    def __init__(self, card: Card, buffers: Buffers, portal: Portal, now_ns: int) -> None:
        config = card.config
        self.card = card
        self.portal = portal
        self.sender = Sender(lambda: card.mark_dirty(self))
        self.outgoing: deque[Outgoing] = self.sender.outgoing
        self.transfers = Transfers(
            self.sender.control, self.transfer_done, buffers, config.max_h2c_data_bytes
        )
        self._buffers = buffers
        self._reader = FrameReader(controller_limits(config.in_capsule_bytes, config.max_h2c_data_bytes))
        self._commands: list[IoCommand] = []
        self._capsule: SubmissionEntry | None = None
        self._target: memoryview | None = None
        self._placed_bytes = 0
        self.state = ConnectionState.WAIT_ICREQ
        self.setup_deadline_ns = now_ns + SETUP_DEADLINE_NS
        self.controller: Controller | None = None
        self.queue_id = 0
        self.gate: Gate | None = None
        """Where hosts must authenticate themselves: keeps the queue shut until they have."""
        self.end_reason = ""

    # ---- the shell's side ------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the socket is to be closed once `outgoing` is sent."""
        return self.state in _CLOSED

    @property
    def set_up(self) -> bool:
        """Whether the host has connected the queue and, where it must, authenticated itself."""
        return self.controller is not None and (self.gate is None or self.gate.open)

    def receive(self, chunk: memoryview, now_ns: int) -> None:
        """Take what was received. `chunk` may be reused afterwards."""
        if self.state in _CLOSED:
            return
        try:
            self._reader.feed(chunk)
            self._drain(now_ns)
        except PeerViolation as violation:
            self._violate(violation)

    def sink(self) -> memoryview | None:
        """Where the next bytes of the connection belong, when they are payload with a known place."""
        if self._target is None or not self._reader.data_pending_bytes:
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
        self.card.guard.finished(self, command)
        if isinstance(command, AuthenticateCommand):
            assert self.gate is not None
            self.gate.finished(command)
            return
        self.card.count(command, status)
        if isinstance(command, WriteCommand) and command.pooled:
            self._buffers.release(command.data)
        if data is not None and status == Status.SUCCESS and self.state not in _CLOSED:
            self.sender.data(command.cid, data)
            self.outgoing.append(Sent(data))
            return
        if data is not None:
            self._buffers.release(data)
        if self.state in _CLOSED:
            return
        if status == Status.SUCCESS:
            self.sender.success(command.cid)
        else:
            self.sender.reply(command.cid, Reply(status))

    def lost(self) -> None:
        """The TCP connection is gone, from either side."""
        was_live = self.state is ConnectionState.LIVE
        self._step(ConnectionEvent.LOST)
        self._drop_unfinished()
        self.card.connection_lost(self, unexpected=was_live)

    # ---- the controller's side -------------------------------------------------------------------------------

    def reply(self, cid: int, reply: Reply) -> None:
        """Send the completion of a command, and its data before it."""
        if self.state not in _CLOSED:
            self.sender.reply(cid, reply)

    def hand_over(self, command: IoCommand) -> None:
        """Give the shell something to execute."""
        self.card.guard.began(self, command)
        self._commands.append(command)
        self.card.mark_dirty(self)

    def connected(self, controller: Controller, queue_id: int, entries: int, *, flow_control: bool) -> None:
        """Connect succeeded: the connection is this queue from now on."""
        self._step(ConnectionEvent.CONNECTED)
        self.controller = controller
        self.queue_id = queue_id
        keys = self.card.config.authentication
        if keys is not None and not controller.discovery:
            self.gate = Gate(self, keys, (controller.host.hostnqn, controller.host.subnqn))
        self.sender.open(queue_id, entries, flow_control=flow_control)

    def transfer_done(self, entry: SubmissionEntry, buffer: memoryview, intact: bool) -> None:
        """Execute a command whose data came in PDUs of its own; not `intact`: a digest was wrong."""
        if not intact:
            self._buffers.release(buffer)
            self.reply(entry.cid, Reply(Status.TRANSIENT_TRANSPORT_ERROR))
            return
        if is_step(entry):
            assert self.gate is not None
            self.gate.transferred(entry, bytes(buffer))
            self._buffers.release(buffer)
            return
        guard = self.card.guard
        if guard.concerns(entry.opcode):
            guard.carry_out(self, entry, memoryview(bytes(buffer)))
            self._buffers.release(buffer)
            return
        command: IoCommand | Status = Status.RESERVATION_CONFLICT
        if not guard.refuses(self, entry.opcode):
            command = execute(entry, buffer, self.card.config, pooled=True)
        if not isinstance(command, WriteCommand):
            self._buffers.release(buffer)
        start(self, entry.cid, command)

    def end(self, reason: str) -> None:
        """Process nothing any more; what is queued is still sent before the socket closes."""
        if self.state in _CLOSED:
            return
        self._step(ConnectionEvent.END)
        self.end_reason = reason
        self._drop_unfinished()
        self.card.mark_dirty(self)

    # ---- receiving -------------------------------------------------------------------------------------------

    def _step(self, event: ConnectionEvent) -> None:
        self.state = CONNECTION_TABLE[self.state, event]

    def _violate(self, violation: PeerViolation) -> None:
        """End the connection with a TermReq that says how the host broke the protocol (TCP 3.5, 3.6.2.5)."""
        term = C2HTermReq(violation.fatal_status, violation.field_offset_bytes, violation.header)
        self.outgoing.append(encode(term))
        self._step(ConnectionEvent.VIOLATED)
        self.end_reason = f"protocol error: {violation.reason}"
        self._drop_unfinished()
        self.card.protocol_error(self)

    def _drop_unfinished(self) -> None:
        """Nothing more is received or begun; a shutdown that was asked for still happens."""
        self.transfers.drop()
        self._target = None
        for command in self._commands:
            if isinstance(command, WriteCommand) and command.pooled:
                self._buffers.release(command.data)
            self.card.guard.finished(self, command)
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
                self._target = self.transfers.accept(event)
                self._placed_bytes = 0
            elif isinstance(event, DataEnd):
                self._on_data_end(event, now_ns)
            elif isinstance(event, ICReq):
                self._on_init(event)
            else:
                assert isinstance(event, H2CTermReq)  # framing lets nothing else through
                self.end(f"the host ended the connection: fatal error status {event.fatal_status}")
                self.card.protocol_error(self)

    def _on_init(self, request: ICReq) -> None:
        if request.pdu_format_version != 0:
            raise PeerViolation("PDU format version", FatalStatus.UNSUPPORTED_PARAMETER, 8, encode(request))
        if request.alignment_dwords > 32:
            raise PeerViolation("HPDA", FatalStatus.INVALID_HEADER_FIELD, 10, encode(request))
        config = self.card.config
        header_digest = _granted(request, "header", config.header_digest, asked=request.header_digest)
        data_digest = _granted(request, "data", config.data_digest, asked=request.data_digest)
        self.transfers.max_r2t = min(request.max_r2t, MAX_PENDING_R2T)
        self.sender.control(ICResp(1, header_digest, data_digest, config.max_h2c_data_bytes))
        self.sender.wire = WireFormat(header_digest, data_digest, request.alignment_dwords * 4)
        self._reader.establish(WireFormat(header_digest, data_digest, PLAIN.alignment_bytes))
        self._step(ConnectionEvent.INITIALIZED)

    def _on_capsule(self, pdu: CapsuleCmd, now_ns: int) -> None:
        entry = SubmissionEntry.from_bytes(pdu.sqe)
        if not self.sender.fetch():
            raise PeerViolation("more commands than the queue holds", FatalStatus.SEQUENCE_ERROR, 0)
        if not self.sender.admit(entry.cid):
            return  # its data, if any, finds no place
        if not pdu.data_bytes:
            dispatch(self, entry, memoryview(b""), now_ns)
            return
        self._capsule = entry
        self._target = memoryview(bytearray(pdu.data_bytes))
        self._placed_bytes = 0

    def _on_data_end(self, end: DataEnd, now_ns: int) -> None:
        target, self._target = self._target, None
        entry, self._capsule = self._capsule, None
        if target is None:
            return  # the data of a command that is refused already
        if entry is None:
            self.transfers.finish(end)
        elif end is DataEnd.CORRUPT:
            self.reply(entry.cid, Reply(Status.TRANSIENT_TRANSPORT_ERROR))
        else:
            dispatch(self, entry, target, now_ns)


def _granted(request: ICReq, name: str, policy: DigestPolicy, *, asked: bool) -> bool:
    """Return whether a digest is used; a host that does without a required one is refused."""
    if policy is DigestPolicy.REQUIRED and not asked:
        reason = f"the {name} digest is required"
        raise PeerViolation(reason, FatalStatus.UNSUPPORTED_PARAMETER, DIGEST_FIELD, encode(request))
    return asked and policy is not DigestPolicy.OFF
