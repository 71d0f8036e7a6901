"""The mini engine with what a CPU cannot show: guesses of a draft model, and steps that are planned before the last one is done."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.connector.mini import MiniEngine
from tests.connector.mini_parts import BLOCK_BYTES, Status, Tables
from tests.rpc.harness import wait_until
from xkv_vllm_connector.planning import NULL_BLOCK

if TYPE_CHECKING:
    from tests.connector.mini_parts import MiniRequest
    from tests.connector.rig import Rig
    from xkv_vllm_connector.metadata import StepPlan

GUESS: Final = b"#" * BLOCK_BYTES
"""What a block holds that guesses have filled."""


@dataclass
class _Share:
    """A request's part of a step."""

    request: MiniRequest
    tokens: int
    guesses: int
    samples: bool
    stale: bool = False
    """It was preempted since."""

    @property
    def alive(self) -> bool:
        return not self.stale and self.request.status is Status.RUNNING


@dataclass
class _Flight:
    plan: StepPlan
    shares: list[_Share]
    bad: set[int]


class PipelinedEngine(MiniEngine):
    """See the module. As in vLLM, the count of computed tokens runs ahead of what is known to be right, and is taken back.

    Attributes:
        guesses: Tokens that a draft model proposes for each step of a request that decodes; a random part is accepted.
        lag: Whether a step is planned before the outcome of the one before is known.
    """

    def __init__(self, rig: Rig, *, guesses: int, lag: bool, seed: int = 0) -> None:
        plain = rig.engine
        super().__init__(plain.geometry, plain.side, plain.stores, plain.workers, plain.caches, plain.pool)
        self.guesses = guesses
        self.lag = lag
        self._draw = random.Random(seed)
        self._expected: dict[str, int] = {}
        """Tokens that steps under way will bring at most."""
        self._flight: _Flight | None = None

    def preempt(self, request: MiniRequest) -> None:
        if self._flight is not None:
            for share in self._flight.shares:
                share.stale |= share.request is request
        self._expected.pop(request.request_id, None)
        super().preempt(request)

    def step(self) -> None:
        planned = self._planned()
        if self.lag and self._flight is not None:
            self._completed(self._flight)
        self._executed(planned)
        if self.lag:
            self._flight = planned
        else:
            self._completed(planned)

    def _planned(self) -> _Flight:
        shares = [
            share for request in list(self.requests.values()) if (share := self._share(request)) is not None
        ]
        tables = {one.request.request_id: self._by_group_id(one.request) for one in shares}
        scheduled = {one.request.request_id: one.tokens for one in shares}
        plan = self.side.plan(scheduled, Tables(tables, {}))
        for one in shares:
            one.request.num_computed_tokens += one.tokens
            if one.samples:
                name = one.request.request_id
                self._expected[name] = self._expected.get(name, 0) + 1 + one.guesses
        return _Flight(plan, shares, set())

    def _share(self, request: MiniRequest) -> _Share | None:
        if request.status is Status.WAITING and not self._admit(request):
            return None
        if request.status is not Status.RUNNING:
            return None
        left = request.num_tokens + self._expected.get(request.request_id, 0) - request.num_computed_tokens
        tokens = min(self.budget, left)
        guesses = self.guesses if left == 1 and request.output else 0
        self._grow(request, request.num_computed_tokens + tokens + guesses)
        return _Share(request, tokens + guesses, guesses, samples=tokens == left)

    def _executed(self, flight: _Flight) -> None:
        for worker in self.workers:
            worker.start_loads(flight.plan)
        flight.bad = set().union(*(worker.take_bad_blocks() for worker in self.workers))
        for one in flight.shares:
            if one.alive:
                one.request.num_computed_tokens -= one.tokens
                self._compute(one.request, one.tokens, flight.bad)
                self._guess(one.request, one.request.num_computed_tokens + one.tokens)
                one.request.num_computed_tokens += one.tokens
        for worker in self.workers:
            worker.start_stores(flight.plan)
            worker.pause(flight.plan)
        # What is stored is copied at the worst moment: before any guess is settled.
        wait_until(lambda: not any(worker._under_way for worker in self.workers), "jobs are done")

    def _guess(self, request: MiniRequest, end: int) -> None:
        """Fill the blocks that end within the guesses with what must never be stored."""
        for number, group in enumerate(self.geometry.groups):
            for position in range(request.num_tokens // group.block_tokens, end // group.block_tokens):
                block = request.tables[number][position]
                if block != NULL_BLOCK:
                    for cache in self.caches:
                        cache.view(block)[:] = GUESS

    def _completed(self, flight: _Flight) -> None:
        self._collect()
        for one in flight.shares:
            if one.alive:
                self._complete(one, flight.bad)

    def _complete(self, one: _Share, bad: set[int]) -> None:
        request = one.request
        name = request.request_id
        if any(block in bad for table in request.tables for block in table):
            self._expected.pop(name, None)
            self._free(request)
            request.num_computed_tokens = request.local_tokens = 0
            request.status = Status.WAITING
            return
        later = self._expected.get(name, 0) - (1 + one.guesses if one.samples else 0)
        if one.samples:
            self._expected[name] = later
            accepted = self._draw.randrange(one.guesses + 1)
            request.num_computed_tokens -= one.guesses - accepted
            for _ in range(min(1 + accepted, request.new_tokens - len(request.output))):
                request.append()
        # What the step that is planned already will compute is not there yet.
        computed = min(request.num_computed_tokens, request.num_tokens - 1) if one.samples else None
        if computed is not None:
            self._fill(request, 0, computed)
            if len(request.output) >= request.new_tokens:
                self._expected.pop(name, None)
                self._end(request, aborted=False)
                return
            self._slide(request, computed)
