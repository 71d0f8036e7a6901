"""Keys and payloads derived from the block ids of a trace, at the speed of memory.

A key is 32 bytes: BLAKE2b of the block id and the block's size, so that two replays with different sizes
never meet in the cache. The payload of a key is a fixed pseudo-random sequence of 64-bit words, each combined
(exclusive or) with one word taken from the key. So every word differs between two keys, every word of
one payload differs from its neighbours, and bytes that are torn, shifted, swapped or another key's never compare
equal. Both making and checking are one vector operation over the block.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

KEY_BYTES: Final = 32
WORD_BYTES: Final = 8
_PERSON: Final = b"xkv-replay-v1"
_SEED: Final = 0x9E3779B97F4A7C15


def derive_keys(hash_ids: Iterable[int], block_bytes: int) -> list[bytes]:
    """Derive the cache keys (32 bytes each) of the blocks `hash_ids`, each of `block_bytes` bytes."""
    pack = struct.Struct("<QQ").pack
    blake = hashlib.blake2b
    return [
        blake(pack(hash_id, block_bytes), digest_size=KEY_BYTES, person=_PERSON).digest()
        for hash_id in hash_ids
    ]


class PayloadPattern:
    """Makes and checks payloads of one size. Not thread-safe: it owns one scratch block."""

    def __init__(self, block_bytes: int) -> None:
        if block_bytes < 1:
            raise ValueError("block_bytes must be at least 1")
        self.block_bytes = block_bytes
        words = -(-block_bytes // WORD_BYTES)
        self._base = _splitmix64(words)
        self._scratch = np.empty(words, dtype=np.uint64)
        self._expected = self._scratch.view(np.uint8)[:block_bytes]

    def fill(self, key: bytes, out: memoryview) -> None:
        """Write the payload of `key` into `out` (exactly `block_bytes` writable bytes)."""
        target = np.frombuffer(out, dtype=np.uint8)
        whole = self.block_bytes // WORD_BYTES
        word = _word(key)
        if whole:
            np.bitwise_xor(self._base[:whole], word, out=target[: whole * WORD_BYTES].view(np.uint64))
        tail = self.block_bytes - whole * WORD_BYTES
        if tail:
            last = np.bitwise_xor(self._base[whole:], word)
            target[whole * WORD_BYTES :] = last.view(np.uint8)[:tail]

    def first_difference(self, key: bytes, data: memoryview) -> int | None:
        """Compare every byte of `data` with the payload of `key`: None, or the offset of the first difference.

        A wrong length differs where the shorter of the two ends.
        """
        np.bitwise_xor(self._base, _word(key), out=self._scratch)
        actual = np.frombuffer(data, dtype=np.uint8)
        if actual.size == self.block_bytes and _equal(actual, self._expected):
            return None
        common = min(actual.size, self.block_bytes)
        differing = np.flatnonzero(actual[:common] != self._expected[:common])
        return int(differing[0]) if differing.size else common


def _word(key: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(key[:WORD_BYTES], "little"))


def _equal(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> bool:
    whole = left.size - left.size % WORD_BYTES
    # Words compare eight times faster than bytes. The few bytes behind the last whole word come after.
    return bool(
        np.array_equal(left[:whole].view(np.uint64), right[:whole].view(np.uint64))
        and np.array_equal(left[whole:], right[whole:])
    )


def _splitmix64(count: int) -> NDArray[np.uint64]:
    """The first `count` outputs of splitmix64 (Steele, Lea, Flood 2014): a counter, hashed."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_SEED)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
