"""Loads: pinned objects read from the card, every one verified before it is handed out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xkv_gateway.card.checksum import checksums
from xkv_gateway.core.types import LoadStatus
from xkv_nvmeof.blockdev import DataCorrupted, DeviceOffline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_gateway.card.store import CardStore
    from xkv_gateway.card.transfer import Placed
    from xkv_gateway.core.types import BeginLoad, ReadPlan
    from xkv_nvmeof.blockdev import DeviceError

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loaded:
    """What became of one key. `payload` holds exactly the object's bytes, and only where the status is OK."""

    status: LoadStatus
    size_bytes: int = 0
    payload: memoryview | None = None


class Load:
    """One admitted load: its objects are pinned from construction until `run` ends, whatever happens in between.

    Admission is synchronous, so that what arrives later takes effect later.

    Args:
        store: the card store.
        request: the keys.
        rooms: where each object goes (then a larger object is `too_small`, and whatever is not OK leaves zeroes), or None
            to have memory allocated.
    """

    def __init__(self, store: CardStore, request: BeginLoad, rooms: Sequence[memoryview] | None) -> None:
        self._store = store
        self._rooms = rooms
        self._plans = store.begin_load(request)
        store.load_begins()

    @property
    def payload_bytes(self) -> int:
        """How many bytes this load will bring, at most."""
        return sum(plan.size_bytes for plan in self._plans if plan is not None)

    async def run(self) -> list[Loaded]:
        """Read and verify. Returns one entry a key; never raises but when cancelled."""
        corrupt: list[ReadPlan] = []
        try:
            results = await self._read(corrupt)
        finally:
            self._unpin(corrupt)
        self._zero_what_failed(results)
        return results

    def give_up(self) -> None:
        """Unpin without reading, instead of `run`."""
        self._unpin([])

    def _unpin(self, corrupt: Sequence[ReadPlan]) -> None:
        held = [plan for plan in self._plans if plan is not None]
        if held:
            self._store.engine.end_load(held, corrupt, self._store.clock())
        self._store.load_ended()

    async def _read(self, corrupt: list[ReadPlan]) -> list[Loaded]:
        results = [Loaded(LoadStatus.MISS) for _ in self._plans]
        placed: list[Placed] = []
        for index, plan in enumerate(self._plans):
            if plan is None:
                continue
            result = results[index]
            result.size_bytes = plan.size_bytes
            payload = self._memory(index, plan.size_bytes)
            if payload is None:
                result.status = LoadStatus.TOO_SMALL
                continue
            result.payload = payload
            placed.append((index, plan.extents, payload))
        failures = await self._store.transfer.read(placed)
        suspects = await self._verify(placed, failures, results)
        if suspects:
            # R6: one re-read, since the fault may have been on the way.
            failures = await self._store.transfer.read(suspects)
            for index, _, _ in await self._verify(suspects, failures, results):
                corrupt.append(self._plan(index))
                results[index].status = LoadStatus.CORRUPT
            if corrupt:
                _log.error(
                    "%d of %d objects failed their checksum twice and were removed", len(corrupt), len(placed)
                )
        return results

    async def _verify(
        self, placed: Sequence[Placed], failures: dict[int, DeviceError], results: list[Loaded]
    ) -> list[Placed]:
        """Set the status of what is certain; return what has wrong bytes."""
        suspects = [entry for entry in placed if isinstance(failures.get(entry[0]), DataCorrupted)]
        arrived = [entry for entry in placed if entry[0] not in failures]
        for entry, checksum in zip(arrived, await checksums([p for _, _, p in arrived]), strict=True):
            if checksum == self._plan(entry[0]).checksum:
                results[entry[0]].status = LoadStatus.OK
            else:
                suspects.append(entry)
        for index, error in failures.items():
            # The card went away before this was sent: as for any lookup then, a miss.
            results[index].status = (
                LoadStatus.MISS if isinstance(error, DeviceOffline) else LoadStatus.IO_ERROR
            )
        return suspects

    def _plan(self, index: int) -> ReadPlan:
        plan = self._plans[index]
        assert plan is not None
        return plan

    def _memory(self, index: int, size_bytes: int) -> memoryview | None:
        if self._rooms is None:
            return memoryview(bytearray(size_bytes))
        room = self._rooms[index]
        return room[:size_bytes] if len(room) >= size_bytes else None

    def _zero_what_failed(self, results: list[Loaded]) -> None:
        for index, result in enumerate(results):
            if result.status is LoadStatus.OK:
                continue
            result.payload = None
            if result.status is not LoadStatus.TOO_SMALL:
                result.size_bytes = 0
            if self._rooms is not None:
                self._rooms[index][:] = bytes(len(self._rooms[index]))
