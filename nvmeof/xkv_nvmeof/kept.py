"""What a device that a keeper keeps connected says of itself, whatever way it is reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.blockdev import DeviceCounters, DeviceIdentity, DeviceState, Geometry


class Seen(Protocol):
    """A namespace as last seen."""

    @property
    def geometry(self) -> Geometry:
        """Its size and what it can do."""
        ...

    @property
    def identity(self) -> DeviceIdentity:
        """Which it is."""
        ...


class AnyKeeper(Protocol):
    """Keeps a namespace connected."""

    state: DeviceState
    reason: str
    counters: DeviceCounters
    state_listeners: list[Callable[[DeviceState, str], None]]
    geometry_listeners: list[Callable[[Geometry, Geometry], None]]

    @property
    def seen(self) -> Seen:
        """The namespace; there is one from the first connection on."""
        ...


K = TypeVar("K", bound=AnyKeeper)


class KeptDevice(Generic[K]):
    """The part of `BlockDevice` that tells how the device is."""

    def __init__(self, keeper: K) -> None:
        self._keeper = keeper

    @property
    def geometry(self) -> Geometry:
        """Geometry of the namespace as last told."""
        return self._keeper.seen.geometry

    @property
    def identity(self) -> DeviceIdentity:
        """Identity of the namespace."""
        return self._keeper.seen.identity

    @property
    def state(self) -> DeviceState:
        """Whether commands can be sent now."""
        return self._keeper.state

    @property
    def reason(self) -> str:
        """Why the device is in its state, for people."""
        return self._keeper.reason

    @property
    def counters(self) -> DeviceCounters:
        """Live counters."""
        return self._keeper.counters

    def add_state_listener(self, listener: Callable[[DeviceState, str], None]) -> None:
        """Call `listener(state, reason)` from the loop at each change of state."""
        self._keeper.state_listeners.append(listener)

    def add_geometry_listener(self, listener: Callable[[Geometry, Geometry], None]) -> None:
        """Call `listener(before, now)` from the loop when the namespace grew, shrank or changed otherwise."""
        self._keeper.geometry_listeners.append(listener)
