"""A worker's way to the gateway's bytes: shared memory where the gateway offers it, payloads in the messages elsewhere.

A channel belongs to one thread. A call whose outcome is unknown may still be carried out, so the memory that it was about is
never used again: the channel drops the whole region and attaches a new one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_rpc.client import Region
from xkv_rpc.errors import EndpointError, ErrorCode, RegionRefusedError, RpcError, XkvRpcError
from xkv_rpc.messages import LoadStatus, LookupMode, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_rpc.client import Client

ALIGNMENT: Final = 4096
"""Objects begin at multiples of this in the region."""
INLINE_BYTES_MAX: Final = 32 << 20
"""Payload bytes of one message, where there is no region."""
KEYS_MAX: Final = 1024
_REGION_LOST: Final = frozenset({ErrorCode.UNKNOWN_REGION, ErrorCode.INTERNAL})
REATTACH_NS: Final = 10_000_000_000
"""After a refusal, bytes travel inline for so long before a region is asked for again."""


class ChannelError(Exception):
    """A call got no answer, or a refusal. What it was about counts as not done.

    Attributes:
        unavailable: The gateway did not answer (and a refusal otherwise).
        code: The code of a refusal, where the gateway gave one.
    """

    def __init__(self, message: str, *, unavailable: bool, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.unavailable = unavailable
        self.code = code


@dataclass(frozen=True, slots=True)
class Place:
    """Room for one object."""

    view: memoryview
    offset: int
    """In the region; -1 without one."""


class Channel:
    """See the module.

    Args:
        client: The blocking client; this channel's own.
        namespace: The namespace of all calls.
        staging_bytes: Size of the region.
        clock: Monotonic nanoseconds.
        pin: Called with the memory of a new region, so that an accelerator can copy to it directly; returns what undoes it.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        staging_bytes: int,
        clock: Callable[[], int],
        pin: Callable[[memoryview], Callable[[], None]] = lambda _: lambda: None,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._staging_bytes = staging_bytes
        self._clock = clock
        self._pin = pin
        self._unpin: Callable[[], None] = lambda: None
        self._region: Region | None = None
        self._inline_until_ns = 0
        self._buffer: bytearray | None = None

    @property
    def inline(self) -> bool:
        """Whether bytes travel in the messages."""
        return self._region is None

    def ready(self, timeout_ms: int) -> None:
        """Attach a region if there is none and the gateway offers one.

        Raises:
            ChannelError: The gateway does not answer.
        """
        if self._region is not None:
            if self._region.attached:
                return
            self._let_go()
        if self._clock() < self._inline_until_ns:
            return
        try:
            path = self._client.hello("xkv-vllm-connector", timeout_ms=timeout_ms).regions
            if path is not None:
                self._region = Region.attach(path, self._staging_bytes, timeout_ms=timeout_ms)
                self._unpin = self._pin(self._region.view)
                return
        except (RegionRefusedError, EndpointError, OSError):
            pass
        except XkvRpcError as error:
            raise _failed(error) from error
        self._inline_until_ns = self._clock() + REATTACH_NS

    def fit(self, sizes: Sequence[int]) -> int:
        """Say how many of these objects one call takes, at least one."""
        room = INLINE_BYTES_MAX if self._region is None else self._staging_bytes
        used = count = 0
        for size in sizes[:KEYS_MAX]:
            used += _padded(size)
            if used > room and count:
                break
            count += 1
        return count

    def places(self, sizes: Sequence[int]) -> list[Place]:
        """Make room for the objects of one call (`fit`).

        Raises:
            ChannelError: One does not fit at all.
        """
        total = sum(map(_padded, sizes))
        if self._region is None:
            if self._buffer is None or len(self._buffer) < total:
                self._buffer = bytearray(total)
            memory = memoryview(self._buffer)
        else:
            memory = self._region.view
        if total > len(memory):
            raise ChannelError("an object is larger than staging_bytes", unavailable=False)
        places = []
        at = 0
        for size in sizes:
            places.append(Place(memory[at : at + size], -1 if self._region is None else at))
            at += _padded(size)
        return places

    def load(
        self,
        scope: bytes,
        keys: list[bytes],
        sizes: list[int],
        lease: bytes | None,
        timeout_ms: int,
    ) -> list[memoryview]:
        """Get objects, all of exactly these sizes.

        Raises:
            ChannelError: One of them is missing, damaged or of another size, or there was no answer.
        """
        try:
            if self._region is None:
                result = self._client.load(self._namespace, scope, keys, lease=lease, timeout_ms=timeout_ms)
                views = [payload or memoryview(b"") for payload in result.payloads]
            else:
                places = self.places(sizes)
                result = self._client.load_into(
                    self._namespace,
                    scope,
                    keys,
                    self._region.token,
                    [place.offset for place in places],
                    sizes,
                    lease=lease,
                    timeout_ms=timeout_ms,
                )
                views = [place.view for place in places]
        except XkvRpcError as error:
            self._drop(error)
            raise _failed(error) from error
        if any(status is not LoadStatus.OK for status in result.statuses) or result.sizes != sizes:
            raise ChannelError("an object is gone, damaged or of another size", unavailable=False)
        return views

    def missing(self, scope: bytes, keys: list[bytes], timeout_ms: int) -> list[bool]:
        """Ask which objects are not held.

        Raises:
            ChannelError: There was no answer.
        """
        try:
            reply = self._client.lookup(
                self._namespace, scope, keys, mode=LookupMode.EACH, timeout_ms=timeout_ms
            )
        except XkvRpcError as error:
            raise _failed(error) from error
        return [size is None for size in reply.sizes]

    def store(
        self, scope: bytes, keys: list[bytes], places: Sequence[Place], timeout_ms: int
    ) -> list[StoreStatus]:
        """Have the objects kept that lie in these places.

        Raises:
            ChannelError: There was no answer.
        """
        try:
            if self._region is None:
                return self._client.store(
                    self._namespace, scope, keys, [place.view for place in places], timeout_ms=timeout_ms
                )
            return self._client.store_from(
                self._namespace,
                scope,
                keys,
                [len(place.view) for place in places],
                self._region.token,
                [place.offset for place in places],
                timeout_ms=timeout_ms,
            )
        except XkvRpcError as error:
            self._drop(error)
            raise _failed(error) from error

    def _drop(self, error: XkvRpcError) -> None:
        """After a refusal nothing is under way; after anything else the memory may still be used by the other side."""
        if isinstance(error, RpcError) and error.code not in _REGION_LOST:
            return
        self._buffer = None
        self._let_go()

    def _let_go(self) -> None:
        region, self._region = self._region, None
        if region is None:
            return
        self._unpin()
        with contextlib.suppress(BufferError):
            # Places may still be referred to; the memory goes with the last of them.
            region.close()

    def close(self) -> None:
        """Let go of the region and the connections."""
        self._let_go()
        self._client.close()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _failed(error: XkvRpcError) -> ChannelError:
    if isinstance(error, RpcError):
        return ChannelError(str(error), unavailable=False, code=error.code)
    return ChannelError(str(error), unavailable=True)
