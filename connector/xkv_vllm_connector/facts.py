"""What the connector has to know of vLLM's configuration. The one module, beside `fusionx_connector`, that reads it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from xkv_vllm_connector.groups import GroupFacts, Kind, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_UNKNOWN: Final = object()
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_FIXED_ROPES: Final = frozenset(
    {
        "default",
        "linear",
        "llama3",
        "mllama4",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
        "mrope",
        "proportional",
    }
)
"""Kinds of rotary embeddings that are the same whatever the longest context is that the engine was started with."""

_FIELDS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "attention": ("attention_config", ("backend", "backend_per_kind", "indexer_kv_dtype")),
    "cp_interleave": ("parallel_config", ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")),
    "cache_dtypes": ("cache_config", ("cache_dtype", "kv_cache_dtype_skip_layers")),
    "implementation": (
        "model_config",
        ("model_impl", "model_class_overrides", "config_format", "code_revision"),
    ),
    "load_format": ("load_config", ("load_format",)),
    "multimodal": (
        "model_config.multimodal_config",
        ("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method", "mm_device_do_normalize"),
    ),
    "quantization": ("model_config", ("quantization", "quantization_config")),
    "state": ("cache_config", ("use_replayssm", "replayssm_buffer_len", "use_kda_recoverssm")),
    "weights": ("model_config", ("model", "model_weights", "revision")),
}
"""Parts of the fingerprint that are settings of vLLM, as they are."""

_KINDS: Final[Mapping[str, Kind]] = {
    "full_attention": Kind.FULL,
    "mla_attention": Kind.FULL,
    "sliding_window": Kind.WINDOW,
    "sliding_window_mla": Kind.WINDOW,
    "chunked_local_attention": Kind.CHUNKED,
    "mamba": Kind.STATE,
}
"""vLLM's names of the kinds that can be kept."""


def group_facts(kv_cache_config: Any, dcp_size: int, kind_of: Callable[[Any], Any]) -> tuple[GroupFacts, ...]:
    """Read the cache groups whose blocks are addressed by hash.

    Args:
        kv_cache_config: vLLM's `KVCacheConfig`.
        dcp_size: Ranks that share a block's tokens.
        kind_of: vLLM's `get_kv_cache_spec_kind`.

    Raises:
        UnsupportedModelError: One of the groups is of a kind that cannot be kept.
    """
    found = []
    for group_id in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[group_id]
        spec = group.kv_cache_spec
        if getattr(group, "host_resident", False):
            raise UnsupportedModelError(f"cache group {group_id} lies in the host's memory")
        name = str(getattr(kind_of(spec), "value", "unknown"))
        kind = _KINDS.get(name)
        if kind is None or hasattr(spec, "rswa_window"):
            raise UnsupportedModelError(f"cache group {group_id} is of kind {name}")
        first = _first_layer(spec)
        sharded = bool(getattr(spec, "dcp_sharded", False))
        found.append(
            GroupFacts(
                group_id,
                kind,
                int(spec.block_size) * (dcp_size if sharded else 1),
                _block_bytes(spec, len(group.layer_names)),
                _reach(kind, first),
            )
        )
    return tuple(found)


def _first_layer(spec: Any) -> Any:
    layers = getattr(spec, "kv_cache_specs", None)
    return next(iter(layers.values())) if layers else spec


def _block_bytes(spec: Any, layers: int) -> int:
    """Bytes of a block, all layers; an estimate on the scheduler's side, where a group shows one layer for all."""
    each = getattr(spec, "kv_cache_specs", None)
    if each:
        return sum(_page_bytes(layer) for layer in each.values())
    return _page_bytes(spec) * layers


def _page_bytes(spec: Any) -> int:
    return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))


def _reach(kind: Kind, spec: Any) -> int:
    match kind:
        case Kind.WINDOW:
            # The next token sees the window that ends with itself; some models keep a few more behind it.
            return max(1, int(spec.sliding_window) - 1 + int(getattr(spec, "extra_retained_tokens", 0)))
        case Kind.CHUNKED:
            return int(spec.attention_chunk_size)
        case Kind.FULL | Kind.STATE:
            return 0


def ranks_of(world_size: int, replicas: int) -> tuple[int, ...]:
    """Name the ranks that hold bytes of their own: the first of each run of `replicas` consecutive ones."""
    return tuple(range(0, world_size, replicas))


def fingerprint_parts(
    vllm_config: Any, kv_cache_config: Any, chunk_tokens: int, hash_tokens: int
) -> dict[str, Any]:
    """Collect what `fingerprint.PARTS` names, but for `model_fingerprint` and `vllm_version`."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    hf_config = getattr(model, "hf_config", None)
    return {
        **{name: _settings(vllm_config, *where) for name, where in _FIELDS.items()},
        "block_size": _number(cache, "block_size"),
        "chunk_tokens": chunk_tokens,
        "commit": _text(getattr(hf_config, "_commit_hash", None) or _UNKNOWN),
        "dcp_size": _number(parallel, "decode_context_parallel_size"),
        "device": _text(getattr(getattr(vllm_config, "device_config", None), "device_type", _UNKNOWN)),
        "dtype": _text(getattr(model, "dtype", _UNKNOWN)),
        "groups": [_group_part(group) for group in kv_cache_config.kv_cache_groups],
        "hash_algorithm": _text(getattr(cache, "prefix_caching_hash_algo", _UNKNOWN)),
        "hash_block_size": hash_tokens,
        "hf_config": _digest_of(hf_config),
        "kv_cache_layout": _text(
            getattr(kv_cache_config, "kv_cache_layout", None)
            or getattr(cache, "kv_cache_layout", None)
            or _UNKNOWN
        ),
        "pcp_size": _number(parallel, "prefill_context_parallel_size"),
        "pp_size": _number(parallel, "pipeline_parallel_size"),
        "rope_length": _rope_length(model, hf_config),
        "runner": _text(getattr(vllm_config, "use_v2_model_runner", _UNKNOWN)),
        "speculative": _speculative(getattr(vllm_config, "speculative_config", None)),
        "tp_size": _number(parallel, "tensor_parallel_size"),
    }


def _settings(vllm_config: Any, section: str, names: tuple[str, ...]) -> list[str | None]:
    owner = vllm_config
    for name in section.split("."):
        owner = getattr(owner, name, None)
    return [_text(getattr(owner, name, _UNKNOWN)) for name in names]


def _text(value: object) -> str | None:
    # Where an object lies in memory says nothing about it, and differs in every run.
    return None if value is _UNKNOWN else _ADDRESS.sub("", str(value))


def _rope_length(model: Any, hf_config: Any) -> int | None:
    """Return the longest context where positions are encoded by it, 0 where they are not, None where nobody knows."""
    to_dict = getattr(hf_config, "to_dict", None)
    if to_dict is None:
        return None
    fixed = all(kind in _FIXED_ROPES for kind in _rope_kinds(to_dict()))
    return 0 if fixed else _number(model, "max_model_len")


def _rope_kinds(described: object) -> Iterator[str]:
    """Find the kinds of rotary embeddings in a model's configuration, wherever they are."""
    if isinstance(described, Mapping):
        for name, value in described.items():
            if name in {"rope_scaling", "rope_parameters"} and isinstance(value, Mapping):
                yield from (str(value[key]) for key in ("rope_type", "type") if value.get(key) is not None)
            yield from _rope_kinds(value)
    elif isinstance(described, list | tuple):
        for value in described:
            yield from _rope_kinds(value)


def _number(owner: object, name: str) -> int | None:
    value = getattr(owner, name, None)
    return value if type(value) is int else None


def _group_part(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    return [
        type(spec).__name__,
        len(group.layer_names),
        _number(spec, "block_size"),
        _number(spec, "page_size_bytes"),
        _block_bytes(spec, len(group.layer_names)),
        [
            _text(getattr(spec, name, _UNKNOWN))
            for name in (
                "num_kv_heads",
                "head_size",
                "head_size_v",
                "dtype",
                "dtypes",
                "shapes",
                "kv_quant_mode",
                "sliding_window",
                "attention_chunk_size",
                "mamba_type",
                "mamba_cache_mode",
                "tokens_per_state",
                "model_version",
                "cache_dtype_str",
            )
        ],
        bool(getattr(group, "is_eagle_group", False)),
    ]


def _digest_of(hf_config: Any) -> str | None:
    """Digest the whole model configuration: rope scaling, layer types and all that changes what a cache means."""
    to_dict = getattr(hf_config, "to_dict", None)
    if to_dict is None:
        return None
    described = to_dict()
    # Says which release of a library wrote the file, and nothing about the model.
    described.pop("transformers_version", None)
    described.pop("_name_or_path", None)
    raw = json.dumps(described, sort_keys=True, default=_text).encode()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def _speculative(config: Any) -> list[Any] | None:
    if config is None:
        return []
    draft = getattr(config, "draft_model_config", None)
    return [
        _text(getattr(config, "method", _UNKNOWN)),
        _text(getattr(config, "model", _UNKNOWN)),
        _text(getattr(config, "revision", _UNKNOWN)),
        _digest_of(getattr(draft, "hf_config", None)),
    ]
