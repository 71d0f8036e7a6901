"""A whole connector on a mini engine, with a gateway of a dict behind the real protocol."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.connector.mini import MiniEngine
from tests.connector.mini_parts import BLOCK_BYTES, Cache, Direct, MiniCopier, Pool
from tests.rpc.harness import DictService, Served, serving
from xkv_rpc.client import Client
from xkv_rpc.regions import RegionServer
from xkv_rpc.session import ClientOptions
from xkv_vllm_connector.channel import Channel
from xkv_vllm_connector.groups import Geometry, GroupFacts, Kind, plan_groups
from xkv_vllm_connector.lookups import Lookups
from xkv_vllm_connector.metrics import Stats, merge
from xkv_vllm_connector.scheduler import SchedulerSide
from xkv_vllm_connector.settings import Settings
from xkv_vllm_connector.stores import Stores
from xkv_vllm_connector.transfers import Kit
from xkv_vllm_connector.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FINGERPRINT: Final = bytes(range(16))
HASH_TOKENS: Final = 4
BLOCKS: Final = 8000
PATIENT: Final = Settings(
    lookup_timeout_ms=20_000, lookup_step_wait_ms=1000, load_timeout_ms=20_000, store_timeout_ms=20_000
)
"""Nothing is late here, however slow the machine is."""

FULL: Final = (GroupFacts(0, Kind.FULL, 4, BLOCK_BYTES),)
GEMMA: Final = (
    GroupFacts(0, Kind.WINDOW, 4, BLOCK_BYTES, 7),
    GroupFacts(1, Kind.WINDOW, 4, BLOCK_BYTES, 22),
    GroupFacts(2, Kind.FULL, 4, BLOCK_BYTES),
)
QWEN: Final = (
    GroupFacts(0, Kind.STATE, 8, BLOCK_BYTES),
    GroupFacts(1, Kind.STATE, 8, BLOCK_BYTES),
    GroupFacts(3, Kind.FULL, 8, BLOCK_BYTES),
)
LLAMA4: Final = (GroupFacts(0, Kind.CHUNKED, 4, BLOCK_BYTES, 16), GroupFacts(1, Kind.FULL, 4, BLOCK_BYTES))
MODELS: Final = {"full": FULL, "gemma": GEMMA, "qwen": QWEN, "llama4": LLAMA4}


@dataclass
class Rig:
    """What a test holds."""

    service: DictService
    served: Served
    geometry: Geometry
    settings: Settings
    engine: MiniEngine
    side: SchedulerSide
    stores: Stores
    lookups: Lookups
    workers: list[WorkerSide]
    stats: list[Stats]
    said: list[str] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)

    def count(self, name: str) -> int:
        for one in self.stats:
            merge(self.counts, one.take() or {})
        return int(self.counts.get(name, 0))

    def blocks_in_use(self) -> int:
        return sum(block.ref_cnt for block in self.engine.pool.blocks)


@contextlib.contextmanager
def gateway(
    service: DictService | None = None, *, regions: bool = True
) -> Iterator[tuple[DictService, Served]]:
    folder = Path(tempfile.mkdtemp(prefix="xkv-"))
    service = service or DictService()
    try:
        with serving(service) as served:
            server = None
            if regions:
                server = RegionServer(str(folder / "r.sock"), entropy=os.urandom)
                served.await_(server.start())
                service.regions = server
            try:
                yield service, served
            finally:
                if server is not None:
                    served.await_(server.aclose())
                    service.regions = None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_worker(
    rank: int,
    replicas: int,
    settings: Settings,
    geometry: Geometry,
    cache: Cache,
    client: Callable[[], Client],
    stats: Stats,
    clock: Callable[[], int],
    said: list[str],
) -> WorkerSide:
    first = rank - rank % replicas
    copiers = [MiniCopier(cache) for _ in geometry.groups]
    loads, stores = (Channel(client(), settings.key_namespace, 1 << 19, clock) for _ in range(2))
    kit = Kit(geometry, first, copiers, Direct(), stats, clock)
    return WorkerSide(settings, kit, (loads, stores), said.append, writer=rank == first)


@contextlib.contextmanager
def connector(
    service: DictService,
    served: Served,
    facts: tuple[GroupFacts, ...] = FULL,
    *,
    chunk_size: int = 8,
    ranks: int = 1,
    replicas: int = 1,
    sync: bool = False,
    clock: Callable[[], int] = time.monotonic_ns,
    endpoint: str | None = None,
    **changes: Any,
) -> Iterator[Rig]:
    """Start an engine with the connector; end it as an engine ends."""
    settings = replace(PATIENT, chunk_size=chunk_size, staging_bytes=1 << 20, **changes)
    geometry = plan_groups(facts, chunk_size, HASH_TOKENS, tuple(range(0, ranks, replicas)))
    said: list[str] = []
    stats = [Stats() for _ in range(ranks + 1)]

    def client() -> Client:
        return Client(
            endpoint or served.endpoint,
            ClientOptions(connect_timeout_ms=20_000, backoff_min_ms=1, backoff_max_ms=5),
        )

    lookups = Lookups(
        client(), geometry, FINGERPRINT, settings.key_namespace, lease_ms=settings.lease_ms,
        timeout_ms=settings.lookup_timeout_ms, step_wait_ms=settings.lookup_step_wait_ms, clock=clock, say=said.append,
    )  # fmt: skip
    stores = Stores(geometry, settings.max_store_backlog_bytes, replicas, stats[0], clock)
    side = SchedulerSide(
        settings, geometry, FINGERPRINT, lookups, stores, stats[0], clock, said.append, sync=sync
    )
    caches = [Cache(rank - rank % replicas, BLOCKS) for rank in range(ranks)]
    workers = [
        make_worker(rank, replicas, settings, geometry, caches[rank], client, stats[rank + 1], clock, said)
        for rank in range(ranks)
    ]
    engine = MiniEngine(geometry, side, stores, workers, caches, Pool(BLOCKS))
    try:
        yield Rig(service, served, geometry, settings, engine, side, stores, lookups, workers, stats, said)
    finally:
        side.close()
        for worker in workers:
            worker.close()
