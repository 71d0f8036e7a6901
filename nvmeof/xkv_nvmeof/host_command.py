"""Commands in flight on the host side of a queue pair: what is known of each, and their identifiers.

An `Exchange` is one command from its submission until its outcome. Its buffers belong to the queue pair from
`submit` until it appears among the finished ones; `abandon` gives the buffers of a read back earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from struct import Struct
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.spec import SglType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NO_DEADLINE: Final = 2**63 - 1
_CID: Final = Struct("<H")
_CID_FIELD: Final = 2
_SGL: Final = Struct("<QI3xB")
_SGL_FIELD: Final = 24
_CID_MAX: Final = 0xFFFF


class Outcome(Enum):
    """How an exchange ended."""

    PENDING = auto()
    COMPLETED = auto()
    """The controller gave a status (`status` is 0 for success); every byte of a successful read is there."""
    CORRUPT = auto()
    """A data digest did not match. The command is over; the queue pair goes on."""
    NEVER_SENT = auto()
    """The queue pair ended before a byte of the command left this process."""
    LOST = auto()
    """The queue pair ended with the command sent and without a status: it may or may not be executed."""


_PENDING: Final = Outcome.PENDING


@dataclass(slots=True, eq=False)
class Exchange:
    """One command. The maker fills the first group; the queue pair fills the rest, some of it at each submission.

    `sqe` is the submission entry with a command id of zero and the data pointer of a transfer in PDUs of its own;
    both are set by the queue pair. `send` and `receive` are byte views. `deadline_ns` is monotonic.
    """

    sqe: bytearray
    deadline_ns: int = NO_DEADLINE
    send: Sequence[memoryview] = ()
    send_bytes: int = 0
    receive: Sequence[memoryview] = ()
    receive_bytes: int = 0
    on_finish: Callable[[Exchange], None] | None = None
    """Called by the shell of the queue pair once the exchange is finished."""
    tries: int = 0
    may_be_short: bool = False
    """The controller may end the transfer before `receive_bytes`; `received_bytes` says where it did."""
    moves: int = 0
    """How often it went again by another association."""

    cid: int = -1
    status: int = field(init=False)
    """Status code type * 256 + status code."""
    do_not_retry: bool = False
    result: int = field(init=False)
    """Dwords 0 and 1 of the completion."""
    outcome: Outcome = field(init=False)
    received_bytes: int = field(init=False)
    requested_bytes: int = field(init=False)
    """How much of `send` the controller has asked for (or took in the capsule)."""
    saw_last: bool = field(init=False)
    corrupt: bool = field(init=False)
    starts_at: int = field(init=False)
    """Place of the first byte of the capsule in all that the queue pair ever sent."""
    send_end: int = field(init=False)
    """Place behind the last byte queued for this command."""
    r2t_ends: tuple[int, ...] = field(init=False)
    """Places behind the data of each request that is not out yet."""
    _targets: list[memoryview] | None = field(init=False)

    def reset(self) -> None:
        """Make the exchange ready for (another) submission."""
        self.outcome = _PENDING
        self.status = self.result = 0
        self.received_bytes = self.requested_bytes = 0
        self.saw_last = self.corrupt = False
        self.r2t_ends = ()
        self._targets = list(self.receive)

    def point(self, cid: int, *, in_capsule: bool) -> None:
        """Write the command id, and the data pointer of in-capsule data, into the entry (TCP 3.3.1.3)."""
        self.cid = cid
        _CID.pack_into(self.sqe, _CID_FIELD, cid)
        if in_capsule:
            _SGL.pack_into(self.sqe, _SGL_FIELD, 0, self.send_bytes, SglType.IN_CAPSULE_OFFSET)

    def move(self) -> None:
        """Make it ready for another queue pair: whether its data goes in the capsule is judged anew there."""
        self.moves += 1
        if self.send_bytes:
            _SGL.pack_into(self.sqe, _SGL_FIELD, 0, self.send_bytes, SglType.TRANSPORT_DATA_BLOCK)

    def abandon(self) -> None:
        """Never touch the `receive` buffers again; what still arrives for them is dropped."""
        self._targets = None

    def place(self, data: memoryview) -> None:
        """Copy the next received bytes into the buffers (or drop them, when abandoned)."""
        targets = self._targets
        self.received_bytes += len(data)
        if targets is None:
            return
        while data:
            target = targets[0]
            taken = min(len(target), len(data))
            target[:taken] = data[:taken]
            data = data[taken:]
            if taken == len(target):
                del targets[0]
            else:
                targets[0] = target[taken:]

    def direct_views(self, pending_bytes: int, max_views: int) -> list[memoryview]:
        """Return where the next `pending_bytes` go, in at most `max_views` views; empty when abandoned."""
        targets = self._targets
        if not targets:
            return []
        first = targets[0]
        if len(first) >= pending_bytes:
            return [first[:pending_bytes]]
        views: list[memoryview] = []
        for target in targets[:max_views]:
            view = target[:pending_bytes]
            views.append(view)
            pending_bytes -= len(view)
            if not pending_bytes:
                break
        return views

    def placed(self, count: int) -> None:
        """Tell that `count` bytes were received into the places that `direct_views` named."""
        self.received_bytes += count
        targets = self._targets
        assert targets is not None
        while count:
            target = targets[0]
            if count < len(target):
                targets[0] = target[count:]
                return
            count -= len(target)
            del targets[0]


def cut(views: Sequence[memoryview], offset_bytes: int, length_bytes: int) -> list[memoryview]:
    """Return the views of `length_bytes` bytes at `offset_bytes` of the concatenation of `views`."""
    if len(views) == 1:
        return [views[0][offset_bytes : offset_bytes + length_bytes]]
    found: list[memoryview] = []
    for view in views:
        size = len(view)
        if offset_bytes >= size:
            offset_bytes -= size
            continue
        piece = view[offset_bytes : offset_bytes + length_bytes]
        found.append(piece)
        offset_bytes = 0
        length_bytes -= len(piece)
        if not length_bytes:
            break
    return found


class CommandSlots:
    """Gives out command ids: low bits a slot, high bits the slot's generation.

    An id is given again only after all other generations of its slot, so a late completion of a command that is
    over names nobody. With submission queue flow control the free entries are known from SQHD (Base 3.3.1.2).
    """

    def __init__(self, entries: int, *, flow_control: bool) -> None:
        assert 2 <= entries <= 1 << 15
        self.entries = entries
        self.flow_control = flow_control
        self.in_flight: dict[int, Exchange] = {}
        self._generation = 1 << (entries - 1).bit_length()
        """What a slot's next id has more than the one before."""
        self._free = list(range(entries - 1))
        """Of each free slot its next id."""
        self._tail = 0
        self._head = 0

    @property
    def room(self) -> int:
        """How many commands may be submitted now."""
        if not self.flow_control:
            return len(self._free)
        return min(len(self._free), (self._head - self._tail - 1) % self.entries)

    def take(self, exchange: Exchange) -> int:
        """Give an id to `exchange`; there must be room."""
        cid = self._free.pop()
        self._tail = (self._tail + 1) % self.entries
        self.in_flight[cid] = exchange
        return cid

    def give_back(self, cid: int) -> None:
        """The command is over."""
        del self.in_flight[cid]
        self._free.append((cid + self._generation) & _CID_MAX)

    def head_moved(self, head: int) -> bool:
        """Take SQHD of a completion; False when it is no entry of the queue, or passes the tail."""
        if not self.flow_control:
            return True
        if (
            head >= self.entries
            or (head - self._head) % self.entries > (self._tail - self._head) % self.entries
        ):
            return False
        self._head = head
        return True
