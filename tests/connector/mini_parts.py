"""The parts of the mini engine: blocks, requests, caches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from xkv_vllm_connector.planning import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_BYTES: Final = 48


class Status(Enum):
    WAITING = "waiting"
    REMOTE = "remote"
    RUNNING = "running"
    DONE = "done"


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0


class Pool:
    """Blocks with reference counts; block 0 is the null block."""

    def __init__(self, count: int) -> None:
        self.blocks = [Block(number) for number in range(count)]
        self.free = list(range(1, count))

    def new(self) -> int:
        block = self.blocks[self.free.pop(0)]
        assert block.ref_cnt == 0
        block.ref_cnt = 1
        return block.block_id

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "only blocks that somebody has are held"
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.free.append(block.block_id)


@dataclass
class MiniRequest:
    request_id: str
    prompt: bytes
    """A token is a byte."""
    new_tokens: int = 1
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    hash_tokens: int = 4
    local_tokens: int = 0
    """What the engine is told to have in its own cache (it computes that first)."""
    num_computed_tokens: int = 0
    output: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    status: Status = Status.WAITING
    tables: list[list[int]] = field(default_factory=list)
    asked: int = 0
    external: int = 0
    external_total: int = 0

    def __post_init__(self) -> None:
        self._hash()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def _hash(self) -> None:
        tokens = self.prompt + bytes(self.output)
        while (len(self.block_hashes) + 1) * self.hash_tokens <= len(tokens):
            at = len(self.block_hashes) * self.hash_tokens
            parent = self.block_hashes[-1] if self.block_hashes else (self.cache_salt or "").encode()
            self.block_hashes.append(
                hashlib.sha256(parent + b"|" + tokens[at : at + self.hash_tokens]).digest()
            )

    def append(self) -> None:
        digest = hashlib.sha256(self.prompt + bytes(self.output)).digest()
        self.output.append(digest[0])
        self._hash()


class Tables:
    """The engine's `kv_connector_block_state`."""

    def __init__(
        self, tables: dict[str, list[list[int]]], states: dict[str, list[tuple[int, int, int]]]
    ) -> None:
        self._tables = tables
        self.boundary_state_offloads = states

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        found = self._tables.get(req_id)
        return None if found is None else tuple(found)


class Cache:
    """The bytes of one rank: one array of blocks, which the groups share."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.memory = bytearray(count * BLOCK_BYTES)

    def view(self, block: int) -> memoryview:
        return memoryview(self.memory)[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]

    def content(self, group: int, block_hash: bytes) -> bytes:
        seed = hashlib.sha256(block_hash + bytes([group, self.rank])).digest()
        return (seed * 2)[:BLOCK_BYTES]


class MiniCopier:
    """Copies between a cache and objects."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def object_bytes(self, blocks: int) -> int:
        return BLOCK_BYTES * blocks

    def gather(self, blocks: Sequence[int], into: memoryview) -> None:
        for at, block in enumerate(blocks):
            into[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] = self._cache.view(block)

    def scatter(self, blocks: Sequence[int], source: memoryview) -> None:
        for at, block in enumerate(blocks):
            if block != NULL_BLOCK:
                self._cache.view(block)[:] = source[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]


class Direct:
    """Copies at once: this model's work is done when it returns."""

    def mark(self) -> None:
        return None

    def run(self, mark: Any, work: Any) -> None:
        work()
