"""What one controller connection sends: completions, data, R2Ts; and which commands are in flight. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from xkv_nvmeof import digest
from xkv_nvmeof.command import CQE, CompletionEntry
from xkv_nvmeof.controller_types import RETRYABLE, Outgoing, Reply
from xkv_nvmeof.pdu import PLAIN, C2HData, WireFormat, encode, encode_c2h_data, encode_response
from xkv_nvmeof.spec import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.pdu import Pdu

SQHD_NO_FLOW_CONTROL = 0xFFFF
"""SQHD of a Connect completion that grants to do without SQ flow control (Base 6.3)."""


class Sender:
    """The outgoing side of one connection; `changed` is called when there is something new to send."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._head = 0
        self._entries = 1
        self._inflight: set[int] = set()
        self.flow_control = True
        self.queue_id = 0
        self.wire: WireFormat = PLAIN
        self.outgoing: deque[Outgoing] = deque()

    def open(self, queue_id: int, entries: int, *, flow_control: bool) -> None:
        """The connection became this queue; its Connect was the first entry."""
        self.queue_id = queue_id
        self.flow_control = flow_control
        self._entries = entries
        self._head = 1 % entries if flow_control else 0

    def fetch(self) -> bool:
        """Count a submission entry as taken from the queue; False: the queue cannot hold so many commands."""
        if self.flow_control:
            self._head = (self._head + 1) % self._entries
        return len(self._inflight) < self._entries

    def admit(self, cid: int) -> bool:
        """Put the command in flight; False: there is one of that id, and this one was refused."""
        if cid in self._inflight:
            self._complete(cid, Reply(Status.COMMAND_ID_CONFLICT))
            return False
        self._inflight.add(cid)
        return True

    def control(self, pdu: Pdu) -> None:
        """Send a PDU without data: ICResp, R2T, TermReq."""
        self.outgoing.append(encode(pdu, self.wire))
        self._changed()

    def reply(self, cid: int, reply: Reply) -> None:
        """Complete a command in flight, its data first; of a command that is not, nothing is sent."""
        if cid not in self._inflight:
            return
        if reply.data and reply.status == Status.SUCCESS:
            self.data(cid, memoryview(reply.data))
            return
        self._inflight.discard(cid)
        self._complete(cid, reply)

    def connect_reply(self, cid: int, reply: Reply) -> None:
        """Complete a Connect."""
        self._inflight.discard(cid)
        agreed = reply.status == Status.SUCCESS and not self.flow_control
        self._complete(cid, reply, SQHD_NO_FLOW_CONTROL if agreed else None)

    def data(self, cid: int, data: memoryview) -> None:
        """Send a command's data and its success: as a flag of the data where that is allowed (TCP 3.3.2.1)."""
        success = not self.flow_control
        outgoing = self.outgoing
        outgoing.append(encode_c2h_data(C2HData(cid, 0, len(data), last=True, success=success), self.wire))
        outgoing.append(data)
        if self.wire.data_digest:
            outgoing.append(digest.to_wire(digest.crc32c(data)))
        self._inflight.discard(cid)
        if success:
            self._changed()
        else:
            self._succeed(cid)

    def success(self, cid: int) -> None:
        """Complete a command in flight with success and no result: `reply` in short, as most commands end so."""
        if cid in self._inflight:
            self._inflight.discard(cid)
            self._succeed(cid)

    def _succeed(self, cid: int) -> None:
        entry = CQE.pack(0, 0, self._head, self.queue_id, cid, 0)
        self.outgoing.append(encode_response(entry, self.wire))
        self._changed()

    def _complete(self, cid: int, reply: Reply, sqhd: int | None = None) -> None:
        failed = reply.status != Status.SUCCESS
        entry = CompletionEntry(
            cid,
            reply.status,
            self._head if sqhd is None else sqhd,
            self.queue_id,
            reply.dw0,
            reply.dw1,
            do_not_retry=failed and reply.status not in RETRYABLE,
        )
        self.outgoing.append(encode_response(entry.to_bytes(), self.wire))
        self._changed()
