"""An engine of a page: it schedules like vLLM, in blocks and groups, and its "model" notices every wrong byte.

The cache of a block is a digest of the block hash that it stands for, of its group and of its rank. Before a step is
computed, everything that attention would read is compared with what it must be: a load that fills a block wrongly, a block
that was freed too early, a part that is missing is an AssertionError, where a real model would give wrong tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.connector.mini_parts import BLOCK_BYTES, MiniRequest, Status, Tables
from xkv_vllm_connector.groups import Kind
from xkv_vllm_connector.metadata import WorkerReport
from xkv_vllm_connector.planning import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.connector.mini_parts import Cache, Pool
    from xkv_vllm_connector.groups import Geometry
    from xkv_vllm_connector.scheduler import SchedulerSide
    from xkv_vllm_connector.stores import Stores
    from xkv_vllm_connector.worker import WorkerSide

STEPS_MAX: Final = 200_000


class MiniEngine:
    """See the module."""

    def __init__(
        self,
        geometry: Geometry,
        side: SchedulerSide,
        stores: Stores,
        workers: Sequence[WorkerSide],
        caches: Sequence[Cache],
        pool: Pool,
        budget: int = 32,
    ) -> None:
        self.geometry = geometry
        self.side = side
        self.stores = stores
        self.workers = workers
        self.caches = caches
        self.pool = pool
        self.budget = budget
        stores.bind(pool)
        self.requests: dict[str, MiniRequest] = {}
        self._received: dict[str, int] = {}
        self._failed: set[str] = set()
        self._bad: set[int] = set()

    # --- from outside -------------------------------------------------------------------------------------

    def add(self, request: MiniRequest) -> MiniRequest:
        self.requests[request.request_id] = request
        self.side.begin(request)
        return request

    def run(self, *requests: MiniRequest) -> None:
        """Run until these are done, and until nothing is pending."""
        for request in requests:
            self.add(request)
        self.settle()

    def settle(self) -> None:
        for _ in range(STEPS_MAX):
            if not self.requests and not self.side.pending:
                return
            self.step()
        raise AssertionError("a request hangs")

    def abort(self, request: MiniRequest) -> None:
        self._end(request, aborted=True)

    def preempt(self, request: MiniRequest) -> None:
        assert request.status is Status.RUNNING
        self._free(request)
        request.num_computed_tokens = 0
        request.local_tokens = 0
        request.status = Status.WAITING

    def step(self) -> None:
        scheduled: dict[str, int] = {}
        states: dict[str, list[tuple[int, int, int]]] = {}
        for request in list(self.requests.values()):
            if request.status is Status.WAITING and not self._admit(request):
                continue
            if request.status is not Status.RUNNING:
                continue
            tokens = min(self.budget, request.num_tokens - request.num_computed_tokens)
            tokens = self._align(request, tokens)
            self._grow(request, request.num_computed_tokens + tokens)
            scheduled[request.request_id] = tokens
            self._offer_states(request, request.num_computed_tokens + tokens, states)
        tables = {name: self._by_group_id(self.requests[name]) for name in scheduled}
        plan = self.side.plan(scheduled, Tables(tables, states))
        for worker in self.workers:
            worker.start_loads(plan)
        bad = set().union(*(worker.take_bad_blocks() for worker in self.workers))
        for name, tokens in scheduled.items():
            self._compute(self.requests[name], tokens, bad)
        for worker in self.workers:
            worker.start_stores(plan)
            worker.pause(plan)
        self._collect()
        for name, tokens in scheduled.items():
            self._after(self.requests[name], tokens, bad)

    # --- inside -------------------------------------------------------------------------------------------

    def _align(self, request: MiniRequest, tokens: int) -> int:
        """With recurrent states, a step of a prompt ends at a block boundary where it can."""
        state = next((group for group in self.geometry.groups if group.kind is Kind.STATE), None)
        if state is None or request.num_computed_tokens >= request.num_prompt_tokens:
            return tokens
        end = request.num_computed_tokens + tokens
        aligned = end - end % state.block_tokens
        last = (request.num_prompt_tokens - 1) // state.block_tokens * state.block_tokens
        aligned = min(aligned, last) if request.num_computed_tokens < last else end
        return aligned - request.num_computed_tokens if aligned > request.num_computed_tokens else tokens

    def _admit(self, request: MiniRequest) -> bool:
        local = min(request.local_tokens, request.num_tokens - 1)
        local -= local % self.geometry.chunk_tokens
        if local and not request.tables:
            self._compute_locally(request, local)
        request.asked += 1
        external, later = self.side.match(request, local)
        if external is None:
            return False
        assert external >= 0
        assert local + external <= request.num_tokens - 1
        assert (local + external) % self.geometry.chunk_tokens == 0 or external == 0
        request.external = external
        request.external_total += external
        if external:
            self._make_room(request, local, local + external)
        elif not request.tables:
            request.tables = [[] for _ in self.geometry.groups]
        self.side.allocated(request, self._by_group_id(request), external)
        request.num_computed_tokens = local + external
        request.status = Status.REMOTE if later else Status.RUNNING
        return not later

    def _compute_locally(self, request: MiniRequest, tokens: int) -> None:
        request.tables = [[] for _ in self.geometry.groups]
        self._grow(request, tokens)
        self._fill(request, 0, tokens)
        self._slide(request, tokens)

    def _by_group_id(self, request: MiniRequest) -> list[list[int]]:
        tables: list[list[int]] = [[] for _ in range(1 + max(g.group_id for g in self.geometry.groups))]
        for number, group in enumerate(self.geometry.groups):
            tables[group.group_id] = request.tables[number] if request.tables else []
        return tables

    def _make_room(self, request: MiniRequest, local: int, end: int) -> None:
        if not request.tables:
            request.tables = [[] for _ in self.geometry.groups]
        for number, group in enumerate(self.geometry.groups):
            table = request.tables[number]
            first = self._first_alive(number, end)
            for position in range(len(table), end // group.block_tokens):
                table.append(self.pool.new() if position >= first else NULL_BLOCK)
        assert local % self.geometry.chunk_tokens == 0
        self._slide(request, end)

    def _first_alive(self, number: int, tokens: int) -> int:
        """The first block of a group that the token after `tokens` still needs."""
        group = self.geometry.groups[number]
        end = tokens // group.block_tokens
        match group.kind:
            case Kind.FULL:
                return 0
            case Kind.STATE:
                # Within a block the state of the moment is in the block that is not full yet.
                return end if tokens % group.block_tokens else max(0, end - 1)
            case Kind.WINDOW:
                return max(0, end - group.reach_blocks)
            case Kind.CHUNKED:
                boundary = tokens // self.geometry.chunk_tokens
                return group.first_needed(boundary) * group.blocks_per_chunk

    def _grow(self, request: MiniRequest, tokens: int) -> None:
        for number, group in enumerate(self.geometry.groups):
            table = request.tables[number]
            needed = -(-tokens // group.block_tokens)
            while len(table) < needed:
                sparse = group.kind is Kind.STATE and len(table) < needed - 1
                table.append(NULL_BLOCK if sparse else self.pool.new())

    def _hash_of(self, request: MiniRequest, group_number: int, position: int) -> bytes:
        per_block = self.geometry.groups[group_number].block_tokens // self.geometry.hash_tokens
        return request.block_hashes[(position + 1) * per_block - 1]

    def _fill(self, request: MiniRequest, start: int, end: int) -> None:
        for number, group in enumerate(self.geometry.groups):
            for position in range(start // group.block_tokens, end // group.block_tokens):
                block = request.tables[number][position]
                if block != NULL_BLOCK:
                    for cache in self.caches:
                        cache.view(block)[:] = cache.content(
                            group.group_id, self._hash_of(request, number, position)
                        )

    def _check(self, request: MiniRequest) -> None:
        """What the model reads before it computes the next token is what it must be."""
        computed = request.num_computed_tokens
        for number, group in enumerate(self.geometry.groups):
            for position in range(self._first_alive(number, computed), computed // group.block_tokens):
                block = request.tables[number][position]
                assert block != NULL_BLOCK, f"group {group.group_id} lacks block {position}"
                wanted = self._hash_of(request, number, position)
                for cache in self.caches:
                    assert cache.view(block) == cache.content(group.group_id, wanted), "wrong tokens"

    def _compute(self, request: MiniRequest, tokens: int, bad: set[int]) -> None:
        spoilt = any(block in bad for table in request.tables for block in table)
        if not spoilt:
            self._check(request)
        start = request.num_computed_tokens
        end = min(start + tokens, request.num_tokens)
        self._fill(request, start, end)
        if spoilt:
            # The model went on with what was not there: what it made of it is worth nothing.
            for table in request.tables:
                for block in table[start // 4 :]:
                    for cache in self.caches:
                        cache.view(block)[:] = b"?" * BLOCK_BYTES

    def _offer_states(
        self, request: MiniRequest, end: int, states: dict[str, list[tuple[int, int, int]]]
    ) -> None:
        for number, group in enumerate(self.geometry.groups):
            if group.kind is Kind.STATE and end % group.block_tokens == 0 and end <= request.num_tokens:
                block = request.tables[number][end // group.block_tokens - 1]
                states.setdefault(request.request_id, []).append((group.group_id, block, end))

    def _slide(self, request: MiniRequest, tokens: int) -> None:
        """Free what is out of every window."""
        for number in range(len(self.geometry.groups)):
            table = request.tables[number]
            for position in range(min(self._first_alive(number, tokens), len(table))):
                if table[position] != NULL_BLOCK:
                    self.pool.free_blocks([self.pool.blocks[table[position]]])
                    table[position] = NULL_BLOCK

    def _after(self, request: MiniRequest, tokens: int, bad: set[int]) -> None:
        if any(block in bad for table in request.tables for block in table):
            # As vLLM's policy "recompute": from the first block that is not valid.
            self._free(request)
            request.num_computed_tokens = 0
            request.local_tokens = 0
            request.status = Status.WAITING
            return
        request.num_computed_tokens += tokens
        if request.num_computed_tokens >= request.num_tokens:
            if len(request.output) >= request.new_tokens:
                self._end(request, aborted=False)
                return
            request.append()
        self._slide(request, request.num_computed_tokens)

    def _collect(self) -> None:
        merged = WorkerReport()
        for worker in self.workers:
            received, failed = worker.take_received()
            self._failed |= failed
            for name in received:
                self._received[name] = self._received.get(name, 0) + 1
            report = worker.take_report()
            if report is not None:
                merged.add(report)
        if not merged.empty:
            self.side.report(merged)
        for name in [name for name, count in self._received.items() if count == len(self.workers)]:
            del self._received[name]
            self._arrived(name)

    def _arrived(self, name: str) -> None:
        request = self.requests.get(name)
        failed = name in self._failed
        self._failed.discard(name)
        assert request is not None, "the engine knows every request that it waits for"
        if request.status is Status.DONE:
            self._free(request)
            del self.requests[name]
            return
        assert request.status is Status.REMOTE
        request.status = Status.RUNNING
        if failed:
            self._free(request)
            request.num_computed_tokens = 0
            request.local_tokens = 0
            request.status = Status.WAITING

    def _end(self, request: MiniRequest, *, aborted: bool) -> None:
        remote = request.status is Status.REMOTE
        self.side.finished(request, self._by_group_id(request), aborted=aborted)
        request.status = Status.DONE
        if not remote:
            self._free(request)
            del self.requests[request.request_id]

    def _free(self, request: MiniRequest) -> None:
        for table in request.tables:
            self.pool.free_blocks(self.pool.blocks[block] for block in table if block != NULL_BLOCK)
        request.tables = []
