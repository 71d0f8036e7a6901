"""Asking about prompts before the engine comes to them: most have nothing on the card, and one message tells so of many.

A hit needs the first chunk that the engine has not itself, in some group that keeps every chunk. So the question is only whether
that one object is held: no lease, one key a prompt, all prompts of a tenant in one message. "No" is an answer; "yes" only means that it is
worth asking properly. One at a time, requests are asked about properly at once and this is not used at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

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
URGENT_MAX: Final = 1024
"""Requests that the engine waits for and that one step asks about."""


class Question(NamedTuple):
    """A chunk without which nothing from there on is of use."""

    scope: bytes
    chunk: int
    block_hash: bytes


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
        self._urgent: dict[str, Question] = {}
        """Those that the engine has come to already, in a step that had no time to ask properly."""
        self._waiting: dict[str, Question] = {}
        self._asked: dict[str, tuple[Question, _Batch, int]] = {}

    def add(self, request_id: str, question: Question) -> None:
        """Note a request that has come, and its first chunk."""
        self._waiting[request_id] = question

    def drop(self, request_id: str) -> None:
        """Forget a request: it is asked about properly, runs, or has ended."""
        for where in (self._asked, self._waiting, self._urgent):
            if where.pop(request_id, None) is not None:
                return

    def advance(self) -> None:
        """Ask about those that the engine waits for, and about the next ones, as many as the window has room for."""
        if not self._lookups.available:
            return
        chosen = dict(islice(self._urgent.items(), URGENT_MAX))
        asked = len(self._asked)
        if asked <= ENOUGH:
            chosen |= islice(self._waiting.items(), WINDOW - asked)
        if not chosen:
            return
        for request_id in chosen:
            if self._urgent.pop(request_id, None) is None:
                del self._waiting[request_id]
        questions = list(chosen.values())
        batch = _Batch(self._lookups.glance(questions), self._clock() + LIFETIME_NS)
        for place, (request_id, question) in enumerate(chosen.items()):
            self._asked[request_id] = (question, batch, place)
        self._stats.add("lookups_ahead", len(chosen))

    def verdict(self, request_id: str, question: Question) -> Verdict:
        """Say whether anything is held of a request from this chunk on; waits as long as a step may."""
        asked = self._asked.get(request_id)
        if asked is None or asked[0] != question:
            asked = self._in_the_crowd(request_id, question)
            if asked is None:
                return Verdict.LATER if request_id in self._urgent else Verdict.UNKNOWN
        _, batch, place = asked
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

    def _in_the_crowd(self, request_id: str, question: Question) -> tuple[Question, _Batch, int] | None:
        """Have a request asked about with others, if there are others. Alone, it is asked about properly at once."""
        known = self._waiting.get(request_id) == question
        if not known:
            # The engine has some of the prompt by now: it is about another chunk.
            self.drop(request_id)
        others = len(self._waiting) + len(self._urgent) - known
        if not others or not self._lookups.available:
            return None
        if known:
            self.advance()
            return self._asked.get(request_id)
        if not self._lookups.patient:
            self._urgent[request_id] = question
        return None

    def renew(self) -> None:
        """Believe nothing any more: ask again about everybody, the earliest first."""
        again = {request_id: question for request_id, (question, _, _) in self._asked.items()}
        self._waiting = again | self._waiting
        self._asked = {}
