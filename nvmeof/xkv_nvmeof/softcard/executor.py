"""Executes the card's commands on the store: at once where nothing has to wait, in a thread where something may."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.controller_types import (
    AuthenticateCommand,
    DeallocateCommand,
    FlushCommand,
    IoCommand,
    ReadCommand,
    ShutdownCommand,
    WriteCommand,
    WriteZeroesCommand,
)
from xkv_nvmeof.softcard.store import write_status
from xkv_nvmeof.spec import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.softcard.store import Store

_LOG: Final = logging.getLogger(__name__)
THREADS: Final = 4
SLOW_WRITE_NS: Final = 20_000_000
"""A write that held the loop that long means that the kernel makes writers wait for the disk."""
SLOW_MODE_NS: Final = 1_000_000_000
"""Writes go to threads for that long after a slow one."""


class Executor:
    """Turns a command into a status. `done` is always called from the loop, perhaps before `execute` returns."""

    def __init__(self, store: Store, clock: Callable[[], int]) -> None:
        self._store = store
        self._clock = clock
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        self._loop = asyncio.get_running_loop()
        self._slow_until_ns = 0
        self._flush_waiters: list[Callable[[Status], None]] = []
        self._flush_running = False
        self._flush_failed = False

    def execute(self, command: IoCommand, buffer: memoryview | None, done: Callable[[Status], None]) -> None:
        """Execute; a read needs `buffer`, of its length."""
        match command:
            case ReadCommand():
                assert buffer is not None
                self._read(command, buffer, done)
            case WriteCommand():
                self._write(command, done)
            case FlushCommand() | ShutdownCommand():
                self._flush_waiters.append(done)
                self._start_flush()
            case AuthenticateCommand():
                self._in_thread(command.run, done)
            case WriteZeroesCommand():
                self._in_thread(lambda: self._zero_all(command), done)
            case DeallocateCommand():
                if command.ranges:
                    self._in_thread(lambda: self._zero_all(command), done)
                else:
                    done(Status.SUCCESS)

    async def aclose(self) -> None:
        """Wait until everything that was begun is over."""
        await asyncio.to_thread(self._threads.shutdown)

    def _read(self, command: ReadCommand, buffer: memoryview, done: Callable[[Status], None]) -> None:
        try:
            ready = self._store.read_now(command.offset_bytes, buffer)
        except OSError as error:
            _LOG.error("read of %d bytes failed: %s", command.length_bytes, error.strerror)
            done(Status.UNRECOVERED_READ_ERROR)
            return
        if ready:
            done(Status.SUCCESS)
        else:
            self._in_thread(lambda: self._store.read(command.offset_bytes, buffer), done, reading=True)

    def _write(self, command: WriteCommand, done: Callable[[Status], None]) -> None:
        begin_ns = self._clock()
        if command.force_unit_access or begin_ns < self._slow_until_ns:
            durable = command.force_unit_access
            self._in_thread(
                lambda: self._store.write(command.offset_bytes, command.data, durable=durable), done
            )
            return
        try:
            self._store.write(command.offset_bytes, command.data, durable=False)
        except OSError as error:
            done(self._failed(error))
            return
        end_ns = self._clock()
        if end_ns - begin_ns > SLOW_WRITE_NS and self._store.may_wait:
            self._slow_until_ns = end_ns + SLOW_MODE_NS
        done(Status.SUCCESS)

    def _zero_all(self, command: WriteZeroesCommand | DeallocateCommand) -> None:
        ranges = command.ranges if isinstance(command, DeallocateCommand) else (command.byte_range,)
        for item in ranges:
            self._store.zero(item.offset_bytes, item.length_bytes)
        if isinstance(command, WriteZeroesCommand) and command.force_unit_access:
            self._store.flush()

    # A flush that is running may have begun before the last write was done, so later ones wait for the next one,
    # which then stands for all of them.
    def _start_flush(self) -> None:
        if self._flush_running or not self._flush_waiters:
            return
        waiters, self._flush_waiters = self._flush_waiters, []
        self._flush_running = True

        def finish(status: Status) -> None:
            self._flush_running = False
            if status != Status.SUCCESS:
                self._flush_failed = True
            for waiter in waiters:
                waiter(status)
            self._start_flush()

        if self._flush_failed:
            # After a failed flush the kernel forgets which pages it lost: a later success would be a lie.
            self._loop.call_soon(finish, Status.WRITE_FAULT)
        else:
            self._in_thread(self._store.flush, finish)

    def _in_thread(
        self, work: Callable[[], None], done: Callable[[Status], None], *, reading: bool = False
    ) -> None:
        future = self._loop.run_in_executor(self._threads, work)

        def finish(finished: asyncio.Future[None]) -> None:
            error = finished.exception()
            if error is None:
                done(Status.SUCCESS)
            elif not isinstance(error, OSError):
                raise error
            elif reading:
                _LOG.error("read failed: %s", error.strerror)
                done(Status.UNRECOVERED_READ_ERROR)
            else:
                done(self._failed(error))

        future.add_done_callback(finish)

    def _failed(self, error: OSError) -> Status:
        status = write_status(error)
        _LOG.error("write failed: %s: %s", error.strerror, status.name)
        return status
