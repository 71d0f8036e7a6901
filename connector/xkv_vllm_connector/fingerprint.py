"""The fingerprint of everything that decides what a block's bytes mean and that vLLM's block hash leaves out. Pure.

Two engines share objects only where every part is equal. A part that cannot be found out counts as a value of its own, so
an engine that knows it and one that does not never meet.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

from xkv_vllm_connector.keys import FINGERPRINT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT: Final = 1
"""The layout of objects and keys; raised whenever either changes."""

PARTS: Final = (
    "attention",
    "block_size",
    "cache_dtypes",
    "chunk_tokens",
    "commit",
    "cp_interleave",
    "dcp_size",
    "device",
    "dtype",
    "groups",
    "hash_algorithm",
    "hash_block_size",
    "hf_config",
    "implementation",
    "kv_cache_layout",
    "load_format",
    "model_fingerprint",
    "multimodal",
    "pcp_size",
    "pp_size",
    "quantization",
    "rope_length",
    "runner",
    "speculative",
    "state",
    "tp_size",
    "vllm_version",
    "weights",
)
"""What goes in, each always."""

_UNKNOWN: Final = b"\x00"
_KNOWN: Final = b"\x01"


def fingerprint_of(parts: Mapping[str, object]) -> bytes:
    """Digest the parts.

    Args:
        parts: A value for each of `PARTS`: text, a number, a truth value, or lists and maps of these. None: unknown.

    Raises:
        KeyError: A part is missing.
    """
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"xkv-vllm-fp")
    digest.update(FORMAT.to_bytes(4, "big"))
    for name in PARTS:
        value = parts[name]
        raw = b"" if value is None else json.dumps(value, sort_keys=True, allow_nan=True).encode()
        label = name.encode()
        digest.update(len(label).to_bytes(4, "big") + label)
        digest.update((_UNKNOWN if value is None else _KNOWN) + len(raw).to_bytes(8, "big") + raw)
    return digest.digest()
