"""What the two sides tell each other, once a step. Pure; pickled by the engine on its way to another process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Part:
    """The object of one chunk of one group, and the blocks that it is made of. Each rank has its own."""

    group: int
    """The place of the group in the geometry."""
    chunk: int
    block_hash: bytes
    blocks: tuple[int, ...]
    """Its blocks in the engine, in order; 0: not this one (loads only)."""
    lease: bytes | None = None


@dataclass(frozen=True, slots=True)
class LoadJob:
    """What to bring for one request."""

    request_id: str
    scope: bytes
    parts: tuple[Part, ...]
    sync: bool = False
    """Within this step, before the model runs."""
    doomed: bool = False
    """The engine made no room that fits: fail at once, so that the tokens are computed."""

    def __repr__(self) -> str:
        return f"<LoadJob of {len(self.parts)} parts>"


@dataclass(frozen=True, slots=True)
class StoreJob:
    """What to keep for one request, once this step's model run is done."""

    job_id: int
    scope: bytes
    parts: tuple[Part, ...]

    def __repr__(self) -> str:
        return f"<StoreJob of {len(self.parts)} parts>"


@dataclass(slots=True)
class StepPlan:
    """What the scheduler's side asks of the workers in one step."""

    fingerprint: bytes = b""
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    idle: bool = False
    """Nothing is computed in this step: whoever has something under way may wait a moment for it."""
    failures_seen: int = 0
    """How many failed synchronous loads the scheduler knows of: stores planned before it knew of the last are void."""


@dataclass(slots=True)
class WorkerReport:
    """What workers tell the scheduler's side; those of all ranks are added up."""

    loads: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """For each request whose load has ended: in how many ranks, and whether in all of them well."""
    stores: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """The same for each store job; well: all of its objects are held now."""
    sync_failures: int = 0
    """Failed synchronous loads since the start, the most that any rank has seen."""
    unavailable: bool = False
    """The gateway did not answer a worker."""

    def add(self, other: WorkerReport) -> WorkerReport:
        """Merge another rank's report into this one."""
        for name, (count, well) in other.loads.items():
            have, good = self.loads.get(name, (0, True))
            self.loads[name] = (have + count, good and well)
        for job, (count, well) in other.stores.items():
            have, good = self.stores.get(job, (0, True))
            self.stores[job] = (have + count, good and well)
        self.sync_failures = max(self.sync_failures, other.sync_failures)
        self.unavailable |= other.unavailable
        return self

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.loads or self.stores or self.unavailable or self.sync_failures)
