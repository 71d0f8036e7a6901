"""Puts a connector together, and says in one line what is on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from xkv_rpc.client import Client
from xkv_rpc.curve_files import read_client_keys
from xkv_rpc.errors import XkvRpcError
from xkv_rpc.session import ClientOptions
from xkv_vllm_connector.channel import Channel
from xkv_vllm_connector.facts import fingerprint_parts, group_facts, ranks_of
from xkv_vllm_connector.fingerprint import fingerprint_of
from xkv_vllm_connector.groups import Geometry, UnsupportedModelError, plan_groups
from xkv_vllm_connector.keys import FINGERPRINT_BYTES
from xkv_vllm_connector.lookups import Lookups
from xkv_vllm_connector.metrics import Stats
from xkv_vllm_connector.scheduler import SchedulerSide
from xkv_vllm_connector.settings import SettingsError
from xkv_vllm_connector.stores import Stores
from xkv_vllm_connector.transfers import Kit
from xkv_vllm_connector.worker import WorkerSide

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from xkv_vllm_connector.settings import Settings

OBJECT_BYTES_MAX: Final = 64 << 20
"""What the gateway takes as one object, unless it is configured otherwise."""
RECOMPUTE: Final = "recompute"


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine's configuration.

    Attributes:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig`.
        hash_tokens: Tokens of one block hash.
        version: vLLM's major and minor version.
        kind_of: vLLM's `get_kv_cache_spec_kind`.
        hash_seeded: Whether PYTHONHASHSEED is set.
    """

    vllm_config: Any
    kv_cache_config: Any
    hash_tokens: int
    version: str
    kind_of: Callable[[Any], Any]
    hash_seeded: bool


class Assembly:
    """The parts of one connector instance: the scheduler's side, or a worker's.

    Raises:
        SettingsError: A setting does not fit the model.
    """

    def __init__(
        self, settings: Settings, engine: Engine, logger: logging.Logger, clock: Callable[[], int]
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._logger = logger
        self._clock = clock
        self._stats = Stats()
        self._side: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._off: str | None = None
        parallel = engine.vllm_config.parallel_config
        self._replicas = int(getattr(engine.kv_cache_config, "kv_tp_replicas", 1))
        self._geometry: Geometry | None = None
        if not engine.vllm_config.cache_config.enable_prefix_caching:
            # The engine would ask all the same, and compute wrong tokens after a hit.
            self._off = "prefix caching is off"
            return
        try:
            facts = group_facts(
                engine.kv_cache_config, int(parallel.decode_context_parallel_size), engine.kind_of
            )
            ranks = ranks_of(int(parallel.world_size), self._replicas)
            self._geometry = plan_groups(facts, settings.chunk_size, engine.hash_tokens, ranks)
        except UnsupportedModelError as error:
            self._off = str(error)
            return
        self._fits_into_memory(int(parallel.world_size))
        largest = max(group.object_bytes for group in self._geometry.groups)
        if largest > min(OBJECT_BYTES_MAX, settings.staging_bytes // 2):
            raise SettingsError(
                "chunk_size",
                f"an object of {self._geometry.chunk_tokens} tokens has {largest} bytes, more than the gateway's "
                f"{OBJECT_BYTES_MAX} or half of staging_bytes",
            )
        self.stores = Stores(
            self._geometry, settings.max_store_backlog_bytes, self._replicas, self._stats, clock
        )

    def _fits_into_memory(self, workers: int) -> None:
        """Refuse a size that the machine would find out about by killing processes: the memory is taken at once."""
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self._settings.staging_bytes > memory_bytes // 4:
            raise SettingsError(
                "staging_bytes",
                f"{self._settings.staging_bytes} for each of {workers} workers, where this machine has {memory_bytes} in all",
            )

    def _warn(self, line: str) -> None:
        self._logger.warning("FusIOnX: %s", line)

    def _client(self, connections_max: int, timeout_ms: int) -> Client:
        settings = self._settings
        try:
            keys = read_client_keys(settings.xkv_keys) if settings.xkv_keys else None
        except XkvRpcError as error:
            raise SettingsError("xkv_keys", str(error)) from error
        # The probing is left to `Lookups`: the client's own circuit is always ready to try again when that is.
        return Client(
            settings.endpoint,
            ClientOptions(
                timeout_ms=timeout_ms,
                connect_timeout_ms=timeout_ms,
                backoff_min_ms=10,
                backoff_max_ms=50,
                connections_max=connections_max,
                keys=keys,
            ),
            clock=self._clock,
        )

    @property
    def _fingerprint(self) -> bytes:
        geometry, engine = self._geometry, self._engine
        assert geometry is not None
        parts = fingerprint_parts(
            engine.vllm_config, engine.kv_cache_config, geometry.chunk_tokens, geometry.hash_tokens
        )
        return fingerprint_of(
            {**parts, "model_fingerprint": self._settings.model_fingerprint, "vllm_version": engine.version}
        )

    def scheduler_side(self) -> SchedulerSide | None:
        """Make the scheduler's side; None: the connector is off, and says why."""
        self._see_to_policy()
        geometry = self._geometry
        if geometry is None:
            self._warn(f"off, since {self._off}: nothing is read from the card and nothing stored")
            return None
        settings, transfer = self._settings, self._engine.vllm_config.kv_transfer_config
        sync = self._may_be_sync()
        fingerprint = self._fingerprint
        lookups = Lookups(
            self._client(4, settings.lookup_timeout_ms),
            geometry,
            fingerprint,
            settings.key_namespace,
            lease_ms=settings.lease_ms,
            timeout_ms=settings.lookup_timeout_ms,
            step_wait_ms=settings.lookup_step_wait_ms,
            clock=self._clock,
            say=self._warn,
        )
        self._side = SchedulerSide(
            settings,
            geometry,
            fingerprint,
            lookups,
            self.stores,
            self._stats,
            self._clock,
            self._warn,
            sync=sync,
            reads=bool(transfer.is_kv_consumer),
            writes=bool(transfer.is_kv_producer),
        )
        self._say_what_is_on(geometry, fingerprint, sync=sync)
        return self._side

    def _see_to_policy(self) -> None:
        transfer = self._engine.vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != RECOMPUTE:
            # The engine reads it after it has made its connector. A cache that fails is a miss, never a failed request.
            transfer.kv_load_failure_policy = RECOMPUTE
            self._warn(
                "kv_load_failure_policy is set to recompute; with fail, a card that cannot be read would fail requests"
            )

    def _may_be_sync(self) -> bool:
        if self._settings.load_mode != "sync":
            return False
        config = self._engine.kv_cache_config
        if len(config.kv_cache_groups) > 1 or self._engine.vllm_config.parallel_config.world_size > 1:
            # A load that fails within a step cannot be told of in the first case, nor undone everywhere in the second.
            self._warn("load_mode sync needs one cache group and one worker: loads are asynchronous")
            return False
        return True

    def _say_what_is_on(self, geometry: Geometry, fingerprint: bytes, *, sync: bool) -> None:
        settings, cache = self._settings, self._engine.vllm_config.cache_config
        self._logger.info(
            "FusIOnX: on: gateway %s%s, chunks of %d tokens (chunk_size %d), groups %s, %d ranks, namespace %r, fingerprint %s, "
            "loads %s, require_cache_salt %s",
            settings.endpoint,
            " with keys" if settings.xkv_keys else "",
            geometry.chunk_tokens,
            settings.chunk_size,
            " ".join(
                f"{group.group_id}:{group.kind.value}:{group.object_bytes}B" for group in geometry.groups
            ),
            len(geometry.ranks),
            settings.key_namespace,
            fingerprint.hex(),
            "sync" if sync else "async",
            settings.require_cache_salt,
        )
        algorithm = str(getattr(cache, "prefix_caching_hash_algo", ""))
        if not algorithm.startswith("sha256") and not self._engine.hash_seeded:
            self._warn(
                f"prefix_caching_hash_algo {algorithm} without PYTHONHASHSEED: hashes differ in every run, so nothing is "
                "found again after a restart; sha256_cbor is recommended"
            )

    def worker_side(self, kv_caches: dict[str, Any]) -> WorkerSide | None:
        """Make a worker's side, with its threads."""
        geometry, engine, settings = self._geometry, self._engine, self._settings
        if geometry is None or not kv_caches:
            return None
        # Torch is loaded already; the scheduler's side does without.
        from xkv_vllm_connector.copies import GroupCopier, Streams, device_of  # noqa: PLC0415

        config = engine.kv_cache_config
        streams = Streams(device_of(kv_caches))
        copiers = [
            GroupCopier(
                [
                    kv_caches[name]
                    for name in config.kv_cache_groups[group.group_id].layer_names
                    if name in kv_caches
                ],
                config.num_blocks,
            )
            for group in geometry.groups
        ]
        rank = int(engine.vllm_config.parallel_config.rank)
        channels = tuple(
            Channel(
                self._client(1, timeout_ms),
                settings.key_namespace,
                settings.staging_bytes // 2,
                self._clock,
                streams.pin,
            )
            for timeout_ms in (settings.load_timeout_ms, settings.store_timeout_ms)
        )
        self._worker = WorkerSide(
            settings,
            Kit(geometry, rank - rank % self._replicas, copiers, streams, self._stats, self._clock),
            (channels[0], channels[1]),
            self._warn,
            writer=rank % self._replicas == 0,
        )
        return self._worker

    def reset(self) -> bool:
        """Find nothing any more that was stored until now. What is stored from here on is of use to this engine only.

        The engine asks for it when its weights have changed in place, which nothing else in a key would tell.
        """
        if self._side is not None:
            self._side.renew(os.urandom(FINGERPRINT_BYTES))
            self._warn(
                "the cache was reset: until the next start, only this engine finds what it stores; after a change of the "
                "weights, start it with another model_fingerprint"
            )
        return True

    def take_stats(self) -> dict[str, Any] | None:
        """Return what was counted since the last call."""
        return self._worker.take_stats() if self._worker is not None else self._stats.take()

    def close(self) -> None:
        """End it."""
        if self._side is not None:
            self._side.close()
        if self._worker is not None:
            self._worker.close()
            self._worker = None
