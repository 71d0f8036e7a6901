"""Keeps an open namespace: looks at it several times a second, says whether commands get through, opens it again."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.aside import Aside
from xkv_nvmeof.blockdev import DeviceCounters, DeviceState
from xkv_nvmeof.initiator_errors import ConnectFailed
from xkv_nvmeof.initiator_open import check_namespace
from xkv_nvmeof.initiator_retry import Backoff, ReconnectLog
from xkv_nvmeof.kernel import sysfs
from xkv_nvmeof.kernel.view import subsystem_of
from xkv_nvmeof.kernel.ways import geometry_of, is_gone, is_live

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.blockdev import Geometry
    from xkv_nvmeof.initiator_options import InitiatorOptions
    from xkv_nvmeof.kernel.file import BlockFile
    from xkv_nvmeof.kernel.ways import Opened, Way

log = logging.getLogger(__name__)

NS_PER_MS: Final = 1_000_000
WATCH_S: Final = 0.25
UNSEEN_MS_MAX: Final = 900
"""Linux waits for a second or more before it connects anew: who looks at least so often sees each controller that was lost."""
RECONNECT_DELAY_MAX_MS: Final = 2_000
"""A start of nvme-cli each: rarer than attempts of an initiator of our own, often enough to be back within seconds."""
CLOSINGS_MAX: Final = 16
_closings: Final = Aside("card-close", CLOSINGS_MAX, "too many devices are being closed already")


class Use:
    """An opened namespace and the calls on it: closed when it is given up and the last call has ended."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.given_up = False
        self.closing: asyncio.Task[None] | None = None
        self.running: dict[int, int] = {}
        """Number of a call -> when it began."""
        self._next = 0

    def begin(self, now_ns: int) -> int:
        """Count a call in; return its number."""
        self._next += 1
        self.running[self._next] = now_ns
        return self._next

    def ended(self, number: int) -> None:
        """Count a call out."""
        del self.running[number]
        self._close_if_over()

    def give_up(self) -> None:
        """Close it as soon as nothing runs on it."""
        if not self.given_up:
            self.given_up = True
            self._close_if_over()

    def _close_if_over(self) -> None:
        if self.given_up and not self.running:
            self.closing = asyncio.create_task(_close(self.opened.file), name="card-close")


async def _close(file: BlockFile) -> None:
    """Close it, in a thread: Linux may keep who closes a device while its controller is silent."""
    try:
        await _closings.run(file.close)
    except OSError as error:
        log.warning("the device was not closed in order: %s", error.strerror)


class KernelKeeper:
    """The namespace of one device. `use` is where calls go, while there is something to go to."""

    def __init__(
        self, way: Way, options: InitiatorOptions, clock: Callable[[], int], entropy: Callable[[int], bytes]
    ) -> None:
        self.counters = DeviceCounters()
        self.state = DeviceState.OFFLINE
        self.reason = "not connected yet"
        self.use: Use | None = None
        self.settles_at_ns = 0
        self.state_listeners: list[Callable[[DeviceState, str], None]] = []
        self.geometry_listeners: list[Callable[[Geometry, Geometry], None]] = []
        self._way = way
        self._options = options
        self._clock = clock
        self._backoff = Backoff(options.reconnect_delay_min_ms, RECONNECT_DELAY_MAX_MS, entropy)
        self._log = ReconnectLog(log, clock)
        self._seen: Opened | None = None
        self._watching: asyncio.Task[None] | None = None
        self._incarnation = 0
        self._ways: frozenset[tuple[str, str]] = frozenset()
        """The controllers that were live at the last look."""
        self._looked_at_ns = 0

    @property
    def incarnation(self) -> int:
        """Grows whenever a controller was lost, or may have been while nobody looked.

        Linux connects anew and repeats commands without a word, so this is judged by looks at the state of the controllers.
        """
        if self._seen is not None and self._unseen:
            self._look_at_ways(self._seen)
        return self._incarnation

    @property
    def _unseen(self) -> bool:
        return self._clock() - self._looked_at_ns > UNSEEN_MS_MAX * NS_PER_MS

    def may_have_lost(self) -> None:
        """What has been written, and not flushed, may be gone."""
        self._incarnation += 1

    def _look_at_ways(self, opened: Opened) -> None:
        unseen, before = self._unseen and opened.identity.nqn, self._ways
        self._ways = live_controllers(opened)
        self._looked_at_ns = self._clock()
        if unseen or not before <= self._ways:
            self.may_have_lost()

    @property
    def seen(self) -> Opened:
        """The namespace as last opened; there is one from the first time on."""
        assert self._seen is not None
        return self._seen

    async def start(self) -> None:
        """Open the namespace, and keep it from then on.

        Raises:
            ConnectFailed: or a subclass; nothing is left connected.
        """
        opened = await self._way.open(None)
        self._adopt(opened)
        self._watching = asyncio.create_task(self._watch(), name="kernel-card")
        self._watching.add_done_callback(_report_death)

    def _set_state(self, state: DeviceState, reason: str) -> None:
        changed = state is not self.state
        self.state, self.reason = state, reason
        if not changed:
            return
        if state is DeviceState.OFFLINE and self._seen is not None:
            self.settles_at_ns = max(self.settles_at_ns, self._clock() + self.seen.late_ms * NS_PER_MS)
        for listener in list(self.state_listeners):
            listener(state, reason)

    def _adopt(self, opened: Opened) -> None:
        before, self._seen = self._seen, opened
        self.use = Use(opened)
        self._look_at_ways(opened)
        self._backoff.reset()
        self._log.success()
        if before is not None and before.geometry != opened.geometry:
            self._tell_geometry(before.geometry, opened.geometry)
        self._set_state(DeviceState.ONLINE, "connected")

    def _tell_geometry(self, before: Geometry, now: Geometry) -> None:
        log.info("namespace: %d bytes now, %d before", now.size_bytes, before.size_bytes)
        for listener in list(self.geometry_listeners):
            listener(before, now)

    async def _watch(self) -> None:
        while True:
            if self.use is None:
                await self._reopen()
            await asyncio.sleep(WATCH_S)
            if self.use is not None:
                self.look(self.use)

    def look(self, use: Use) -> None:
        """Compare the state with what Linux says now."""
        opened = use.opened
        self._look_at_ways(opened)
        live, reason = is_live(opened)
        overdue_ns = self._clock() - self._options.command_timeout_ms * NS_PER_MS
        if live and any(began < overdue_ns for began in use.running.values()):
            live, reason = False, "a command has not come back"
        if not live:
            if self.state is DeviceState.ONLINE:
                self._log.lost(reason, closing=False)
            self._set_state(DeviceState.OFFLINE, reason)
            if is_gone(opened):
                self._give_up(use)
            return
        queue = sysfs.queue_of(opened.block)
        if not self._is_the_same(opened, queue):
            self._give_up(use)
            self._set_state(DeviceState.OFFLINE, "another namespace is there now, or none")
            return
        if opened.geometry.size_bytes != queue.size_bytes:
            before, opened.geometry = opened.geometry, geometry_of(queue)
            self._tell_geometry(before, opened.geometry)
        if self.state is DeviceState.OFFLINE:
            self.counters.reconnects += 1
            self._log.success()
        self._set_state(DeviceState.ONLINE, "connected")

    def _give_up(self, use: Use) -> None:
        """The namespace is not there any more; where it went, what its cache held may have stayed."""
        self.use = None
        use.give_up()
        self.may_have_lost()

    def _is_the_same(self, opened: Opened, queue: sysfs.Queue) -> bool:
        identity = opened.identity
        if not queue.size_bytes or queue.block_bytes != opened.geometry.block_bytes:
            return False
        return not opened.nvme or sysfs.namespace_ids(opened.block) == (identity.nguid, identity.uuid)

    async def _reopen(self) -> None:
        while self.use is None:
            await asyncio.sleep(self._backoff.next_s())
            try:
                opened = await self._way.open(self.seen.identity)
                try:
                    check_namespace(self.seen, opened)
                except ConnectFailed:
                    await _close(opened.file)
                    await self._way.leave()
                    raise
            except ConnectFailed as error:
                self.reason = str(error)
                self._log.failure(self.reason)
                continue
            self.counters.reconnects += 1
            self._adopt(opened)

    async def aclose(self) -> None:
        """Wait a moment for what is in flight, close the namespace, undo what was connected. Idempotent."""
        watching, self._watching = self._watching, None
        if watching is None:
            return
        watching.cancel()
        await asyncio.wait((watching,))
        self._set_state(DeviceState.OFFLINE, "closed by this host")
        use, self.use = self.use, None
        if use is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.close_timeout_ms / 2000):
                    while use.running:  # noqa: ASYNC110 - seldom any is left
                        await asyncio.sleep(0.01)
            use.give_up()
            if use.closing is not None:
                await asyncio.wait((use.closing,), timeout=self._options.close_timeout_ms / 2000)
        await self._way.leave()


def live_controllers(opened: Opened) -> frozenset[tuple[str, str]]:
    """Return the controllers by which Linux reaches the namespace now: the name of each, and the id that its target gave it."""
    if not opened.identity.nqn:
        return frozenset()
    subsystem = subsystem_of(sysfs.read_view(opened.root), opened.identity.nqn)
    folder = opened.root / "class" / "nvme"
    return frozenset(
        (one.name, sysfs.text_of(folder / one.name / "cntlid"))
        for one in (() if subsystem is None else subsystem.controllers)
        if one.live
    )


def _report_death(task: asyncio.Task[None]) -> None:
    """The task ends only when cancelled; anything else is a mistake of ours that must not pass in silence."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("the card is not watched any more", exc_info=task.exception())
