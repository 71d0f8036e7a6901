"""Several paths to one namespace: which are used, what a status says of a path, which commands may go again (Base 8.1, 8.20). Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from xkv_nvmeof.command import decode_ranges
from xkv_nvmeof.spec import IoOpcode, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from xkv_nvmeof.host_command import Exchange

_P = TypeVar("_P")
PATHS_MAX: Final = 8
"""Addresses of one card."""


class Access(IntEnum):
    """Asymmetric namespace access: what a controller lets a host do with a namespace (Base 8.1.3)."""

    OPTIMIZED = 0x1
    NON_OPTIMIZED = 0x2
    INACCESSIBLE = 0x3
    PERSISTENT_LOSS = 0x4
    CHANGE = 0xF


_USABLE: Final = (Access.OPTIMIZED, Access.NON_OPTIMIZED)
"""In the order in which they are wanted."""


def choose(paths: Mapping[_P, Access]) -> list[_P]:
    """Return the paths to be used: all optimized ones, without any the non-optimized ones, and never others."""
    for access in _USABLE:
        found = [path for path, one in paths.items() if one is access]
        if found:
            return found
    return []


_PATH_STATUSES: Final = frozenset(
    {
        Status.INTERNAL_PATH_ERROR,
        Status.ASYMMETRIC_ACCESS_LOST,
        Status.ASYMMETRIC_ACCESS_INACCESSIBLE,
        Status.ASYMMETRIC_ACCESS_TRANSITION,
        Status.CONTROLLER_PATHING_ERROR,
    }
)


def speaks_of_the_path(status: int) -> bool:
    """Tell whether a status says that the path is at fault: the command is over, and another path may do it."""
    return status in _PATH_STATUSES


class Blocks(NamedTuple):
    """Blocks from `first` up to, without, `end`."""

    first: int
    end: int


_HARMLESS: Final = frozenset({IoOpcode.READ, IoOpcode.FLUSH, IoOpcode.RESERVATION_REPORT})
_OPCODE: Final = 0
_FIRST_BLOCK: Final = slice(40, 48)
_COUNT: Final = slice(48, 50)


def changes(exchange: Exchange) -> list[Blocks] | None:
    """Return the blocks that a command changes, in a way that doing it twice does not matter; None: it must not be done twice."""
    sqe = exchange.sqe
    opcode = sqe[_OPCODE]
    if opcode in _HARMLESS:
        return []
    if opcode in (IoOpcode.WRITE, IoOpcode.WRITE_ZEROES):
        first = int.from_bytes(sqe[_FIRST_BLOCK], "little")
        return [Blocks(first, first + int.from_bytes(sqe[_COUNT], "little") + 1)]
    if opcode == IoOpcode.DATASET_MANAGEMENT:
        ranges = decode_ranges(b"".join(exchange.send))
        return [Blocks(one.first_block, one.first_block + one.block_count) for one in ranges]
    return None


class Echoes:
    """Blocks of commands that were lost on one path and done again on another.

    The first controller may still execute its copy until the association is settled: until then it writes what is there already,
    as long as nobody writes anything else there. So nobody may.
    """

    def __init__(self) -> None:
        self._echoes: list[tuple[Blocks, int]] = []

    def add(self, blocks: Iterable[Blocks], settles_at_ns: int) -> None:
        """Note blocks whose first command can be executed until `settles_at_ns`."""
        self._echoes += [(one, settles_at_ns) for one in blocks]

    def any(self, now_ns: int) -> bool:
        """Tell whether there are some; those that have settled are forgotten."""
        if self._echoes:
            self._echoes = [echo for echo in self._echoes if echo[1] > now_ns]
        return bool(self._echoes)

    def settled_at_ns(self, blocks: Iterable[Blocks]) -> int:
        """Return from when on all of `blocks` may be changed; 0: now."""
        return max(
            (
                settles_at_ns
                for one in blocks
                for other, settles_at_ns in self._echoes
                if one.first < other.end and other.first < one.end
            ),
            default=0,
        )
