"""The cache groups of a model: what an object of each holds, and what a hit needs of it. Pure.

All groups share one chunk length, a multiple of every group's block, so that every chunk boundary is one of all groups. An
object is the part of one chunk that one rank holds of one group:

    full attention      all blocks of the chunk; a hit needs every chunk from its start
    sliding window      the last blocks that the window can reach; a hit needs the chunks that the window before it covers
    chunked attention   all blocks; a hit needs the chunks of the attention chunk that it ends in
    recurrent state     the one state block at the end; a hit needs that of its last chunk
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """How a group's cache depends on what came before."""

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the engine says of one cache group."""

    group_id: int
    kind: Kind
    block_tokens: int
    """Tokens of one block, over all ranks that share it."""
    block_bytes: int
    """Bytes of one block in one rank, all layers of the group."""
    reach_tokens: int = 0
    """WINDOW: how many tokens before the next one must be there. CHUNKED: the length of an attention chunk."""


class UnsupportedModelError(Exception):
    """The cache of this model cannot be kept: nothing is offered, nothing stored."""


@dataclass(frozen=True, slots=True)
class Group:
    """One group, in chunks."""

    group_id: int
    kind: Kind
    block_tokens: int
    blocks_per_chunk: int
    kept_blocks: int
    """Blocks of an object: the last so many of its chunk."""
    reach_chunks: int
    """WINDOW, STATE: chunks before a boundary that a hit needs. CHUNKED: chunks of an attention chunk. FULL: 0."""
    reach_blocks: int
    """WINDOW, STATE: blocks before a boundary that a hit needs."""
    object_bytes: int
    """Bytes of an object, at least one: a rank without a layer in the group keeps a byte, so that keys are alike."""

    def first_needed(self, boundary: int) -> int:
        """Say from which chunk on a hit that ends with `boundary` chunks needs this group."""
        match self.kind:
            case Kind.FULL:
                return 0
            case Kind.CHUNKED:
                return boundary - boundary % self.reach_chunks
            case Kind.WINDOW | Kind.STATE:
                return max(0, boundary - self.reach_chunks)


@dataclass(frozen=True, slots=True)
class Geometry:
    """All groups of a model, and the one chunk length that they share."""

    groups: tuple[Group, ...]
    chunk_tokens: int
    hash_tokens: int
    """Tokens of one block hash."""
    ranks: tuple[int, ...]
    """The ranks whose parts make an object whole."""

    hashes_per_chunk: int = field(init=False)
    """Block hashes of one chunk; its own is the last."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hashes_per_chunk", self.chunk_tokens // self.hash_tokens)

    @property
    def prefix_only(self) -> bool:
        """Whether a hit is simply the chunks from the first one on."""
        return all(group.kind is Kind.FULL for group in self.groups)

    @property
    def parts_per_chunk(self) -> int:
        """Keys of one chunk."""
        return len(self.groups) * len(self.ranks)


def plan_groups(
    facts: tuple[GroupFacts, ...], chunk_size: int, hash_tokens: int, ranks: tuple[int, ...]
) -> Geometry:
    """Settle the chunk length and what an object of each group is.

    Raises:
        UnsupportedModelError: There is no group, or their blocks do not fit together.
    """
    if not facts:
        raise UnsupportedModelError("no cache group can be kept")
    common = math.lcm(*(fact.block_tokens for fact in facts), hash_tokens)
    if any(fact.kind is Kind.STATE for fact in facts):
        # The engine keeps a state only at the last block boundary of a prompt: a longer chunk would miss it.
        chunk_tokens = common
    else:
        chunk_tokens = -(-chunk_size // common) * common
    return Geometry(tuple(_plan(fact, chunk_tokens) for fact in facts), chunk_tokens, hash_tokens, ranks)


def _plan(fact: GroupFacts, chunk_tokens: int) -> Group:
    per_chunk = chunk_tokens // fact.block_tokens
    match fact.kind:
        case Kind.FULL:
            kept, reach, blocks = per_chunk, 0, 0
        case Kind.STATE:
            kept, reach, blocks = 1, 1, 1
        case Kind.WINDOW:
            blocks = max(1, -(-fact.reach_tokens // fact.block_tokens))
            kept, reach = min(blocks, per_chunk), -(-blocks // per_chunk)
        case Kind.CHUNKED:
            if fact.reach_tokens % chunk_tokens:
                raise UnsupportedModelError(
                    f"chunked attention over {fact.reach_tokens} tokens is no multiple of chunk_size {chunk_tokens}"
                )
            kept, reach, blocks = per_chunk, fact.reach_tokens // chunk_tokens, 0
    return Group(
        fact.group_id,
        fact.kind,
        fact.block_tokens,
        per_chunk,
        kept,
        reach,
        blocks,
        max(1, fact.block_bytes * kept),
    )
