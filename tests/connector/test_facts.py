"""What is read of the engine's configuration: everything that changes what a cache means changes the fingerprint."""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

import pytest

from xkv_vllm_connector.assembly import Assembly, Engine
from xkv_vllm_connector.facts import fingerprint_parts, group_facts, ranks_of
from xkv_vllm_connector.fingerprint import PARTS
from xkv_vllm_connector.groups import Kind, UnsupportedModelError
from xkv_vllm_connector.metrics import COUNTERS, TIMINGS
from xkv_vllm_connector.settings import Settings, SettingsError, parse_settings

PAGE = (Path(__file__).parents[2] / "docs" / "connector.md").read_text()


def attention(**changes: Any) -> Space:
    base = {
        "kind": "full_attention",
        "block_size": 16,
        "page_size_bytes": 4096,
        "real_page_size_bytes": 4000,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": "bfloat16",
        "dcp_sharded": True,
    }
    return Space(**base | changes)


def group(spec: Space, layers: int = 2, **more: Any) -> Space:
    names = [f"l{number}" for number in range(layers)]
    return Space(**{"layer_names": names, "kv_cache_spec": spec, "is_eagle_group": False} | more)


def cache_config(*groups: Space, **changes: Any) -> Space:
    return Space(
        **{
            "kv_cache_groups": list(groups) or [group(attention())],
            "prefix_cacheable_group_ids": tuple(range(len(groups) or 1)),
            "kv_cache_layout": "LBNHC",
            "kv_tp_replicas": 1,
            "num_blocks": 10,
        }
        | changes
    )


class HfConfig:
    _commit_hash: str | None = "abc"

    def __init__(self, **values: Any) -> None:
        self.values = {"rope_scaling": None, "transformers_version": "5"} | values

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def vllm_config(**changes: Any) -> Space:
    """Change anything by `section__name=value`."""
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "m", "revision": None, "dtype": "bfloat16", "quantization": None, "hf_config": HfConfig(),
            "quantization_config": None, "model_weights": "", "max_model_len": 4096, "model_impl": "auto",
            "model_class_overrides": {}, "config_format": "auto", "code_revision": None,
            "multimodal_config": Space(mm_processor_kwargs=None, video_pruning_rate=None),
        },
        "cache_config": {
            "block_size": 16, "cache_dtype": "auto", "prefix_caching_hash_algo": "sha256_cbor",
            "enable_prefix_caching": True, "kv_cache_layout": None, "kv_cache_dtype_skip_layers": [],
            "use_replayssm": False, "replayssm_buffer_len": 16,
        },
        "parallel_config": {
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1, "world_size": 1, "rank": 0,
            "cp_kv_cache_interleave_size": 1, "dcp_kv_cache_interleave_size": 1,
        },
        "kv_transfer_config": {
            "kv_load_failure_policy": "fail", "is_kv_producer": True, "is_kv_consumer": True
        },
        "device_config": {"device_type": "cuda"},
        "attention_config": {"backend": None, "backend_per_kind": {}, "indexer_kv_dtype": "auto"},
        "load_config": {"load_format": "auto"},
    }  # fmt: skip
    top: dict[str, Any] = {"use_v2_model_runner": False, "speculative_config": None}
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            sections[section][field] = value
        else:
            top[name] = value
    return Space(**{name: Space(**values) for name, values in sections.items()}, **top)


def parts(config: Space, cache: Space | None = None) -> dict[str, Any]:
    return fingerprint_parts(config, cache or cache_config(), 128, 16)


def test_all_parts_are_collected() -> None:
    assert {*parts(vllm_config()), "model_fingerprint", "vllm_version"} == set(PARTS)


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__model": "other"},
        {"model_config__revision": "main"},
        {"model_config__dtype": "float16"},
        {"model_config__quantization": "fp8"},
        {"model_config__hf_config": HfConfig(rope_scaling={"factor": 2})},
        {"model_config__hf_config": None},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__block_size": 32},
        {"cache_config__prefix_caching_hash_algo": "sha256"},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__pipeline_parallel_size": 2},
        {"parallel_config__decode_context_parallel_size": 2},
        {"device_config__device_type": "cpu"},
        {"attention_config__backend": "FLASHINFER"},
        {"attention_config__backend_per_kind": {"mla": "FLASHMLA"}},
        {"attention_config__indexer_kv_dtype": "fp8"},
        {"use_v2_model_runner": True},
        # Each rank has other tokens of a block.
        {"parallel_config__cp_kv_cache_interleave_size": 16},
        {"parallel_config__prefill_context_parallel_size": 2},
        # Other weights under the same name, or the same weights in another order.
        {"load_config__load_format": "dummy"},
        {"model_config__model_weights": "/elsewhere"},
        {"model_config__quantization_config": {"linear": "fp8"}},
        {"model_config__model_impl": "transformers"},
        {"model_config__config_format": "mistral"},
        {"model_config__code_revision": "abc"},
        {"model_config__multimodal_config": Space(mm_processor_kwargs=None, video_pruning_rate=0.5)},
        {
            "model_config__multimodal_config": Space(
                mm_processor_kwargs={"max_pixels": 9}, video_pruning_rate=None
            )
        },
        {"model_config__multimodal_config": None},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"cache_config__use_replayssm": True},
        {"speculative_config": Space(method="eagle", model="d", revision=None, draft_model_config=None)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_difference_between_two_engines_is_in_the_parts(change: dict[str, Any]) -> None:
    assert parts(vllm_config(**change)) != parts(vllm_config())


@pytest.mark.parametrize(
    "other",
    [
        cache_config(kv_cache_layout="LBHNC"),
        cache_config(kv_cache_layout=None),
        cache_config(group(attention(num_kv_heads=4))),
        cache_config(group(attention(page_size_bytes=8192))),
        cache_config(group(attention(kv_quant_mode="fp8"))),
        cache_config(group(attention(), layers=3)),
        cache_config(group(attention(), is_eagle_group=True)),
        cache_config(group(attention()), group(attention())),
    ],
)
def test_every_difference_between_two_caches_is_in_the_parts(other: Space) -> None:
    assert parts(vllm_config(), other) != parts(vllm_config())


@pytest.mark.parametrize(
    ("rope", "counts"),
    [
        (None, False),
        ({"rope_type": "default", "rope_theta": 1e6}, False),
        ({"rope_type": "yarn", "factor": 4.0}, False),
        ({"type": "linear", "factor": 2.0}, False),
        ({"rope_type": "longrope", "long_factor": [1.0]}, True),
        ({"type": "dynamic", "factor": 2.0}, True),
        ({"rope_type": "made up"}, True),
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_the_longest_context_counts_where_positions_depend_on_it(
    rope: dict[str, Any] | None, *, inner: bool, counts: bool
) -> None:
    """Some models are rotated otherwise once they are started for long contexts; for the others it would cost their cache."""
    values = {"text_config": {"rope_parameters": rope}} if inner else {"rope_scaling": rope}
    short, long = (
        parts(vllm_config(model_config__hf_config=HfConfig(**values), model_config__max_model_len=length))
        for length in (4096, 131_072)
    )
    assert (short != long) == counts


def test_where_an_object_lies_in_memory_is_no_part() -> None:
    one, other = (parts(vllm_config(model_config__quantization_config=object())) for _ in range(2))
    assert one == other
    one, other = (parts(vllm_config(model_config__hf_config=HfConfig(odd=object()))) for _ in range(2))
    assert one == other


def test_what_only_names_the_library_that_wrote_a_configuration_is_not() -> None:
    written = vllm_config(model_config__hf_config=HfConfig(transformers_version="6"))
    assert parts(written) == parts(vllm_config())


def kind_of(spec: Space) -> Space:
    return Space(value=spec.kind)


def test_groups_are_read_as_they_are() -> None:
    window = attention(kind="sliding_window", sliding_window=1024, extra_retained_tokens=2, dcp_sharded=False)
    chunked = attention(kind="chunked_local_attention", attention_chunk_size=8192, dcp_sharded=False)
    state = Space(kind="mamba", block_size=544, page_size_bytes=100, real_page_size_bytes=90)
    several = Space(
        kind="mla_attention",
        block_size=16,
        page_size_bytes=1,
        kv_cache_specs={"a": attention(), "b": attention()},
    )
    scratch = attention(kind="unknown")
    config = cache_config(
        group(attention()), group(scratch), group(window), group(chunked), group(state), group(several),
        prefix_cacheable_group_ids=(0, 2, 3, 4, 5),
    )  # fmt: skip
    found = group_facts(config, 2, kind_of)
    assert [(fact.group_id, fact.kind, fact.block_tokens) for fact in found] == [
        (0, Kind.FULL, 32),
        (2, Kind.WINDOW, 16),
        (3, Kind.CHUNKED, 16),
        (4, Kind.STATE, 544),
        (5, Kind.FULL, 16),
    ]
    assert [fact.reach_tokens for fact in found] == [0, 1025, 8192, 0, 0]
    assert [fact.block_bytes for fact in found] == [8000, 8000, 8000, 180, 8000]


@pytest.mark.parametrize(
    "wrong",
    [
        group(attention(kind="cross_attention")),
        group(attention(kind="sink_full_attention")),
        group(attention(kind="made up")),
        group(attention(rswa_window=5)),
        group(attention(), host_resident=True),
    ],
)
def test_a_group_of_another_kind_is_refused_and_never_left_out(wrong: Space) -> None:
    with pytest.raises(UnsupportedModelError, match="cache group 1"):
        group_facts(cache_config(group(attention()), wrong), 1, kind_of)


def test_of_ranks_with_the_same_bytes_the_first_counts() -> None:
    assert ranks_of(4, 1) == (0, 1, 2, 3)
    assert ranks_of(8, 4) == (0, 4)


def assembly(
    config: Space,
    cache: Space | None = None,
    settings: Settings | None = None,
    *,
    hash_seeded: bool = False,
) -> Assembly:
    engine = Engine(config, cache or cache_config(), 16, "0.32", kind_of, hash_seeded=hash_seeded)
    return Assembly(settings or Settings(), engine, logging.getLogger("test"), lambda: 0)


def started(caplog: pytest.LogCaptureFixture, one: Assembly) -> tuple[bool, str]:
    with caplog.at_level(logging.INFO, "test"):
        side = one.scheduler_side()
    one.close()
    return side is not None, caplog.text


def test_one_line_says_what_is_on(caplog: pytest.LogCaptureFixture) -> None:
    extra = {"xkv_gateway_port": 5557, "chunk_size": 100, "require_cache_salt": True, "key_namespace": "prod"}
    config = vllm_config(kv_transfer_config__kv_load_failure_policy="recompute")
    on, said = started(caplog, assembly(config, settings=parse_settings(extra)))
    assert on
    assert len(said.splitlines()) == 1
    for words in ("127.0.0.1:5557", "112 tokens", "'prod'", "require_cache_salt True", "0:full"):
        assert words in said


@pytest.mark.parametrize(
    ("config", "cache", "why"),
    [
        (vllm_config(cache_config__enable_prefix_caching=False), None, "prefix caching is off"),
        (vllm_config(), cache_config(group(attention(kind="cross_attention"))), "cross_attention"),
        (vllm_config(), cache_config(prefix_cacheable_group_ids=()), "no cache group"),
    ],
)
def test_where_it_cannot_work_it_is_off_and_says_why_once(
    caplog: pytest.LogCaptureFixture, config: Space, cache: Space | None, why: str
) -> None:
    config.kv_transfer_config.kv_load_failure_policy = "recompute"
    on, said = started(caplog, assembly(config, cache))
    assert not on
    assert len(said.splitlines()) == 1
    assert why in said
    assert assembly(config, cache).worker_side({"l0": object()}) is None


def test_the_policy_that_would_fail_requests_is_replaced_and_said(caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config()
    _, said = started(caplog, assembly(config))
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert "kv_load_failure_policy" in said


@pytest.mark.parametrize(
    ("algorithm", "seeded", "warned"),
    [
        ("sha256", False, False),
        ("sha256_cbor", False, False),
        ("xxhash", False, True),
        ("xxhash_cbor", False, True),
        ("builtin", False, True),
        ("xxhash", True, False),
    ],
)
def test_hashes_that_differ_in_every_run_are_said_once_by_name(
    caplog: pytest.LogCaptureFixture, algorithm: str, *, seeded: bool, warned: bool
) -> None:
    config = vllm_config(
        cache_config__prefix_caching_hash_algo=algorithm,
        kv_transfer_config__kv_load_failure_policy="recompute",
    )
    _, said = started(caplog, assembly(config, hash_seeded=seeded))
    lines = [line for line in said.splitlines() if "PYTHONHASHSEED" in line]
    assert len(lines) == warned
    assert all(algorithm in line for line in lines)


def test_synchronous_loads_need_one_group_and_one_worker(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(load_mode="sync")
    _, said = started(caplog, assembly(vllm_config(), settings=settings))
    assert "loads sync" in said
    caplog.clear()
    _, said = started(caplog, assembly(vllm_config(parallel_config__world_size=2), settings=settings))
    assert "loads async" in said
    caplog.clear()
    two = cache_config(group(attention()), group(attention()))
    _, said = started(caplog, assembly(vllm_config(), two, settings))
    assert "loads async" in said


def test_an_object_that_is_too_large_names_the_setting() -> None:
    big = cache_config(group(attention(real_page_size_bytes=10 << 20)))
    with pytest.raises(SettingsError) as caught:
        assembly(vllm_config(), big)
    assert caught.value.field == "chunk_size"


def test_shared_memory_that_the_machine_has_not_names_the_setting() -> None:
    with pytest.raises(SettingsError) as caught:
        assembly(vllm_config(), settings=parse_settings({"staging_bytes": 1 << 40}))
    assert caught.value.field == "staging_bytes"


def test_keys_that_cannot_be_read_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        assembly(vllm_config(), settings=Settings(xkv_keys=str(tmp_path / "none"))).scheduler_side()
    assert caught.value.field == "xkv_keys"


def test_the_page_lists_every_setting_with_its_default_and_every_count() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\|", PAGE, re.MULTILINE))
    defaults = {field.name: getattr(Settings(), field.name) for field in fields(Settings)}
    shown = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in defaults.items()
    }
    assert rows == shown
    assert not [name for name in (*COUNTERS, *TIMINGS) if f"`{name}`" not in PAGE]
