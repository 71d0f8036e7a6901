"""A namespace that becomes smaller while its card is served: what lies beyond its end is forgotten, and a smaller card goes on.

smaller  ->  nothing is answered, nothing begins; what is under way ends
         ->  objects with units beyond the end are deleted, durably
         ->  the index is read again for a card of the size that is left; superblocks and run start, as in Open
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.format_errors import FormatError
from xkv_gateway.card.layout import shrunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.store import CardStore
    from xkv_gateway.card.writer import JournalWriter
    from xkv_nvmeof.blockdev import BlockDevice, Geometry

log = logging.getLogger(__name__)

POLL_NS: Final = 100_000_000


class Shrinking:
    """Watches the size of one namespace for one run."""

    def __init__(self, device: BlockDevice) -> None:
        self._device = device
        self._least_bytes = device.geometry.size_bytes
        self._news = asyncio.Event()
        device.add_geometry_listener(self._changed)

    def _changed(self, before: Geometry, now: Geometry) -> None:  # noqa: ARG002
        # What has been beyond its end is lost, also where it grows again meanwhile.
        self._least_bytes = min(self._least_bytes, now.size_bytes)
        self._news.set()

    def left_of(self, layout: Layout) -> Layout | None:
        """Return what is left of a layout; None: all of it.

        Raises:
            CardLost: too little.
        """
        if self._least_bytes >= layout.size_bytes:
            return None
        try:
            return shrunk(layout, self._least_bytes)
        except FormatError as error:
            raise CardLost(f"its namespace has shrunk too far: {error}") from error

    async def retreat(
        self, store: CardStore, journal: JournalWriter, layout: Layout, leave: Callable[[], None]
    ) -> None:
        """Return when the namespace has become smaller, and nothing that the journal knows lies beyond its end.

        `leave` sees to it that no stores begin from then on; it is called while none can.
        """
        while (left := self.left_of(layout)) is None:
            self._news.clear()
            await self._news.wait()
        async with store.suspended():
            while store.saves or self._may_still_be_written(store, left):
                await store.room(store.clock() + POLL_NS)
                left = self.left_of(layout) or left
            gone = store.engine.forget_beyond(left.capacity_au, store.clock())
            store.changed()
            await journal.reached(store.engine.last_lsn)
            leave()
        log.error(
            "the namespace has shrunk to %d bytes, from %d: %d objects that were beyond its end are gone",
            left.size_bytes,
            layout.size_bytes,
            gone,
        )

    def _may_still_be_written(self, store: CardStore, left: Layout) -> bool:
        """Whether writes may still land that the index, read again, would know nothing of: on what it calls free, or on a superblock."""
        return store.clock() < self._device.settles_at_ns or store.engine.tickets.in_clients_hands(
            left.capacity_au
        )
