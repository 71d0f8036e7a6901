"""Asking about prompts before the engine comes to them: most have nothing on the card, and one message tells so of many.

A hit needs the first chunk of a prompt in some group that keeps every chunk. So the question is only whether that one object
is held: no lease, one key a prompt, all prompts of a tenant in one message. "No" is an answer; "yes" only means that it is
worth asking properly. One at a time, requests are asked about properly at once and this is not used at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from xkv_vllm_connector.lookups import Lookups
    from xkv_vllm_connector.metrics import Stats

WINDOW: Final = 256
"""Requests that are asked about ahead of the engine at most, in the order in which they came."""
ENOUGH: Final = WINDOW // 2
"""While more than these are asked about, a message can wait until it is worth more."""
LIFETIME_NS: Final = 2_000_000_000
"""After this the card may have got what it had not: ask again."""


class Verdict(Enum):
    """What is known of a prompt."""

    NOTHING = "nothing"
    """The card has nothing of it."""
    LATER = "later"
    """The answer is on its way."""
    UNKNOWN = "unknown"
    """Ask properly."""


@dataclass(slots=True)
class _Batch:
    """What was asked in one go, and the answer to each, once it is there."""

    asked: Future[list[bool] | None]
    until_ns: int
    held: list[bool] | None = None


class Ahead:
    """See the module.

    Args:
        lookups: Asks the gateway.
        stats: Counts.
        clock: Monotonic nanoseconds.
    """

    def __init__(self, lookups: Lookups, stats: Stats, clock: Callable[[], int]) -> None:
        self._lookups = lookups
        self._stats = stats
        self._clock = clock
        self._waiting: dict[str, tuple[bytes, bytes]] = {}
        self._asked: dict[str, tuple[_Batch, int, tuple[bytes, bytes]]] = {}

    def add(self, request_id: str, scope: bytes, first_hash: bytes) -> None:
        """Note a request that has come, and the block hash of its first chunk."""
        self._waiting[request_id] = (scope, first_hash)

    def drop(self, request_id: str) -> None:
        """Forget a request: it is asked about properly, runs, or has ended."""
        if self._waiting.pop(request_id, None) is None:
            self._asked.pop(request_id, None)

    def advance(self) -> None:
        """Ask about the next requests, as many as the window has room for."""
        asked = len(self._asked)
        if not self._waiting or asked > ENOUGH or not self._lookups.available:
            return
        chosen = [request_id for request_id, _ in zip(self._waiting, range(WINDOW - asked), strict=False)]
        questions = [self._waiting.pop(request_id) for request_id in chosen]
        batch = _Batch(self._lookups.glance(questions), self._clock() + LIFETIME_NS)
        for place, request_id in enumerate(chosen):
            self._asked[request_id] = (batch, place, questions[place])
        self._stats.add("lookups_ahead", len(chosen))

    def verdict(self, request_id: str) -> Verdict:
        """Say what is known of a request; waits as long as a step may."""
        asked = self._asked.get(request_id)
        if asked is None:
            if len(self._waiting) > 1 and request_id in self._waiting:
                self.advance()  # a crowd: ask about all of them
                asked = self._asked.get(request_id)
            if asked is None:
                return Verdict.UNKNOWN
        batch, place, _ = asked
        if batch.held is None:
            if not self._lookups.done(batch.asked):
                return Verdict.LATER
            batch.held = self._lookups.glanced(batch.asked)
            if batch.held is None:
                self._stats.add("lookups_failed")
        if batch.held is None or self._clock() >= batch.until_ns:
            self.renew()
            return Verdict.UNKNOWN
        return Verdict.UNKNOWN if batch.held[place] else Verdict.NOTHING

    def renew(self) -> None:
        """Believe nothing any more: ask again about everybody, the earliest first."""
        again = {request_id: question for request_id, (_, _, question) in self._asked.items()}
        self._waiting = again | self._waiting
        self._asked = {}
