"""What the connector has to know of vLLM's configuration. The one module, beside `fusionx_connector`, that reads it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from xkv_vllm_connector.groups import GroupFacts, Kind, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_UNKNOWN: Final = object()

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
        "attention_backend": _text(
            getattr(getattr(vllm_config, "attention_config", None), "backend", _UNKNOWN)
        ),
        "block_size": _number(cache, "block_size"),
        "cache_dtype": _text(getattr(cache, "cache_dtype", _UNKNOWN)),
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
        "model": _text(getattr(model, "model", _UNKNOWN)),
        "pcp_size": _number(parallel, "prefill_context_parallel_size"),
        "pp_size": _number(parallel, "pipeline_parallel_size"),
        "quantization": _text(getattr(model, "quantization", _UNKNOWN)),
        "revision": _text(getattr(model, "revision", _UNKNOWN)),
        "runner": _text(getattr(vllm_config, "use_v2_model_runner", _UNKNOWN)),
        "speculative": _speculative(getattr(vllm_config, "speculative_config", None)),
        "tp_size": _number(parallel, "tensor_parallel_size"),
    }


def _text(value: object) -> str | None:
    return None if value is _UNKNOWN else str(value)


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
    raw = json.dumps(described, sort_keys=True, default=str).encode()
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
