"""What the scheduler's side uses of the engine, and no more: vLLM's own objects, or the fakes of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class HostRequest(Protocol):
    """A request, as the engine's scheduler has it."""

    request_id: str
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int
    num_prompt_tokens: int
    block_hashes: Sequence[bytes]

    @property
    def num_tokens(self) -> int:
        """Tokens that are certain: the prompt and what was generated, without guesses."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether no cache may be read for it."""


class HostBlock(Protocol):
    """A block of the engine's cache."""

    block_id: int


class HostPool(Protocol):
    """The engine's blocks."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None:
        """Hold blocks: they keep their content until they are freed as often as they were touched."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Let go of blocks."""


class HostTables(Protocol):
    """The block tables of the requests of one step."""

    boundary_state_offloads: Mapping[str, Sequence[tuple[int, int, int]]]
    """Recurrent states that this step leaves behind: for each request (group, block, tokens up to the boundary)."""

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """Return a request's blocks, group by group; 0 where there is none any more."""
