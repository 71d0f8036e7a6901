"""Between the engine's cache and an object's bytes: which tensors, in which order. Uses torch, the engine's own.

An object is, layer by layer in the order of the group, tensor by tensor of the layer, its blocks one after the other, each
without the padding that the engine may put behind it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

import torch

from xkv_vllm_connector.planning import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_ONE_BYTE: Final = b"\0"


class GroupCopier:
    """Copies blocks of one cache group.

    Args:
        caches: The cache of each layer of the group, in order: a tensor, or several.
        block_count: Blocks of the engine; the first dimension of a tensor is this or a multiple of it.
    """

    def __init__(self, caches: Sequence[torch.Tensor | Sequence[torch.Tensor]], block_count: int) -> None:
        self._views = [
            _by_block(tensor, block_count)
            for cache in caches
            for tensor in (cache if isinstance(cache, list | tuple) else [cache])
        ]
        self.block_bytes = sum(_bytes_each(view) for view in self._views)

    def object_bytes(self, blocks: int) -> int:
        """Size of an object of so many blocks; a group without a layer here has objects of one byte."""
        return max(1, self.block_bytes * blocks)

    def gather(self, blocks: Sequence[int], into: memoryview) -> None:
        """Copy blocks into an object's bytes; ordered on the current stream."""
        if not self._views:
            into[:1] = _ONE_BYTE
            return
        target = torch.frombuffer(into, dtype=torch.uint8)
        at = 0
        for view in self._views:
            size = _bytes_each(view) * len(blocks)
            rows = target[at : at + size].view(view.dtype).view(len(blocks), *view.shape[1:])
            index = torch.tensor(blocks, dtype=torch.int64)
            if view.device.type == "cpu":
                torch.index_select(view, 0, index, out=rows)
            else:
                rows.copy_(view.index_select(0, index.to(view.device, non_blocking=True)), non_blocking=True)
            at += size

    def scatter(self, blocks: Sequence[int], source: memoryview) -> None:
        """Copy an object's bytes into blocks; those that are `NULL_BLOCK` are left out."""
        chosen = [at for at, block in enumerate(blocks) if block != NULL_BLOCK]
        if not self._views or not chosen:
            return
        origin = torch.frombuffer(source, dtype=torch.uint8)
        index = torch.tensor([blocks[at] for at in chosen], dtype=torch.int64)
        rows_chosen = None if len(chosen) == len(blocks) else torch.tensor(chosen, dtype=torch.int64)
        at = 0
        for view in self._views:
            size = _bytes_each(view) * len(blocks)
            rows = origin[at : at + size].view(view.dtype).view(len(blocks), *view.shape[1:])
            if rows_chosen is not None:
                rows = rows.index_select(0, rows_chosen)
            where = index.to(view.device, non_blocking=True)
            view.index_copy_(0, where, rows.to(view.device, non_blocking=True))
            at += size


def _by_block(tensor: torch.Tensor, block_count: int) -> torch.Tensor:
    """View a cache with the engine's blocks as its first dimension, in bytes where its layout allows."""
    if tensor.shape[0] != block_count:
        if tensor.shape[0] % block_count:
            raise ValueError(f"a cache of {tensor.shape[0]} rows does not hold {block_count} blocks")
        tensor = tensor.unflatten(0, (block_count, -1))
    if tensor.dtype is not torch.uint8 and tensor.stride(-1) == 1:
        tensor = tensor.view(torch.uint8)
    return tensor


def _bytes_each(view: torch.Tensor) -> int:
    size: int = view[0].numel() * view.element_size()
    return size


def device_of(kv_caches: Mapping[str, Any]) -> torch.device:
    """Return where the cache lies."""
    cache: Any = next(iter(kv_caches.values()))
    device: torch.device = (cache[0] if isinstance(cache, list | tuple) else cache).device
    return device


class Streams:
    """The order of copies and the model's own work. On a CPU, where all work is done when it returns, there is none."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda if device.type == "cuda" else None
        self._device = device
        self.side: Any = None if self._cuda is None else self._cuda.Stream(device)

    def mark(self) -> Any:
        """Note how far the model's work has been ordered; called by the engine's own thread."""
        if self._cuda is None:
            return None
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def run(self, mark: Any, work: Callable[[], None]) -> None:
        """Do work on the side stream, after `mark`, and wait until it is done; called by the connector's threads."""
        if self._cuda is None:
            work()
            return
        with self._cuda.stream(self.side):
            if mark is not None:
                self.side.wait_event(mark)
            work()
        self.side.synchronize()

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Let the accelerator copy to and from memory directly, if it can; returns what undoes it."""
        if self._cuda is None:
            return lambda: None
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        runtime = self._cuda.cudart()
        if int(runtime.cudaHostRegister(address, len(memory), 0)) != 0:
            return lambda: None
        return lambda: runtime.cudaHostUnregister(address)
