"""A scripted NVMe/TCP controller on a real socket that sends hand-made PDUs.

It behaves by itself as far as a test does not care, and each test replaces what it is about: a hook sees each
command first and may answer with any bytes, with nothing at all, or by closing the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from tests.nvmeof.pdu_maker import PduMaker
from tests.ports import held_port
from xkv_nvmeof.command import ConnectCommand, ConnectData, SubmissionEntry
from xkv_nvmeof.framing import DataEnd, FrameReader, controller_limits
from xkv_nvmeof.identify import IdentifyController, IdentifyNamespace, NamespaceDescriptors
from xkv_nvmeof.pdu import (
    CapsuleCmd,
    H2CData,
    H2CTermReq,
    ICReq,
    ICResp,
    WireFormat,
    encode,
)
from xkv_nvmeof.spec import AdminOpcode, Capabilities, Cns, FabricsType, FeatureId, IoOpcode, Register, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from xkv_nvmeof.framing import Event

NQN = "nqn.2026-01.org.example:fake"
BLOCK = 512
HANG_S = 60.0
"""Nothing takes that long; it only keeps a hang from hanging the tests."""
SERIAL = "FAKE0001"


@dataclass
class Script:
    """What the target says of itself, and the hooks of a test."""

    store_bytes: int = 1 << 20
    mdts: int = 5
    min_page_bytes: int = 4096
    max_queue_entries: int = 128
    in_capsule_bytes: int = 4096
    in_capsule_offset_units: int = 0
    max_h2c_data_bytes: int = 131_072
    grant_header_digest: bool = False
    grant_data_digest: bool = False
    alignment_dwords: int = 1
    granted_queues: int = 64
    nguid: bytes = b"\x11" * 16
    uuid: bytes = b"\x22" * 16
    volatile_write_cache: int = 1
    multipath: int = 0
    access_group: int = 0
    nvm_commands: int = 0b1100
    keep_alive_ms: int | None = None
    use_success_flag: bool = False
    answer_setup: bool = True
    drip: bool = False
    """One byte per segment."""
    on_command: Callable[[FakeConnection, SubmissionEntry], Sequence[bytes] | None] = lambda _conn, _entry: (
        None
    )
    """Return PDUs to send instead of the usual answer (an empty list: say nothing), or None."""
    on_connect: Callable[[ConnectCommand, ConnectData], int] = lambda _command, _data: 0
    """Return the status of a Connect."""


@dataclass
class Seen:
    """What the target got from its host."""

    connects: list[tuple[ConnectCommand, ConnectData]] = field(default_factory=list)
    commands: list[tuple[int, SubmissionEntry]] = field(default_factory=list)
    capsule_data_bytes: list[int] = field(default_factory=list)
    capsule_data: bytes = b""
    """Of the last command that had some."""
    data_pdu_bytes: list[int] = field(default_factory=list)
    term_requests: list[H2CTermReq] = field(default_factory=list)
    lost: int = 0


class FakeTarget:
    """Use as `async with FakeTarget(script) as target:`; `target.port` is where it listens."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.seen = Seen()
        self.store = bytearray(self.script.store_bytes)
        self.size_blocks = self.script.store_bytes // BLOCK
        self.connections: list[FakeConnection] = []
        self.changed = asyncio.Event()
        self.port = 0
        self._held = contextlib.ExitStack()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self.port = self._held.enter_context(held_port())
        self._server = await loop.create_server(lambda: FakeConnection(self), "127.0.0.1", self.port)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop_listening()
        for connection in list(self.connections):
            connection.drop()
        if self._server is not None:
            await self._server.wait_closed()
        self._held.close()

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    def note(self) -> None:
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def connection_of(self, qid: int) -> FakeConnection:
        return [connection for connection in self.connections if connection.qid == qid][-1]


class FakeConnection(PduMaker, asyncio.Protocol):
    def __init__(self, target: FakeTarget) -> None:
        super().__init__()
        self.target = target
        self.script = target.script
        self.qid = -1
        self.host_wire = WireFormat()
        self.event_cids: list[int] = []
        self._reader = FrameReader(controller_limits(1 << 20, self.script.max_h2c_data_bytes))
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._pdu: CapsuleCmd | H2CData | None = None
        self._writes: dict[int, SubmissionEntry] = {}
        self._data_cid = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.target.connections.append(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self.target.connections.remove(self)
        self.target.seen.lost += 1
        self.target.note()

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def send(self, *pdus: bytes) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        data = b"".join(pdus)
        if self.script.drip:
            for index in range(len(data)):
                self._transport.write(data[index : index + 1])
        else:
            self._transport.write(data)

    # -- what comes in -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._reader.feed(memoryview(data))
        while (event := self._reader.next_event()) is not None:
            self._handle(event)
            self.target.note()

    def _handle(self, event: Event) -> None:
        match event:
            case memoryview():
                self._data += event
            case DataEnd():
                self._payload_whole(event)
            case ICReq():
                self._setup(event)
            case CapsuleCmd(sqe=sqe, data_bytes=0):
                self._command(SubmissionEntry.from_bytes(sqe), b"")
            case CapsuleCmd():
                self._pdu = event
            case H2CData():
                self.target.seen.data_pdu_bytes.append(event.data_bytes)
                self._pdu = event
            case H2CTermReq():
                self.target.seen.term_requests.append(event)
                self.drop()

    def _payload_whole(self, end: DataEnd) -> None:
        assert end is DataEnd.INTACT
        payload, self._data = bytes(self._data), bytearray()
        pdu, self._pdu = self._pdu, None
        if isinstance(pdu, CapsuleCmd):
            self._command(SubmissionEntry.from_bytes(pdu.sqe), payload)
        elif pdu is not None:
            self._write_data(pdu, payload)

    def _setup(self, request: ICReq) -> None:
        script = self.script
        self.wire = WireFormat(
            script.grant_header_digest, script.grant_data_digest, request.alignment_dwords * 4
        )
        digests = self.wire.header_digest, self.wire.data_digest
        self._reader.establish(WireFormat(*digests, script.alignment_dwords * 4))
        if script.answer_setup:
            self.send(encode(ICResp(script.alignment_dwords, *digests, script.max_h2c_data_bytes)))

    def _command(self, entry: SubmissionEntry, payload: bytes) -> None:
        seen = self.target.seen
        if entry.opcode == 0x7F and entry.fabrics_type == FabricsType.CONNECT:
            self._connect(entry, payload)
            return
        seen.commands.append((self.qid, entry))
        seen.capsule_data_bytes.append(len(payload))
        self.target.seen.capsule_data = payload or self.target.seen.capsule_data
        special = self.script.on_command(self, entry)
        if special is not None:
            self.send(*special)
        elif self.qid == 0:
            self._admin(entry)
        else:
            self._io(entry, payload)

    def _connect(self, entry: SubmissionEntry, payload: bytes) -> None:
        command, data = ConnectCommand.from_entry(entry), ConnectData.from_bytes(payload)
        self.target.seen.connects.append((command, data))
        special = self.script.on_command(self, entry)
        if special is not None:
            self.send(*special)
            return
        self.qid = command.qid
        self._entries = command.sqsize + 1
        self.send(self.response(entry.cid, self.script.on_connect(command, data), 5))

    def _admin(self, entry: SubmissionEntry) -> None:
        script, result = self.script, 0
        match entry.opcode:
            case AdminOpcode.FABRICS if entry.fabrics_type == FabricsType.PROPERTY_GET:
                if entry.cdw11 == Register.CAP:
                    caps = Capabilities(
                        script.max_queue_entries, 500_000_000, min_page_bytes=script.min_page_bytes
                    )
                    result = caps.to_int()
                elif entry.cdw11 == Register.CSTS:
                    result = 1
            case AdminOpcode.IDENTIFY:
                self._answer_identify(entry)
                return
            case AdminOpcode.GET_LOG_PAGE:
                self.answer_read(entry, bytes(entry.sgl.length_bytes))
                return
            case AdminOpcode.SET_FEATURES if entry.cdw10 & 0xFF == FeatureId.NUMBER_OF_QUEUES:
                result = min(entry.cdw11 & 0xFFFF, script.granted_queues - 1) * 0x10001
            case AdminOpcode.GET_FEATURES:
                if script.keep_alive_ms is None:
                    self.send(self.response(entry.cid, 2))
                    return
                result = script.keep_alive_ms
            case AdminOpcode.ASYNC_EVENT_REQUEST:
                self.event_cids.append(entry.cid)
                return
        self.send(self.response(entry.cid, 0, result))

    def _answer_identify(self, entry: SubmissionEntry) -> None:
        cns = entry.cdw10 & 0xFF
        if cns == Cns.NAMESPACE_DESCRIPTORS and not self.target.size_blocks:
            # As SPDK does: a namespace that is not there has no ids, though a structure of zeroes.
            self.send(self.response(entry.cid, Status.INVALID_FIELD))
        else:
            self.answer_read(entry, self._identify(cns))

    def _identify(self, cns: int) -> bytes:
        script = self.script
        match cns:
            case Cns.CONTROLLER:
                return IdentifyController(
                    SERIAL,
                    "Fake",
                    "1",
                    NQN,
                    5,
                    0x10400,
                    mdts=script.mdts,
                    multipath=script.multipath,
                    async_events=1 << 8,
                    nvm_commands=script.nvm_commands,
                    volatile_write_cache=script.volatile_write_cache,
                    io_command_capsule_units=4 + script.in_capsule_bytes // 16,
                    io_response_capsule_units=1,
                    in_capsule_data_offset_units=script.in_capsule_offset_units,
                ).to_bytes()
            case Cns.NAMESPACE:
                size = self.target.size_blocks
                formats = IdentifyNamespace.one_format(BLOCK)
                group = script.access_group
                return IdentifyNamespace(size, size, size, formats, access_group=group).to_bytes()
            case Cns.NAMESPACE_DESCRIPTORS:
                return NamespaceDescriptors(script.nguid, script.uuid).to_bytes()
            case _:
                return bytes(4096)

    def answer_read(self, entry: SubmissionEntry, payload: bytes) -> None:
        success = self.script.use_success_flag
        pdus = [self.data(entry.cid, 0, payload, last=True, success=success)]
        if not success:
            pdus.append(self.response(entry.cid))
        self.send(*pdus)

    def stored(self, entry: SubmissionEntry) -> bytes:
        start = (entry.cdw10 | entry.cdw11 << 32) * BLOCK
        return bytes(self.target.store[start : start + entry.sgl.length_bytes])

    def _io(self, entry: SubmissionEntry, payload: bytes) -> None:
        if entry.opcode == IoOpcode.READ:
            self.answer_read(entry, self.stored(entry))
        elif entry.opcode == IoOpcode.WRITE and not payload:
            self._writes[entry.cid] = entry
            self.send(self.r2t(entry.cid, 0, entry.sgl.length_bytes))
        elif entry.opcode == IoOpcode.WRITE:
            self._keep(entry, 0, payload)
            self.send(self.response(entry.cid))
        elif entry.opcode == IoOpcode.DATASET_MANAGEMENT and not payload:
            self._writes[entry.cid] = entry
            self.send(self.r2t(entry.cid, 0, entry.sgl.length_bytes))
        else:
            self.send(self.response(entry.cid))

    def _write_data(self, pdu: H2CData, payload: bytes) -> None:
        entry = self._writes[pdu.command_id]
        self._keep(entry, pdu.offset_bytes, payload)
        if pdu.offset_bytes + pdu.data_bytes == entry.sgl.length_bytes:
            assert pdu.last
            del self._writes[pdu.command_id]
            self.send(self.response(pdu.command_id))

    def _keep(self, entry: SubmissionEntry, offset: int, payload: bytes) -> None:
        if entry.opcode == IoOpcode.WRITE:
            start = (entry.cdw10 | entry.cdw11 << 32) * BLOCK + offset
            self.target.store[start : start + len(payload)] = payload

    def namespace_event(self) -> None:
        """Complete an event request: namespace attribute changed."""
        self.send(self.response(self.event_cids.pop(), 0, 0x0004_0002))
