"""The keys under which chunks are stored. Pure.

A key is a fixed-width head and the full block hash of the chunk's last token, as vLLM made it, salt and all:

    offset  size  field
    0       16    fingerprint: everything that the hash leaves out (`fingerprint`)
    16      2     group: the number of the cache group, big-endian
    18      2     rank: the worker that holds the part; of workers with the same bytes, the first
    20      4     chunk: the number of the chunk in its sequence, from 0
    24      ..    the block hash

Head and hash cannot shift into each other, since the head has one width.
"""

from __future__ import annotations

import struct
from typing import Final

FINGERPRINT_BYTES: Final = 16
HEAD: Final = struct.Struct(f">{FINGERPRINT_BYTES}sHHI")
_STEM: Final = struct.Struct(f">{FINGERPRINT_BYTES}sHH")


def stem_of(fingerprint: bytes, group: int, rank: int) -> bytes:
    """Make what all keys of one group and rank begin with."""
    assert len(fingerprint) == FINGERPRINT_BYTES
    return _STEM.pack(fingerprint, group, rank)


def key_of(stem: bytes, chunk: int, block_hash: bytes) -> bytes:
    """Make the key of a chunk."""
    return stem + chunk.to_bytes(4, "big") + block_hash
