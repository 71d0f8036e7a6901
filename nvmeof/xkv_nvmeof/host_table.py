"""The commands of one host queue pair, from the outbox to the list of finished ones."""

from __future__ import annotations

from typing import Final

from xkv_nvmeof.host_command import NO_DEADLINE, CommandSlots, Exchange, Outcome
from xkv_nvmeof.host_outbox import Outbox
from xkv_nvmeof.pdu import encode_command

_COMPLETED: Final = Outcome.COMPLETED
_COMMAND_BYTES: Final = 4096
"""What a command counts beside its data when the load of a queue pair is judged."""


class CommandTable:
    """Submits exchanges and finishes each exactly once.

    An exchange that the controller failed while its data is still being sent stays in flight until that is out:
    the rest of a begun transfer must go, or the stream loses step, and its buffers are ours until then.
    """

    def __init__(self, entries: int, *, flow_control: bool) -> None:
        self.outbox = Outbox()
        self.slots = CommandSlots(entries, flow_control=flow_control)
        self.load_bytes = 0
        """Data of the commands in flight, and a little for each."""
        self.draining: list[Exchange] = []
        """Completed, but not wholly sent."""
        self._finished: list[Exchange] = []

    def submit(self, exchange: Exchange, *, in_capsule: bool) -> None:
        """Queue the capsule of `exchange`, with its data or without."""
        exchange.reset()
        exchange.point(self.slots.take(exchange), in_capsule=in_capsule)
        outbox = self.outbox
        exchange.starts_at = outbox.queued_bytes
        self.load_bytes += exchange.send_bytes + exchange.receive_bytes + _COMMAND_BYTES
        if in_capsule:
            size = exchange.requested_bytes = exchange.send_bytes
            exchange.send_end = outbox.put(
                encode_command(exchange.sqe, size, outbox.wire), exchange.send, size
            )
        else:
            exchange.send_end = outbox.put(encode_command(exchange.sqe, 0, outbox.wire))

    def find(self, cid: int) -> Exchange | None:
        """Return the exchange that the controller may still talk about under `cid`."""
        exchange = self.slots.in_flight.get(cid)
        return None if exchange in self.draining else exchange

    def unsent(self, exchange: Exchange) -> bool:
        """Whether bytes of the exchange wait in the outbox."""
        return exchange.send_end > self.outbox.sent_bytes

    def complete(self, exchange: Exchange) -> None:
        """The controller gave the status of `exchange`."""
        if self.unsent(exchange):
            self.draining.append(exchange)
        elif exchange.corrupt and exchange.status == 0:
            self._finish(exchange, Outcome.CORRUPT)
        else:
            self._finish(exchange, Outcome.COMPLETED)

    def succeed(self, exchange: Exchange) -> None:
        """The exchange completed with success; nothing of it is unsent or corrupt."""
        self._finish(exchange, _COMPLETED)

    def sent(self, count: int) -> None:
        """The connection took the next `count` bytes."""
        self.outbox.sent(count)
        if self.draining:
            for exchange in [one for one in self.draining if not self.unsent(one)]:
                self.draining.remove(exchange)
                self._finish(exchange, Outcome.COMPLETED)

    def fail_all(self) -> bool:
        """The connection is over: finish everything; tell whether a TermReq can still be sent (between PDUs)."""
        sent = self.outbox.sent_bytes
        between = self.outbox.drop()
        self.draining = []
        for exchange in list(self.slots.in_flight.values()):
            self._finish(exchange, Outcome.NEVER_SENT if exchange.starts_at >= sent else Outcome.LOST)
        return between

    def next_deadline_ns(self) -> int:
        """Return the earliest deadline of the commands in flight."""
        return min((one.deadline_ns for one in self.slots.in_flight.values()), default=NO_DEADLINE)

    def take_finished(self) -> list[Exchange]:
        """Return the exchanges that ended since the last call, in order."""
        finished = self._finished
        if finished:
            self._finished = []
        return finished

    def _finish(self, exchange: Exchange, outcome: Outcome) -> None:
        exchange.outcome = outcome
        exchange.abandon()
        self.slots.give_back(exchange.cid)
        self.load_bytes -= exchange.send_bytes + exchange.receive_bytes + _COMMAND_BYTES
        self._finished.append(exchange)
