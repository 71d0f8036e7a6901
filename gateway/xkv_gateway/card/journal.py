"""Where durable records go: the contract that `writer.JournalWriter` fulfils on the card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_gateway.core.records import Record
    from xkv_gateway.core.types import Lsn


class Journal(Protocol):
    """Takes the records of one turn of the loop as one batch (group commit)."""

    def submit(self, records: Sequence[Record], last_lsn: Lsn, durable: Callable[[Lsn], None]) -> None:
        """Write the batch; call `durable(last_lsn)` from the loop when it, and all before it, survive a power loss."""
        ...

    def cover(self, done: Callable[[], None]) -> None:
        """Call `done` from the loop when a flush that has begun after this call has succeeded; soon, where none is wanted.

        What was written to the card before this call is durable then, if the device has the incarnation yet in which it was written.
        """
        ...
