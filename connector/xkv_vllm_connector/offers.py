"""What the engine is offered of each prompt: asked of the gateway, kept as long as it holds, let go when it is not taken.

A part of the scheduler's side. The engine asks as often as it tries to schedule a request, which for one that waits is in
every step, so most calls are answered from what is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_vllm_connector.ahead import Ahead, Question, Verdict
from xkv_vllm_connector.matching import chunks_wanted
from xkv_vllm_connector.requests import Event, State, Tracked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from xkv_vllm_connector.groups import Geometry
    from xkv_vllm_connector.host import HostRequest
    from xkv_vllm_connector.lookups import Found, Lookups
    from xkv_vllm_connector.metrics import Stats

MISS_MEMORY_NS: Final = 250_000_000
"""How long "nothing" is taken for an answer to the same question: the engine asks again in every step that a request waits."""


@dataclass(slots=True)
class _Answer:
    """What was found out for a request, as long as it holds."""

    chunks: int
    until_ns: int


@dataclass(slots=True)
class Entry:
    """A request that takes part."""

    request: HostRequest
    tracked: Tracked
    asked: Future[Found] | None = None
    asked_for: tuple[int, int] = (0, 0)
    """The chunks, from the first to the one after the last: another question has another answer."""
    answer: _Answer | None = None
    ahead: Question | None = None
    """Which chunk it is asked about with others; None: it is not."""


class Offers:
    """See the module.

    Args:
        geometry: The cache groups.
        lookups: Asks the gateway.
        stats: Counts.
        clock: Monotonic nanoseconds.
        lease_ms: How long the gateway holds what was found.
        sync: Whether loads are done within the step.
    """

    def __init__(
        self,
        geometry: Geometry,
        lookups: Lookups,
        stats: Stats,
        clock: Callable[[], int],
        *,
        lease_ms: int,
        sync: bool,
    ) -> None:
        self._geometry = geometry
        self._lookups = lookups
        self._stats = stats
        self._clock = clock
        self._sync = sync
        self._found_memory_ns = lease_ms * 1_000_000 // 3
        self._ahead = Ahead(lookups, stats, clock)

    def begin(self, entry: Entry) -> None:
        """A request has come: it may be asked about before the engine gets to it."""
        request, geometry = entry.request, self._geometry
        hashes = request.block_hashes
        _, end = chunks_wanted(geometry, request.num_tokens, 0, len(hashes))
        if end and self._lookups.glances:
            self._ahead.add(request.request_id, self._first(entry, 0))

    def _first(self, entry: Entry, chunk: int) -> Question:
        """Return what to ask of a request with others, about this chunk."""
        question = entry.ahead
        if question is None or question.chunk != chunk:
            block_hash = entry.request.block_hashes[(chunk + 1) * self._geometry.hashes_per_chunk - 1]
            question = entry.ahead = Question(entry.tracked.scope, chunk, block_hash)
        return question

    def step_ends(self) -> None:
        """The step is planned: while the engine computes it, the next requests can be asked about."""
        self._lookups.step_ends()
        self._ahead.advance()

    def match(self, entry: Entry, computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens beyond `computed_tokens` can be loaded, and whether beside the running batch.

        (None, False): not known yet, ask again.
        """
        if entry.tracked.state is State.LOADING:
            return None, False  # preempted within the step that loads: its outcome comes first
        request = entry.request
        question = chunks_wanted(
            self._geometry, request.num_tokens, computed_tokens, len(request.block_hashes)
        )
        if question[0] == question[1]:
            return self._settle(entry, computed_tokens, 0)
        if entry.asked is not None or entry.answer is not None:
            self._forget_other(entry, question)
            if entry.answer is not None:
                return self._settle(entry, computed_tokens, entry.answer.chunks)
        verdict = self._glanced(entry, question[0])
        if verdict is Verdict.NOTHING:
            return self._settle(entry, computed_tokens, 0)
        if verdict is Verdict.LATER:
            return None, False
        if entry.asked is None and not self._lookups.crowded:
            self._drop_ahead(entry)
            entry.asked = self._lookups.begin(entry.tracked.scope, request.block_hashes, *question)
            entry.asked_for = question
            if entry.asked is None:
                self._stats.add("lookups_skipped")
                return self._settle(entry, computed_tokens, 0)
            self._stats.add("lookups")
        found = self._heard(entry)
        if found is None:
            return None, False
        lifetime_ns = self._found_memory_ns if found.leases else MISS_MEMORY_NS
        entry.answer = _Answer(found.chunks, self._clock() + lifetime_ns)
        entry.tracked.leases = found.leases
        return self._settle(entry, computed_tokens, found.chunks)

    def _glanced(self, entry: Entry, chunk: int) -> Verdict:
        """What was found out of a request among others, from this chunk on."""
        if entry.asked is not None or not self._lookups.glances:
            return Verdict.UNKNOWN
        return self._ahead.verdict(entry.request.request_id, self._first(entry, chunk))

    def _forget_other(self, entry: Entry, question: tuple[int, int]) -> None:
        """Let go of what was asked or answered about something else, or too long ago."""
        answer = entry.answer
        if entry.asked is not None and entry.asked_for != question:
            self._lookups.forget(entry.asked)
            entry.asked = None
        if answer is not None and (entry.asked_for != question or self._clock() >= answer.until_ns):
            self.drop(entry)

    def _heard(self, entry: Entry) -> Found | None:
        """Get the answer to what was asked; None: not yet."""
        if entry.asked is None:
            return None
        began_ns = self._clock()
        found = self._lookups.wait(entry.asked)
        if found is not None:
            entry.asked = None
            self._stats.time("lookup_seconds", (self._clock() - began_ns) / 1e9)
            if not found.answered:
                self._stats.add("lookups_failed")
        return found

    def _settle(self, entry: Entry, computed_tokens: int, chunks: int) -> tuple[int, bool]:
        tracked, tokens = entry.tracked, max(0, chunks * self._geometry.chunk_tokens - computed_tokens)
        tracked.step(Event.OFFER if tokens else Event.MISS)
        tracked.offered_tokens = computed_tokens
        return tokens, bool(tokens) and not self._sync

    def settled(self, entry: Entry) -> None:
        """The engine has made room for a request, with or without what it was offered."""
        self._drop_ahead(entry)
        if entry.tracked.state is State.OFFERED:
            self.drop(entry)

    def _drop_ahead(self, entry: Entry) -> None:
        if entry.ahead is not None:
            entry.ahead = None
            self._ahead.drop(entry.request.request_id)

    def drop(self, entry: Entry) -> None:
        """Let go of an answer, and of what it leases."""
        entry.answer = None
        self._lookups.release(entry.tracked.leases)
        entry.tracked.leases = []

    def end(self, entry: Entry) -> None:
        """A request has ended."""
        self._drop_ahead(entry)
        if entry.asked is not None:
            self._lookups.forget(entry.asked)
            entry.asked = None

    def renew(self, fingerprint: bytes, entries: Iterable[Entry]) -> None:
        """Ask for keys with this fingerprint from now on, and believe no answer of before."""
        self._lookups.renew(fingerprint)
        self._ahead.renew()
        for entry in entries:
            self._forget_other(entry, (-1, -1))
            if entry.tracked.state is State.OFFERED:
                entry.tracked.step(Event.DECLINE)
