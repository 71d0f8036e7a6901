"""Keys and fingerprints, byte by byte: a change of either is a change of the format, and makes every stored object a miss."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_rpc.messages import scope_of
from xkv_vllm_connector.fingerprint import FORMAT, PARTS, fingerprint_of
from xkv_vllm_connector.keys import HEAD, key_of, stem_of

EXAMPLE: dict[str, Any] = {
    "attention": ["None", "{}", "auto"],
    "block_size": 16,
    "cache_dtypes": ["auto", "[]"],
    "chunk_tokens": 128,
    "commit": None,
    "cp_interleave": ["1", "1"],
    "dcp_size": 1,
    "device": "cuda",
    "dtype": "torch.bfloat16",
    "groups": [["FullAttentionSpec", 32, 16, 65536, 2097152, ["8", "128"], False]],
    "hash_algorithm": "sha256_cbor",
    "hash_block_size": 16,
    "hf_config": "00112233445566778899aabbccddeeff",
    "implementation": ["auto", "{}", "auto", "None"],
    "kv_cache_layout": "LBNHC",
    "load_format": ["auto"],
    "model_fingerprint": "",
    "multimodal": [None, None, None, None],
    "pcp_size": 1,
    "pp_size": 1,
    "quantization": ["None", "None"],
    "rope_length": 0,
    "runner": "False",
    "speculative": [],
    "state": ["False", "16", "False"],
    "tp_size": 2,
    "vllm_version": "0.32",
    "weights": ["meta-llama/Llama-3.1-8B", "", "None"],
}
GOLDEN_FINGERPRINT = "2c5d0269bd278fb117a9fa73871a95fa"
GOLDEN_KEY = (
    "2c5d0269bd278fb117a9fa73871a95fa00030001000000ff"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
)


def test_the_golden_fingerprint_and_key() -> None:
    assert FORMAT == 1
    fingerprint = fingerprint_of(EXAMPLE)
    assert fingerprint.hex() == GOLDEN_FINGERPRINT
    key = key_of(stem_of(fingerprint, 3, 1), 255, bytes(range(32)))
    assert key.hex() == GOLDEN_KEY
    assert len(key) == 24 + 32


def test_the_golden_scopes() -> None:
    """Without a salt the scope is empty: the same as in a deployment without isolation."""
    assert scope_of("") == b""
    salt = "-e-E44q1cFy6AnPDukBHaNvoPQh1m_w-Z9dC7NIn2E4"
    assert scope_of(salt).hex() == "32a2f15b58e32fc0fc691c82a6fbb54f"


@pytest.mark.parametrize("part", PARTS)
def test_every_part_counts_and_unknown_is_a_value_of_its_own(part: str) -> None:
    base = fingerprint_of(EXAMPLE)
    others = [None, "", "null", "None", 0, 1, [], ["x"], {"a": 1}, False]
    found = {fingerprint_of({**EXAMPLE, part: value}) for value in others}
    assert len(found) == len(others)
    same = [value for value in others if value == EXAMPLE[part] and type(value) is type(EXAMPLE[part])]
    assert (base in found) == bool(same)


def test_a_missing_part_is_a_bug_and_not_a_value() -> None:
    with pytest.raises(KeyError):
        fingerprint_of({name: value for name, value in EXAMPLE.items() if name != "weights"})


def test_values_do_not_shift_into_each_other() -> None:
    one = fingerprint_of({**EXAMPLE, "load_format": "ab", "model_fingerprint": "c"})
    other = fingerprint_of({**EXAMPLE, "load_format": "a", "model_fingerprint": "bc"})
    assert one != other


_fields = st.tuples(
    st.binary(min_size=16, max_size=16),
    st.integers(0, 65_535),
    st.integers(0, 65_535),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=8, max_size=64),
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(_fields, _fields)
def test_different_fields_make_different_keys(
    one: tuple[bytes, int, int, int, bytes], other: tuple[bytes, int, int, int, bytes]
) -> None:
    def key(fields: tuple[bytes, int, int, int, bytes]) -> bytes:
        fingerprint, group, rank, chunk, block_hash = fields
        return key_of(stem_of(fingerprint, group, rank), chunk, block_hash)

    assert (key(one) == key(other)) == (one == other)
    assert HEAD.unpack_from(key(one)) == one[:4]
