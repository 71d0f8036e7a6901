"""The class that vLLM loads; it translates, and what is decided is decided elsewhere.

--kv-transfer-config '{"kv_connector": "FusIOnXConnector", "kv_role": "kv_both",
                       "kv_connector_module_path": "xkv_vllm_connector.fusionx_connector", ...}'
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from xkv_vllm_connector.assembly import Assembly, Engine
from xkv_vllm_connector.metadata import StepPlan, WorkerReport
from xkv_vllm_connector.prom import FusIOnXPromMetrics, FusIOnXStats
from xkv_vllm_connector.settings import parse_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from xkv_vllm_connector.scheduler import SchedulerSide
    from xkv_vllm_connector.worker import WorkerSide

# A child of vLLM's own logger, so that its lines are shown and look like the engine's.
logger = logging.getLogger("vllm.xkv_vllm_connector")


class PlanMetadata(KVConnectorMetadata):  # type: ignore[misc] # the engine's classes have no types here
    """A step's plan, as vLLM carries it to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc] # as above
    """The workers' reports, as vLLM adds them up and carries them back."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's report."""
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.add(other.report))


class _SchedulerMethods:
    """What vLLM's scheduler calls."""

    _assembly: Assembly
    _scheduler: SchedulerSide | None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool whose blocks are held while they are stored."""
        if self._scheduler is not None:
            self._assembly.stores.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        if self._scheduler is not None:
            self._scheduler.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens the card has beyond those computed."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine has made room."""
        if self._scheduler is not None:
            tables = blocks.get_block_ids() if num_external_tokens else ()
            self._scheduler.allocated(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan the step."""
        if self._scheduler is None:
            return PlanMetadata(StepPlan())
        output: Any = scheduler_output
        return PlanMetadata(
            self._scheduler.plan(output.num_scheduled_tokens, output.kv_connector_block_state)
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers told."""
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(meta, ReportMetadata):
            self._scheduler.report(meta.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended (models with one cache group, older engines)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Its blocks need not wait: those being stored are held."""
        if self._scheduler is not None:
            aborted = request.status.name == "FINISHED_ABORTED"
            self._scheduler.finished(request, block_ids, aborted=aborted)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping."""
        return self._scheduler is not None and self._scheduler.pending

    def reset_cache(self) -> bool | None:
        """Find nothing any more that was stored until now."""
        return self._assembly.reset() if self._scheduler is not None else None


class _WorkerMethods:
    """What vLLM's workers call."""

    _assembly: Assembly
    _worker: WorkerSide | None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the cache's tensors; from here on the worker's threads run."""
        self._worker = self._assembly.worker_side(kv_caches)

    @property
    def _plan(self) -> StepPlan:
        meta = self._get_connector_metadata()  # type: ignore[attr-defined] # the engine's base class has it
        assert isinstance(meta, PlanMetadata)
        return meta.plan

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin the loads of the step."""
        if self._worker is not None:
            self._worker.start_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: an object holds all layers, and a load within the step is done before the model runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: objects are gathered when the step is done, from blocks that are held."""

    def wait_for_save(self) -> None:
        """Begin the stores of the step; nobody waits for them."""
        if self._worker is not None:
            self._worker.start_stores(self._plan)
            self._worker.pause(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Tell which requests have been loaded, and which not."""
        received, failed = self._worker.take_received() if self._worker is not None else (set(), set())
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell which blocks a load within the step did not fill."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tell the scheduler's side what has ended."""
        report = self._worker.take_report() if self._worker is not None else None
        return None if report is None else ReportMetadata(report)


class FusIOnXConnector(_SchedulerMethods, _WorkerMethods, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # as above
    """Keeps vLLM's KV cache on the card, through the gateway."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config: Any = vllm_config
        transfer = config.kv_transfer_config
        hash_tokens = kv_cache_config.hash_block_size
        if hash_tokens is None:
            hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
        self._assembly = Assembly(
            parse_settings(transfer.kv_connector_extra_config),
            Engine(
                config,
                kv_cache_config,
                hash_tokens,
                ".".join(str(vllm_version).split(".")[:2]),
                get_kv_cache_spec_kind,
                "PYTHONHASHSEED" in os.environ,
            ),
            logger,
            time.monotonic_ns,
        )
        self._scheduler = self._assembly.scheduler_side() if role is KVConnectorRole.SCHEDULER else None
        self._worker = None

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is computed again."""
        return False

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Hand over what was counted."""
        data = self._assembly.take_stats()
        return None if data is None else FusIOnXStats(data=data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Make counts of plain data."""
        return FusIOnXStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FusIOnXPromMetrics:
        """Make what is shown on `/metrics`."""
        return FusIOnXPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Finish the stores that were handed over, within bounds, and end."""
        self._assembly.close()
