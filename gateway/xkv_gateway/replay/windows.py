"""The buffers of a replay: windows of equal slots, handed out one message at a time.

A window holds the payloads of one message. There are only so many, so the memory of a replay is bounded whatever
the trace asks for, and so is what is in flight: a message waits for a free window.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SLOT_ALIGNMENT_BYTES: Final = 4096
"""Slots start at multiples of this, so that a gateway can transfer them without a bounce buffer."""

WINDOW_BYTES: Final = 2 * 1024 * 1024
"""Aim for messages of this size: large enough to amortise a message, small enough to have several in flight."""

WINDOWS_PER_REQUEST: Final = 8
WINDOWS_MAX: Final = 32
BUFFER_BYTES_MAX: Final = 256 * 1024 * 1024
"""All windows together, unless two single blocks need more."""

_POISON: Final = b"\xa5"


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """How the buffer is cut. `buffer_bytes` = windows x slots x slot stride."""

    block_bytes: int
    stride_bytes: int
    slots: int
    windows: int

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer behind all windows."""
        return self.windows * self.slots * self.stride_bytes


def plan_windows(block_bytes: int, *, keys_max: int, message_bytes_max: int, concurrency: int) -> WindowPlan:
    """Cut windows so that one window fits into one message.

    Args:
        block_bytes: Size of a block; at most `message_bytes_max`.
        keys_max: Keys a message may have.
        message_bytes_max: Payload bytes a message may have.
        concurrency: Requests played at the same time.
    """
    assert 0 < block_bytes <= message_bytes_max
    stride_bytes = -(-block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
    slots = max(1, min(WINDOW_BYTES // stride_bytes, message_bytes_max // block_bytes, keys_max))
    affordable = BUFFER_BYTES_MAX // (slots * stride_bytes)
    windows = max(2, min(WINDOWS_PER_REQUEST * concurrency, WINDOWS_MAX, affordable))
    return WindowPlan(block_bytes, stride_bytes, slots, windows)


class Window:
    """The slots of one message. `offsets[i]` is where slot i starts in the buffer."""

    def __init__(self, plan: WindowPlan, number: int, buffer: memoryview) -> None:
        base = number * plan.slots * plan.stride_bytes
        self.offsets = [base + slot * plan.stride_bytes for slot in range(plan.slots)]
        self.slots = [buffer[offset : offset + plan.block_bytes] for offset in self.offsets]
        self._poison = _POISON * plan.block_bytes

    def poison(self, count: int) -> None:
        """Overwrite the first `count` slots, so that what lies there from before cannot pass for loaded bytes."""
        for slot in self.slots[:count]:
            slot[:] = self._poison

    def close(self) -> None:
        """Let go of the buffer, but for what a call that was cut short still has: that goes with it."""
        for slot in self.slots:
            with suppress(BufferError):
                slot.release()


class WindowPool:
    """Hands out windows, first come first served."""

    def __init__(self, plan: WindowPlan, buffer: memoryview) -> None:
        assert len(buffer) >= plan.buffer_bytes
        self.plan = plan
        self._windows = [Window(plan, number, buffer) for number in range(plan.windows)]
        self._free: asyncio.Queue[Window] = asyncio.Queue()
        for window in self._windows:
            self._free.put_nowait(window)

    @asynccontextmanager
    async def window(self) -> AsyncIterator[Window]:
        """Wait for a free window and own it."""
        window = await self._free.get()
        try:
            yield window
        finally:
            self._free.put_nowait(window)

    def close(self) -> None:
        """Let go of the buffer. No window may be in use."""
        for window in self._windows:
            window.close()
