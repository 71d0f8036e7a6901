"""Joins the paths of a device: which are used, its state, and the namespace as it was last seen."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from xkv_nvmeof.blockdev import DeviceState
from xkv_nvmeof.initiator_errors import ConnectFailed, ConnectUnanswered
from xkv_nvmeof.initiator_open import check_namespace, with_address
from xkv_nvmeof.initiator_options import PathStatus
from xkv_nvmeof.initiator_path import Path
from xkv_nvmeof.multipath import PATHS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_nvmeof.blockdev import DeviceCounters, Geometry
    from xkv_nvmeof.initiator_admin import NamespaceView
    from xkv_nvmeof.initiator_association import Association, Host
    from xkv_nvmeof.initiator_dispatch import Dispatcher
    from xkv_nvmeof.initiator_options import TargetAddress

_logger = logging.getLogger(__name__)


class Keeper:
    """Owns the paths of one device; `dispatcher` gets their associations while they are up and the namespace is there."""

    def __init__(
        self,
        host: Host,
        addresses: Sequence[TargetAddress],
        dispatcher: Dispatcher,
        counters: DeviceCounters,
        entropy: Callable[[int], bytes],
    ) -> None:
        assert 0 < len(addresses) <= PATHS_MAX
        self.state = DeviceState.OFFLINE
        self.reason = "not connected yet"
        self.view: NamespaceView | None = None
        self.opened: NamespaceView | None = None
        self.state_listeners: list[Callable[[DeviceState, str], None]] = []
        self.geometry_listeners: list[Callable[[Geometry, Geometry], None]] = []
        self.paths = [Path(host, address, self, counters, entropy) for address in addresses]
        self.counters = counters
        self._dispatcher = dispatcher

    @property
    def seen(self) -> NamespaceView:
        """The namespace as last looked at; there is one from the first connection on."""
        assert self.view is not None
        return self.view

    @property
    def association(self) -> Association | None:
        """One of the associations that are up, if any is."""
        return next((path.association for path in self.paths if path.association is not None), None)

    @property
    def settles_at_ns(self) -> int:
        """From this moment nothing sent on associations that have ended can still be executed."""
        return max(path.settles_at_ns for path in self.paths)

    def status(self) -> list[PathStatus]:
        """Tell of each path how it is."""
        return [
            PathStatus(
                address=path.address,
                connected=path.association is not None,
                access=None if path.association is None else path.association.access,
                reason=path.reason,
            )
            for path in self.paths
        ]

    async def start(self) -> None:
        """Connect for the first time, by whatever path, and keep all of them connected from then on.

        Raises:
            ConnectFailed: or a subclass, when no path can be used: of the first one that is not merely without an answer.
        """
        attempts = [asyncio.create_task(path.connect(), name="nvme-tcp-connect") for path in self.paths]
        try:
            pending = set(attempts)
            while pending and self.opened is None:
                _done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
            raise
        if self.opened is None:
            raise _most_telling(attempts)
        for path, attempt in zip(self.paths, attempts, strict=True):
            path.start(attempt)

    def retarget(self, host: str, port: int) -> None:
        """The (first) address is another one from now on; while offline it is tried at once."""
        self.paths[0].retarget(host, port)

    def hurry(self) -> None:
        """Try to connect at once wherever there is no association."""
        for path in self.paths:
            path.hurry()

    async def aclose(self) -> None:
        """Shut the controllers down in order and end everything. Idempotent."""
        await asyncio.gather(*(path.aclose() for path in self.paths))

    # -- what the paths tell -------------------------------------------------------------------------------------

    def path_up(self, path: Path, association: Association, view: NamespaceView) -> None:
        """Use a path, as far as its controller lets us.

        Raises:
            ConnectFailed: it leads to another namespace, or to less of it.
        """
        if self.opened is None:
            self.opened = view
        try:
            check_namespace(self.opened, view)
        except ConnectFailed as error:
            raise with_address(error, path.address) from error
        others = (other.association for other in self.paths if other is not path)
        self._see(view.by_any_of([one.namespace for one in others if one is not None and one.namespace]))
        self._dispatcher.attach(association, association.access)
        self._judge(f"the controller gives no access to the namespace ({association.access.name})")

    def path_asked(self, association: Association) -> None:
        """Wait for what a path says of its access."""
        self._dispatcher.ask(association)

    def path_down(self, association: Association | None, reason: str) -> None:
        """Use a path no more."""
        if association is not None:
            self._dispatcher.detach(association, reason)
        elif not self._dispatcher.usable:
            self._dispatcher.refuse(reason)
        self._judge(reason)

    def _judge(self, reason: str) -> None:
        """The device is online while anything can be sent."""
        if self._dispatcher.usable:
            self._set_state(DeviceState.ONLINE, "connected")
        else:
            self._set_state(DeviceState.OFFLINE, reason)

    def _set_state(self, state: DeviceState, reason: str) -> None:
        changed = state is not self.state
        self.state, self.reason = state, reason
        if changed:
            for listener in list(self.state_listeners):
                listener(state, reason)

    def _see(self, view: NamespaceView) -> None:
        before, self.view = self.view, view
        if before is not None and before.geometry != view.geometry:
            _logger.info(
                "namespace %d: %d bytes now, %d before",
                view.identity.nsid,
                view.geometry.size_bytes,
                before.geometry.size_bytes,
            )
            for listener in list(self.geometry_listeners):
                listener(before.geometry, view.geometry)


def _most_telling(attempts: Sequence[asyncio.Task[None]]) -> BaseException:
    """Return why attempts failed that all have."""
    failures = [failure for attempt in attempts if (failure := attempt.exception()) is not None]
    return next((one for one in failures if not isinstance(one, ConnectUnanswered)), failures[0])
