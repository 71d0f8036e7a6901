"""Payload checksums: XXH3-64 over exactly the payload's bytes (R6)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

INLINE_BYTES_MAX = 4 << 20
"""Batches up to this are hashed on the loop (well under a millisecond); larger ones in a thread, which holds no GIL."""


def checksum_of(payload: memoryview | bytes) -> int:
    """Return the XXH3-64 of the payload, unsigned."""
    return xxhash.xxh3_64_intdigest(payload)


def _checksums_of(payloads: Sequence[memoryview]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(payload) for payload in payloads]


async def checksums(payloads: Sequence[memoryview]) -> list[int]:
    """Return the checksum of each payload without holding up the loop."""
    if sum(map(len, payloads)) <= INLINE_BYTES_MAX:
        return _checksums_of(payloads)
    return await asyncio.to_thread(_checksums_of, payloads)
