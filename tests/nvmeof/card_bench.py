"""Drives the controller core without sockets: encodes what a host sends, executes on a bytearray, decodes answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from xkv_nvmeof import builders, digest
from xkv_nvmeof.command import CompletionEntry, ConnectCommand, ConnectData, Sgl, SubmissionEntry
from xkv_nvmeof.controller_card import Card
from xkv_nvmeof.controller_types import (
    AuthenticateCommand,
    CardConfig,
    DeallocateCommand,
    IoCommand,
    NamespaceInfo,
    ReadCommand,
    Sent,
    WriteCommand,
    WriteZeroesCommand,
)
from xkv_nvmeof.discovery import Portal
from xkv_nvmeof.framing import DataEnd, FrameReader, host_limits
from xkv_nvmeof.pdu import (
    PLAIN,
    R2T,
    C2HData,
    C2HTermReq,
    CapsuleResp,
    H2CData,
    ICReq,
    ICResp,
    Pdu,
    WireFormat,
    encode,
    encode_command,
    encode_h2c_data,
)
from xkv_nvmeof.spec import CNTLID_DYNAMIC, AdminOpcode, ControllerConfiguration, Register, Status

if TYPE_CHECKING:
    from xkv_nvmeof.controller_connection import ControllerConnection

NQN = "nqn.2026-01.example:card"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:5c0a7e1e-7a51-4d2e-8c11-000000000001"
HOST_ID = bytes(range(1, 17))
BLOCK_BYTES = 4096
BLOCKS = 1024
PORTAL = Portal("127.0.0.1", 4420)
SECOND_NS = 1_000_000_000
ENABLE = ControllerConfiguration(enable=True, sq_entry_log2=6, cq_entry_log2=4)


class CountingBuffers:
    """Buffers with a limit; knows which are out."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.out: dict[int, int] = {}

    def allocate(self, length_bytes: int) -> memoryview | None:
        if sum(self.out.values()) + length_bytes > self.limit_bytes:
            return None
        view = memoryview(bytearray(length_bytes))
        self.out[id(view.obj)] = length_bytes
        return view

    def release(self, buffer: memoryview) -> None:
        del self.out[id(buffer.obj)]


def make_config(**changes: object) -> CardConfig:
    namespace = NamespaceInfo(BLOCK_BYTES, BLOCKS, b"N" * 16, b"U" * 16, lambda: 3)
    config = CardConfig(NQN, namespace, "SERIAL0001", max_transfer_bytes=128 << 10)
    return replace(config, **changes)  # type: ignore[arg-type]


@dataclass
class Answer:
    """What the controller sent since the last look."""

    pdus: list[Pdu] = field(default_factory=list)
    data: dict[int, bytes] = field(default_factory=dict)

    @property
    def completions(self) -> list[CompletionEntry]:
        return [CompletionEntry.from_bytes(pdu.cqe) for pdu in self.pdus if isinstance(pdu, CapsuleResp)]

    @property
    def terms(self) -> list[C2HTermReq]:
        return [pdu for pdu in self.pdus if isinstance(pdu, C2HTermReq)]

    @property
    def r2ts(self) -> list[R2T]:
        return [pdu for pdu in self.pdus if isinstance(pdu, R2T)]


class RawHost:
    """One connection, as a host that can do everything wrong sees it."""

    def __init__(self, bench: CardBench, *, step_bytes: int = 0) -> None:
        self.bench = bench
        self.step_bytes = step_bytes
        self.buffers = CountingBuffers(bench.buffer_bytes)
        connection = bench.card.open(self.buffers, PORTAL, bench.now_ns)
        assert connection is not None
        self.connection: ControllerConnection = connection
        self._reader = FrameReader(host_limits(1 << 24))
        self.wire: WireFormat = PLAIN

    def send(self, data: bytes) -> Answer:
        """Send bytes, whole or in steps, let the card work, and return what came back."""
        step = self.step_bytes or max(len(data), 1)
        for at in range(0, len(data), step):
            chunk = memoryview(data)[at : at + step]
            while chunk:
                sink = self.connection.sink()
                if sink is not None:
                    taken = min(len(sink), len(chunk))
                    sink[:taken] = chunk[:taken]
                    self.connection.placed(taken)
                    chunk = chunk[taken:]
                    self.connection.receive(memoryview(b""), self.bench.now_ns)
                else:
                    self.connection.receive(chunk, self.bench.now_ns)
                    break
            self.bench.work()
        return self.answer()

    def answer(self) -> Answer:
        """Decode what the controller wants to send."""
        self.bench.work()
        sent = bytearray()
        for item in self.connection.outgoing:
            if isinstance(item, Sent):
                self.buffers.release(item.buffer)
            else:
                sent += item
        self.connection.outgoing.clear()
        answer = Answer()
        self._reader.feed(memoryview(bytes(sent)))
        current = -1
        while (event := self._reader.next_event()) is not None:
            if isinstance(event, memoryview):
                answer.data[current] = answer.data.get(current, b"") + bytes(event)
            elif isinstance(event, DataEnd):
                assert event is DataEnd.INTACT
            else:
                answer.pdus.append(event)
                if isinstance(event, C2HData):
                    current = event.command_id
                if isinstance(event, ICResp):
                    self.wire = WireFormat(event.header_digest, event.data_digest, event.alignment_dwords * 4)
                    self._reader.establish(self.wire)
        return answer

    # ---- what a host sends -----------------------------------------------------------------------------------

    def init(self, request: ICReq | None = None) -> Answer:
        return self.send(encode(request or ICReq()))

    def command(self, entry: SubmissionEntry, data: bytes = b"") -> Answer:
        message = encode_command(entry.to_bytes(), len(data), self.wire) + data
        if data and self.wire.data_digest:
            message += digest.to_wire(digest.crc32c(data))
        return self.send(message)

    def status(self, entry: SubmissionEntry, data: bytes = b"") -> Status:
        """Send a command and return the status of its one completion."""
        answer = self.command(entry, data)
        (completion,) = answer.completions
        assert completion.cid == entry.cid
        return Status(completion.status)

    def status_of_data(self, entry: SubmissionEntry) -> Status:
        """Send an admin command that returns data of any size; returns its status."""
        size = 4096 if entry.opcode == AdminOpcode.IDENTIFY else entry.sgl.length_bytes
        return self.status(replace(entry, sgl=Sgl.transport(size)))

    def h2c(self, r2t: R2T, data: bytes, *, last: bool = True, offset: int | None = None) -> bytes:
        at = r2t.offset_bytes if offset is None else offset
        header = encode_h2c_data(H2CData(r2t.command_id, r2t.transfer_tag, at, len(data), last), self.wire)
        tail = digest.to_wire(digest.crc32c(data)) if self.wire.data_digest else b""
        return header + data + tail

    def connect(self, qid: int = 0, **changes: Any) -> CompletionEntry:
        """Connect; `changes` are fields of the command or of its data."""
        command = ConnectCommand(1, qid, 31, kato_ms=0)
        data = ConnectData(HOST_ID, CNTLID_DYNAMIC, NQN, HOST_NQN)
        for name, value in changes.items():
            if hasattr(data, name):
                data = replace(data, **{name: value})
            else:
                command = replace(command, **{name: value})
        (completion,) = self.command(command.to_entry(), data.to_bytes()).completions
        return completion

    def property_get(self, register: Register, size_bytes: int = 4) -> int:
        (completion,) = self.command(builders.property_get(2, register, size_bytes)).completions
        assert completion.ok
        return completion.result

    def configure(self, configuration: ControllerConfiguration = ENABLE) -> Status:
        return self.status(builders.property_set(3, Register.CC, 4, configuration.to_int()))


class CardBench:
    """A card with its blocks in a bytearray."""

    def __init__(self, config: CardConfig | None = None, *, buffer_bytes: int = 1 << 40) -> None:
        self.card = Card(config or make_config())
        self.buffer_bytes = buffer_bytes
        self.now_ns = 1_000 * SECOND_NS
        self.blocks = bytearray(self.card.config.namespace.size_bytes)
        self.held: list[tuple[ControllerConnection, IoCommand]] = []
        self.hold = False
        self.executed: list[IoCommand] = []

    def host(self, *, step_bytes: int = 0, init: ICReq | None = None) -> RawHost:
        """A connection after ICReq and ICResp."""
        host = RawHost(self, step_bytes=step_bytes)
        host.init(init)
        return host

    def admin(self, *, enable: bool = True, **changes: Any) -> RawHost:
        """A connected admin queue."""
        host = self.host()
        completion = host.connect(**changes)
        assert completion.ok, completion.status_text
        if enable:
            assert host.configure() is Status.SUCCESS
        return host

    def queue(
        self,
        admin: RawHost,
        qid: int = 1,
        *,
        init: ICReq | None = None,
        step_bytes: int = 0,
        **changes: Any,
    ) -> RawHost:
        """A connected I/O queue of the admin queue's association."""
        host = self.host(init=init, step_bytes=step_bytes)
        controller = admin.connection.controller
        assert controller is not None
        completion = host.connect(qid, **{"cntlid": controller.cntlid, **changes})
        assert completion.ok, completion.status_text
        return host

    def work(self) -> None:
        """Execute what the core hands over."""
        while dirty := self.card.take_dirty():
            for connection in dirty:
                for command in connection.take_commands():
                    self.executed.append(command)
                    if self.hold:
                        self.held.append((connection, command))
                    else:
                        self.finish(connection, command)

    def finish(self, connection: ControllerConnection, command: IoCommand) -> None:
        data = None
        match command:
            case ReadCommand():
                data = connection._buffers.allocate(command.length_bytes)
                assert data is not None
                data[:] = self.blocks[command.offset_bytes : command.offset_bytes + command.length_bytes]
            case WriteCommand():
                self.blocks[command.offset_bytes : command.offset_bytes + len(command.data)] = command.data
            case AuthenticateCommand():
                command.run()
            case WriteZeroesCommand():
                self._zero(command.byte_range.offset_bytes, command.byte_range.length_bytes)
            case DeallocateCommand():
                for item in command.ranges:
                    self._zero(item.offset_bytes, item.length_bytes)
            case _:
                pass
        connection.complete(command, Status.SUCCESS, data)

    def _zero(self, offset_bytes: int, length_bytes: int) -> None:
        self.blocks[offset_bytes : offset_bytes + length_bytes] = bytes(length_bytes)


def write_entry(cid: int, first_block: int, block_count: int, *, in_capsule: bool) -> SubmissionEntry:
    size = block_count * BLOCK_BYTES
    return builders.write(
        cid, 1, first_block, block_count, Sgl.in_capsule(size) if in_capsule else Sgl.transport(size)
    )


def read_entry(cid: int, first_block: int, block_count: int) -> SubmissionEntry:
    return builders.read(cid, 1, first_block, block_count, Sgl.transport(block_count * BLOCK_BYTES))
