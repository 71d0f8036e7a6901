"""From block tables to what is copied: the blocks of an object, when it is stored and when it is loaded. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_vllm_connector.groups import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_vllm_connector.groups import Geometry, Group

NULL_BLOCK: Final = 0
"""The engine's number for "no block here"; in a load: do not write this one."""


def blocks_to_store(group: Group, table: Sequence[int], chunk: int) -> tuple[int, ...] | None:
    """Name the blocks of a chunk's object; None where the engine does not have them all (any more)."""
    end = (chunk + 1) * group.blocks_per_chunk
    if end > len(table):
        return None
    blocks = tuple(table[end - group.kept_blocks : end])
    return None if NULL_BLOCK in blocks else blocks


def chunks_to_load(geometry: Geometry, group: Group, computed_tokens: int, boundary: int) -> range:
    """Name the chunks whose objects a load that ends with `boundary` chunks needs of a group."""
    return range(max(computed_tokens // geometry.chunk_tokens, group.first_needed(boundary)), boundary)


def blocks_to_load(
    group: Group, table: Sequence[int], chunk: int, computed_tokens: int, boundary_tokens: int
) -> tuple[int, ...] | None:
    """Name the block for each part of a chunk's object; `NULL_BLOCK` for those that are not written.

    Args:
        group: The group.
        table: The request's blocks of this group.
        chunk: The chunk.
        computed_tokens: What the engine has itself; those blocks may belong to others, too, and are never written.
        boundary_tokens: Where the hit ends.

    Returns:
        None if the engine has made no room for a block that the hit needs.
    """
    end = (chunk + 1) * group.blocks_per_chunk
    first = max(computed_tokens // group.block_tokens, 0)
    if group.kind in {Kind.WINDOW, Kind.STATE}:
        first = max(first, boundary_tokens // group.block_tokens - group.reach_blocks)
    if end > len(table):
        return None
    blocks = tuple(table[at] if at >= first else NULL_BLOCK for at in range(end - group.kept_blocks, end))
    wanted = min(end - first, group.kept_blocks)
    return None if sum(block != NULL_BLOCK for block in blocks) < wanted else blocks
