"""Data that the host sends in PDUs of its own: R2Ts out, H2CData in (TCP 3.3.2.2, 3.6.2.8, 3.6.2.10). Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.framing import DataEnd
from xkv_nvmeof.pdu import R2T, FatalStatus, H2CData, PeerViolation, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.command import SubmissionEntry
    from xkv_nvmeof.controller_types import Buffers

MAX_PENDING_R2T: Final = 16
"""Most R2Ts outstanding for one command, however many the host would take."""


@dataclass(slots=True)
class _Transfer:
    """A command whose data the host sends in H2CData PDUs."""

    entry: SubmissionEntry
    length_bytes: int
    buffer: memoryview | None = None
    granted_bytes: int = 0
    open_grants: int = 0
    corrupt: bool = False


@dataclass(slots=True)
class _Grant:
    """One R2T: the host sends the bytes from `next_bytes` to `end_bytes` with its tag, in order."""

    tag: int
    transfer: _Transfer
    next_bytes: int
    end_bytes: int


class Transfers:
    """The transfers of one connection. A command gets its whole buffer before its first R2T.

    `send` takes R2Ts; `done` gets a command, its buffer (which is the caller's from then on) and whether the
    digests of its data were right.
    """

    def __init__(
        self,
        send: Callable[[R2T], None],
        done: Callable[[SubmissionEntry, memoryview, bool], None],
        buffers: Buffers,
        max_h2c_data_bytes: int,
    ) -> None:
        self._send = send
        self._done = done
        self._buffers = buffers
        self._max_h2c_data_bytes = max_h2c_data_bytes
        self._grants: dict[int, _Grant] = {}
        self._next_tag = 0
        self._starved: deque[_Transfer] = deque()
        self._current: _Grant | None = None
        self.max_r2t = 1
        """R2Ts that the host takes for one command (MAXR2T of its ICReq)."""

    @property
    def starved(self) -> bool:
        """Whether commands wait for a buffer."""
        return bool(self._starved)

    def begin(self, entry: SubmissionEntry, length_bytes: int) -> None:
        """Get the data of a command; those that wait for a buffer keep their order."""
        self._starved.append(_Transfer(entry, length_bytes))
        self.retry()

    def retry(self) -> None:
        """Start the commands that wait for a buffer, as far as there are some."""
        while self._starved:
            transfer = self._starved[0]
            transfer.buffer = self._buffers.allocate(transfer.length_bytes)
            if transfer.buffer is None:
                return
            self._starved.popleft()
            self._grant_more(transfer)

    def accept(self, pdu: H2CData) -> memoryview:
        """Judge the header of an H2CData and return where its data belongs.

        Raises:
            PeerViolation: nobody asked for that data.
        """
        grant = self._grants.get(pdu.transfer_tag)
        if grant is None:
            raise _refusal(pdu, "an unknown transfer tag", FatalStatus.INVALID_HEADER_FIELD, 10)
        if grant.transfer.entry.cid != pdu.command_id:
            raise _refusal(pdu, "another command's transfer tag", FatalStatus.INVALID_HEADER_FIELD, 8)
        if pdu.offset_bytes != grant.next_bytes:
            raise _refusal(pdu, "data out of order", FatalStatus.OUT_OF_RANGE, 12)
        end_bytes = pdu.offset_bytes + pdu.data_bytes
        if end_bytes > grant.end_bytes:
            raise _refusal(pdu, "more data than asked for", FatalStatus.OUT_OF_RANGE, 16)
        if pdu.last != (end_bytes == grant.end_bytes):
            raise _refusal(pdu, "the LAST flag", FatalStatus.INVALID_HEADER_FIELD, 1)
        assert grant.transfer.buffer is not None
        self._current = grant
        grant.next_bytes = end_bytes
        return grant.transfer.buffer[pdu.offset_bytes : end_bytes]

    def finish(self, end: DataEnd) -> None:
        """The data of the H2CData that was accepted last is complete."""
        grant, self._current = self._current, None
        assert grant is not None
        transfer = grant.transfer
        transfer.corrupt |= end is DataEnd.CORRUPT
        if grant.next_bytes < grant.end_bytes:
            return
        del self._grants[grant.tag]
        transfer.open_grants -= 1
        self._grant_more(transfer)

    def drop(self) -> None:
        """The connection ends: give all buffers back."""
        transfers = {id(grant.transfer): grant.transfer for grant in self._grants.values()}
        for transfer in transfers.values():
            if transfer.buffer is not None:
                self._buffers.release(transfer.buffer)
        self._grants.clear()
        self._starved.clear()
        self._current = None

    def _grant_more(self, transfer: _Transfer) -> None:
        """Ask for the next parts of a transfer, or end it when all is there."""
        while (
            transfer.granted_bytes < transfer.length_bytes
            and transfer.open_grants < self.max_r2t
            and not transfer.corrupt
        ):
            begin = transfer.granted_bytes
            end = min(begin + self._max_h2c_data_bytes, transfer.length_bytes)
            while self._next_tag in self._grants:
                self._next_tag = (self._next_tag + 1) & 0xFFFF
            tag = self._next_tag
            self._next_tag = (tag + 1) & 0xFFFF
            self._grants[tag] = _Grant(tag, transfer, begin, end)
            transfer.granted_bytes = end
            transfer.open_grants += 1
            self._send(R2T(transfer.entry.cid, tag, begin, end - begin))
        if not transfer.open_grants:
            assert transfer.buffer is not None
            self._done(transfer.entry, transfer.buffer, not transfer.corrupt)


def _refusal(pdu: H2CData, reason: str, status: FatalStatus, field_bytes: int) -> PeerViolation:
    return PeerViolation(f"{reason} in H2CData", status, field_bytes, encode(pdu))
