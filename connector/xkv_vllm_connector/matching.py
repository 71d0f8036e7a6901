"""How much of a prompt the card holds. Pure.

A hit ends at a chunk boundary where every group of every rank has its part. The last token of a prompt is always computed,
so a hit never covers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_vllm_connector.groups import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_vllm_connector.groups import Geometry


def chunks_wanted(
    geometry: Geometry, total_tokens: int, computed_tokens: int, hashes: int
) -> tuple[int, int]:
    """Say which chunks are worth asking for.

    Args:
        geometry: The groups.
        total_tokens: Tokens of the request.
        computed_tokens: Tokens that the engine has itself.
        hashes: Block hashes that the request has.

    Returns:
        The first chunk and the one after the last; equal if there is none.
    """
    first = computed_tokens // geometry.chunk_tokens
    end = min(max(total_tokens - 1, 0) // geometry.chunk_tokens, hashes // geometry.hashes_per_chunk)
    return (first, end) if end * geometry.chunk_tokens > computed_tokens else (first, first)


def prefix_hit(geometry: Geometry, hits: int) -> int:
    """Turn a count of leading keys (chunk by chunk, all parts of each) into one of whole chunks."""
    return hits // geometry.parts_per_chunk


def longest_hit(geometry: Geometry, held: Sequence[bool], first: int, end: int) -> int:
    """Find the longest hit.

    Args:
        geometry: The groups.
        held: For each chunk from `first` to `end`, for each group, for each rank: whether its part is there.
        first: The first chunk that was asked for; what lies before is in the engine.
        end: The chunk after the last.

    Returns:
        The number of chunks from the start of the sequence that the hit ends with; `first` if there is none.
    """
    ranks, parts = len(geometry.ranks), geometry.parts_per_chunk
    whole = [
        [all(held[at + number * ranks : at + (number + 1) * ranks]) for number in range(len(geometry.groups))]
        for at in range(0, (end - first) * parts, parts)
    ]
    boundary = end
    for number, group in enumerate(geometry.groups):
        if group.kind is Kind.FULL:
            missing = (first + at for at, row in enumerate(whole) if not row[number])
            boundary = min(boundary, next(missing, end))
    for candidate in range(boundary, first, -1):
        if all(
            whole[chunk - first][number]
            for number, group in enumerate(geometry.groups)
            if group.kind is not Kind.FULL
            for chunk in range(max(group.first_needed(candidate), first), candidate)
        ):
            return candidate
    return first
