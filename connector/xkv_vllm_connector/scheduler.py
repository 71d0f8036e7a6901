"""The scheduler's side: what to offer, what to load, what to store. One instance, called by the engine's scheduler only.

Nothing here waits for the gateway longer than `lookups` allows. Blocks that are being stored are held in the engine's pool
until every rank has told the end of the job, so neither the end of a request nor its preemption can change them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_rpc.messages import scope_of
from xkv_vllm_connector.metadata import LoadJob, Part, StepPlan
from xkv_vllm_connector.offers import Entry, Offers
from xkv_vllm_connector.planning import blocks_to_load, chunks_to_load
from xkv_vllm_connector.requests import Event, State, Tracked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xkv_vllm_connector.groups import Geometry
    from xkv_vllm_connector.host import HostRequest, HostTables
    from xkv_vllm_connector.lookups import Lookups
    from xkv_vllm_connector.metadata import WorkerReport
    from xkv_vllm_connector.metrics import Stats
    from xkv_vllm_connector.settings import Settings
    from xkv_vllm_connector.stores import Stores

NEVER: Final = 1 << 62
STORE_PARAM: Final = "xkv_store"


class SchedulerSide:
    """See the module.

    Args:
        settings: The settings.
        geometry: The cache groups.
        fingerprint: What keys begin with.
        lookups: Asks the gateway.
        stores: Collects what is to be stored.
        stats: Counts.
        clock: Monotonic nanoseconds.
        warn: Takes one line for the operator, about something that happens once.
        sync: Whether loads are done within the step.
        reads: Whether this engine's role is to load.
        writes: Whether it is to store.
    """

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        fingerprint: bytes,
        lookups: Lookups,
        stores: Stores,
        stats: Stats,
        clock: Callable[[], int],
        warn: Callable[[str], None],
        *,
        sync: bool,
        reads: bool = True,
        writes: bool = True,
    ) -> None:
        self._reads = reads
        self._writes = writes
        self._settings = settings
        self._geometry = geometry
        self._fingerprint = fingerprint
        self._lookups = lookups
        self._stores = stores
        self._stats = stats
        self._clock = clock
        self._warn = warn
        self._sync = sync
        self._offers = Offers(geometry, lookups, stats, clock, lease_ms=settings.lease_ms, sync=sync)
        self._entries: dict[str, Entry] = {}
        self._leaving: dict[str, Tracked] = {}
        self._loads: list[LoadJob] = []
        self._warned: set[str] = set()
        self._failures_seen = 0

    # --- which requests take part -------------------------------------------------------------------------

    def begin(self, request: HostRequest) -> None:
        """A request has come."""
        scope = self._scope(request)
        if scope is not None:
            entry = Entry(request, self._from_the_start(Tracked(scope)))
            self._entries[request.request_id] = entry
            if self._may_read(request):
                self._offers.begin(entry)

    def _from_the_start(self, tracked: Tracked) -> Tracked:
        """Look at all chunks of a request again, or at none."""
        tracked.stored_chunks = 0
        tracked.next_store_tokens = self._geometry.chunk_tokens if self._writes else NEVER
        return tracked

    def _scope(self, request: HostRequest) -> bytes | None:
        """The tenant of a request; None: it takes no part, and nothing of it reaches the gateway."""
        params = request.kv_transfer_params
        # Whatever is not plainly allowed is forbidden: these come from a client.
        if params is not None and not (isinstance(params, dict) and params.get(STORE_PARAM, True) is True):
            return None
        salt = request.cache_salt
        if not salt:
            if self._settings.require_cache_salt:
                self._warn_once(
                    "salt",
                    "a request without cache_salt: require_cache_salt keeps such requests off the card",
                )
                return None
            return b""
        try:
            return scope_of(salt)
        except ValueError as error:
            # The error does not carry the salt.
            self._warn_once(
                "bad salt", f"a request whose cache_salt cannot be used stays off the card: {error}"
            )
            return None

    def _warn_once(self, what: str, line: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._warn(line)

    # --- what to offer ------------------------------------------------------------------------------------

    def _may_read(self, request: HostRequest) -> bool:
        return self._reads and not request.skip_reading_prefix_cache

    def match(self, request: HostRequest, computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens beyond `computed_tokens` can be loaded, and whether beside the running batch.

        The engine asks as often as it tries to schedule the request. (None, False): not known yet, ask again.
        """
        entry = self._entries.get(request.request_id)
        if entry is None or entry.tracked.state is State.BARRED or not self._may_read(request):
            return 0, False
        return self._offers.match(entry, computed_tokens)

    # --- what to load -------------------------------------------------------------------------------------

    def allocated(self, request: HostRequest, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine has made room; for `external_tokens`, it counts on what was offered."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            return
        tracked = entry.tracked
        if external_tokens == 0:
            self._offers.settled(entry)
            tracked.step(Event.DECLINE)
            return
        tracked.step(Event.ALLOCATE)
        tracked.ranks_pending = len(self._geometry.ranks) * self._stores.copies
        tracked.load_failed = False
        parts = self._parts_to_load(request, tables, tracked, tracked.offered_tokens + external_tokens)
        doomed = parts is None
        if parts is None:
            parts = self._parts_to_give_up(tables, tracked)
        self._loads.append(LoadJob(request.request_id, tracked.scope, parts, sync=self._sync, doomed=doomed))
        self._stats.add("loads")
        self._stats.add("hit_tokens", external_tokens)
        if not doomed:
            boundary = (tracked.offered_tokens + external_tokens) // self._geometry.chunk_tokens
            tracked.stored_chunks = max(tracked.stored_chunks, boundary)
            if self._writes:
                tracked.next_store_tokens = (tracked.stored_chunks + 1) * self._geometry.chunk_tokens

    def _parts_to_load(
        self, request: HostRequest, tables: Sequence[Sequence[int]], tracked: Tracked, boundary_tokens: int
    ) -> tuple[Part, ...] | None:
        """Name every object and where it goes; None where the engine's room is not what a hit needs."""
        geometry = self._geometry
        if boundary_tokens % geometry.chunk_tokens:
            return None
        boundary = boundary_tokens // geometry.chunk_tokens
        parts = []
        for number, group in enumerate(geometry.groups):
            for chunk in chunks_to_load(geometry, group, tracked.offered_tokens, boundary):
                blocks = blocks_to_load(
                    group, tables[group.group_id], chunk, tracked.offered_tokens, boundary_tokens
                )
                if blocks is None:
                    return None
                block_hash = request.block_hashes[(chunk + 1) * geometry.hashes_per_chunk - 1]
                parts.append(Part(number, chunk, block_hash, blocks, _lease_of(tracked.leases, chunk)))
        return tuple(parts)

    def _parts_to_give_up(self, tables: Sequence[Sequence[int]], tracked: Tracked) -> tuple[Part, ...]:
        """Name all blocks that nothing will fill, so that the engine can be told of them."""
        return tuple(
            Part(
                number, 0, b"", tuple(tables[group.group_id][tracked.offered_tokens // group.block_tokens :])
            )
            for number, group in enumerate(self._geometry.groups)
        )

    # --- once a step --------------------------------------------------------------------------------------

    def plan(self, scheduled: Mapping[str, int], tables: HostTables | None) -> StepPlan:
        """Put together what the workers do in this step.

        Args:
            scheduled: How many tokens of which request this step computes.
            tables: The blocks of those requests.
        """
        self._offers.step_ends()
        plan = StepPlan(
            self._fingerprint,
            self._loads,
            self._stores.take_finished(),
            idle=not scheduled,
            failures_seen=self._failures_seen,
        )
        self._loads = []
        if tables is not None and self._writes and self._lookups.available:
            self._collect(plan, scheduled, tables)
        return plan

    def _collect(self, plan: StepPlan, scheduled: Mapping[str, int], tables: HostTables) -> None:
        """Put the chunks into the plan that are whole after this step. Most requests have none: the loop is short for them."""
        entries, stores = self._entries, self._stores
        for request_id, states in (tables.boundary_state_offloads or {}).items():
            entry = entries.get(request_id)
            if entry is not None:
                plan.stores += stores.states(entry.request, entry.tracked, states)
        for request_id, tokens in scheduled.items():
            entry = entries.get(request_id)
            if entry is None:
                continue
            request, tracked = entry.request, entry.tracked
            certain = request.num_computed_tokens + tokens
            if certain < tracked.next_store_tokens:
                continue
            certain = min(certain, request.num_tokens)
            if certain < tracked.next_store_tokens:
                continue
            if stores.full:
                # Nobody's next chunk has room, so there is nothing to look for.
                self._stats.add("stores_put_off")
                return
            blocks = tables.get_block_ids(request_id)
            if blocks is not None:
                plan.stores += stores.collect(request, tracked, blocks, certain)

    def report(self, report: WorkerReport) -> None:
        """Take what the workers told."""
        self._failures_seen = max(self._failures_seen, report.sync_failures)
        if report.unavailable:
            self._lookups.heard(answered=False)
        for request_id, (count, well) in report.loads.items():
            entry = self._entries.get(request_id)
            tracked = entry.tracked if entry is not None else self._leaving.get(request_id)
            if tracked is None or not tracked.rank_done(count, failed=not well):
                continue
            self._leaving.pop(request_id, None)
            self._lookups.release(tracked.leases)
            tracked.leases = []
            if entry is not None:
                entry.answer = None
            if tracked.load_failed:
                self._stats.add("loads_failed")
                self._warn_once(
                    "load",
                    "a load failed and its request is computed; further ones only count in loads_failed",
                )
                # What was counted as stored may be what could not be read: store it again.
                self._from_the_start(tracked)
                self._stores.forget()
        self._stores.report(report)

    # --- the end ------------------------------------------------------------------------------------------

    def finished(self, request: HostRequest, tables: Sequence[Sequence[int]], *, aborted: bool) -> None:
        """A request has ended; its blocks are about to be freed."""
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return
        tracked = entry.tracked
        self._offers.end(entry)
        tracked.step(Event.FINISH)
        if tracked.state is State.LEAVING:
            self._leaving[request.request_id] = tracked
            return
        self._lookups.release(tracked.leases)
        if not aborted and self._lookups.available:
            # The last generated token was never computed.
            certain = min(request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1))
            if certain >= tracked.next_store_tokens:
                self._stores.collect_last(request, tracked, tables, certain)

    def renew(self, fingerprint: bytes) -> None:
        """Find nothing any more that was stored until now: the model has changed, say."""
        self._fingerprint = fingerprint
        self._offers.renew(fingerprint, self._entries.values())
        self._stores.renew()
        for entry in self._entries.values():
            self._from_the_start(entry.tracked)

    @property
    def pending(self) -> bool:
        """Whether the engine must go on stepping though nobody computes."""
        return self._stores.pending

    def close(self) -> None:
        """Ask and store nothing more."""
        self._lookups.close()


def _lease_of(leases: Iterable[tuple[int, bytes]], chunk: int) -> bytes | None:
    return next((lease for end, lease in leases if chunk < end), None)
