"""What is to be stored, and the blocks that are held for it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from xkv_vllm_connector.groups import Kind
from xkv_vllm_connector.metadata import Part, StoreJob, WorkerReport
from xkv_vllm_connector.planning import blocks_to_store
from xkv_vllm_connector.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from xkv_vllm_connector.groups import Geometry, Group
    from xkv_vllm_connector.host import HostPool, HostRequest
    from xkv_vllm_connector.metrics import Stats
    from xkv_vllm_connector.requests import Tracked

RECENT_ENTRIES_MAX: Final = 1 << 17
RECENT_LIFETIME_NS: Final = 60_000_000_000
"""After this the gateway is asked again whether it still holds an object."""
FINISHED_JOBS_MAX: Final = 4096
"""Jobs of ended requests that wait for the next step."""


@dataclass(slots=True)
class _Held:
    """A job under way."""

    entries: list[tuple[bytes, int, bytes]]
    blocks: list[Any]
    bytes_each: int
    ranks_pending: int
    well: bool = True


class Stores:
    """Collects chunks, holds their blocks, and knows how much is under way.

    Args:
        geometry: The cache groups.
        backlog_bytes_max: Bytes of a rank that may be under way; beyond, a chunk is put off as long as its request lives.
        copies: Workers for each rank of the geometry: those that hold the same bytes.
        stats: Counts.
        clock: Monotonic nanoseconds.
    """

    def __init__(
        self, geometry: Geometry, backlog_bytes_max: int, copies: int, stats: Stats, clock: Callable[[], int]
    ) -> None:
        self._geometry = geometry
        self._backlog_bytes_max = backlog_bytes_max
        self.copies = copies
        self._stats = stats
        self._clock = clock
        self._pool: HostPool | None = None
        self._ids = itertools.count(1)
        self._held: dict[int, _Held] = {}
        self._finished: list[StoreJob] = []
        self._known: Recent[tuple[bytes, int, bytes]] = Recent(RECENT_ENTRIES_MAX, RECENT_LIFETIME_NS)
        self._by_id = {group.group_id: (number, group) for number, group in enumerate(geometry.groups)}
        self.backlog_bytes = 0
        self._chunk_bytes = sum(
            group.object_bytes for group in geometry.groups if group.kind is not Kind.STATE
        )

    def bind(self, pool: HostPool) -> None:
        """Take the engine's pool of blocks."""
        self._pool = pool

    @property
    def pending(self) -> bool:
        """Whether a job is under way, or waits for the next step."""
        return bool(self._held)

    @property
    def full(self) -> bool:
        """Whether there is no room for another chunk."""
        return self.backlog_bytes + self._chunk_bytes > self._backlog_bytes_max

    def collect(
        self, request: HostRequest, tracked: Tracked, tables: Sequence[Sequence[int]], certain_tokens: int
    ) -> list[StoreJob]:
        """Collect the chunks of a request that are whole now.

        Args:
            request: The request.
            tracked: What is known of it; it moves on.
            tables: Its blocks, group by group.
            certain_tokens: Tokens whose cache is there when this step is done, and that no verification can take back.
        """
        geometry = self._geometry
        # The shortest of what is certain, what has a hash and what has blocks; the rest is for a later step.
        end = min(
            certain_tokens // geometry.chunk_tokens,
            len(request.block_hashes) // geometry.hashes_per_chunk,
            *(
                len(tables[group.group_id]) // group.blocks_per_chunk
                for group in geometry.groups
                if group.kind is not Kind.STATE
            ),
        )
        parts: list[Part] = []
        room_bytes = self._backlog_bytes_max - self.backlog_bytes
        for chunk in range(tracked.stored_chunks, end):
            block_hash = request.block_hashes[(chunk + 1) * geometry.hashes_per_chunk - 1]
            fresh = [
                Part(number, chunk, block_hash, blocks)
                for number, group in enumerate(geometry.groups)
                if group.kind is not Kind.STATE and self._unknown(tracked.scope, group, block_hash)
                if (blocks := blocks_to_store(group, tables[group.group_id], chunk)) is not None
            ]
            room_bytes -= self._size(fresh)
            if fresh and room_bytes < 0:
                self._stats.add("stores_put_off")
                break
            parts += fresh
            tracked.stored_chunks = chunk + 1
        tracked.next_store_tokens = (tracked.stored_chunks + 1) * geometry.chunk_tokens
        return self._job(tracked.scope, parts)

    def collect_last(
        self, request: HostRequest, tracked: Tracked, tables: Sequence[Sequence[int]], certain_tokens: int
    ) -> None:
        """Collect what is left of a request that has ended; it is sent with the next step."""
        if not self.full and len(self._finished) < FINISHED_JOBS_MAX:
            self._finished += self.collect(request, tracked, tables, certain_tokens)
        left = certain_tokens // self._geometry.chunk_tokens - tracked.stored_chunks
        if left > 0:
            self._stats.add("chunks_shed", left)

    def states(
        self, request: HostRequest, tracked: Tracked, offers: Sequence[tuple[int, int, int]]
    ) -> list[StoreJob]:
        """Collect recurrent states that this step leaves behind: (group, block, tokens up to the boundary)."""
        geometry = self._geometry
        parts: list[Part] = []
        room_bytes = self._backlog_bytes_max - self.backlog_bytes
        for group_id, block, boundary in offers:
            number, group = self._by_id.get(group_id, (0, None))
            chunk, rest = divmod(boundary, geometry.chunk_tokens)
            at = chunk * geometry.hashes_per_chunk - 1
            if group is None or rest or not block or not 0 <= at < len(request.block_hashes):
                continue
            block_hash = request.block_hashes[at]
            if not self._unknown(tracked.scope, group, block_hash):
                continue
            room_bytes -= group.object_bytes
            if room_bytes < 0:
                self._stats.add("chunks_shed")
                break
            parts.append(Part(number, chunk - 1, block_hash, (block,)))
        return self._job(tracked.scope, parts)

    def take_finished(self) -> list[StoreJob]:
        """Hand over the jobs of requests that have ended since the last step."""
        jobs, self._finished = self._finished, []
        return jobs

    def report(self, report: WorkerReport) -> None:
        """Take what the workers told of their jobs; the blocks of those that every rank has ended are free."""
        for job_id, (count, well) in report.stores.items():
            held = self._held[job_id]
            held.ranks_pending -= count
            held.well &= well
            if held.ranks_pending > 0:
                continue
            del self._held[job_id]
            self.backlog_bytes -= held.bytes_each
            assert self._pool is not None
            self._pool.free_blocks(held.blocks)
            if held.well:
                now_ns = self._clock()
                for entry in held.entries:
                    self._known.add(entry, now_ns)

    def renew(self) -> None:
        """Drop what waits for the next step, and believe of no object that it is held."""
        jobs = self.take_finished()
        self.report(
            WorkerReport(stores={job.job_id: (self._held[job.job_id].ranks_pending, False) for job in jobs})
        )
        self.forget()

    def forget(self) -> None:
        """Believe of no object any more that it is held."""
        self._known = Recent(RECENT_ENTRIES_MAX, RECENT_LIFETIME_NS)

    def _unknown(self, scope: bytes, group: Group, block_hash: bytes) -> bool:
        return (scope, group.group_id, block_hash) not in self._known

    def _size(self, parts: Iterable[Part]) -> int:
        return sum(self._geometry.groups[part.group].object_bytes for part in parts)

    def _job(self, scope: bytes, parts: list[Part]) -> list[StoreJob]:
        pool = self._pool
        if not parts or pool is None:
            return []
        groups = self._geometry.groups
        blocks = [pool.blocks[block] for part in parts for block in part.blocks]
        pool.touch(blocks)
        size = self._size(parts)
        self.backlog_bytes += size
        job = StoreJob(next(self._ids), scope, tuple(parts))
        entries = [(scope, groups[part.group].group_id, part.block_hash) for part in parts]
        self._held[job.job_id] = _Held(entries, blocks, size, len(self._geometry.ranks) * self.copies)
        self._stats.add("chunks_planned", len(parts))
        return [job]
