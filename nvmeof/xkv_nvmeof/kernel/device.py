"""`KernelDevice`: a namespace reached through Linux's block layer, as a `BlockDevice`.

Reads and writes block threads, so a call ends when Linux has ended it: at an answer of the controller, or when it has given up.
How long that takes at most was told to Linux when it connected (or by whoever attached the device). A read never touches its
buffers after it has ended, and a write that Linux still holds, and would send again, is never declared over.

Whether the namespace is there is looked at several times a second; while it is not, calls are refused at once.
"""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

from xkv_nvmeof.blockdev import DeviceOffline, DeviceState, OutcomeUnknown
from xkv_nvmeof.initiator_calls import byte_views
from xkv_nvmeof.initiator_errors import DeviceBusy, command_failed
from xkv_nvmeof.kept import KeptDevice
from xkv_nvmeof.kernel.keeper import NS_PER_MS, KernelKeeper
from xkv_nvmeof.kernel.workers import Workers
from xkv_nvmeof.spec import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_nvmeof.blockdev import ByteRange
    from xkv_nvmeof.initiator_options import InitiatorOptions
    from xkv_nvmeof.kernel.keeper import Use
    from xkv_nvmeof.kernel.ways import Way

THREADS_MAX: Final = 32
ANSWERED: Final = {
    errno.EBADE: Status.RESERVATION_CONFLICT,
    errno.ENODATA: Status.UNRECOVERED_READ_ERROR,
    errno.ENOSPC: Status.CAPACITY_EXCEEDED,
    errno.EOPNOTSUPP: Status.INVALID_OPCODE,
    errno.EREMOTEIO: Status.INTERNAL_ERROR,
    errno.EILSEQ: Status.DATA_TRANSFER_ERROR,
    errno.EINVAL: Status.INVALID_FIELD,
    errno.EROFS: Status.NAMESPACE_WRITE_PROTECTED,
    errno.EPERM: Status.NAMESPACE_WRITE_PROTECTED,
}
"""What Linux makes of answers of a controller. All other errors, EIO above all, may as well be a connection that was lost."""


class KernelDevice(KeptDevice[KernelKeeper]):
    """See the module and `BlockDevice`. Made by `connect`; `clock` is monotonic, in nanoseconds."""

    def __init__(self, keeper: KernelKeeper, options: InitiatorOptions, clock: Callable[[], int]) -> None:
        super().__init__(keeper)
        self._counters = keeper.counters
        self._options = options
        self._clock = clock
        self._workers = Workers(min(THREADS_MAX, options.io_queues * options.queue_depth), "kernel-card")

    @classmethod
    async def connect(
        cls,
        way: Way,
        options: InitiatorOptions,
        *,
        clock: Callable[[], int],
        entropy: Callable[[int], bytes],
    ) -> Self:
        """Open the namespace and return the device, which gets back to it by itself until `aclose`.

        Raises:
            ConnectFailed: or a subclass; nothing is left connected.
        """
        keeper = KernelKeeper(way, options, clock, entropy)
        await keeper.start()
        return cls(keeper, options, clock)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def late_ms(self) -> int:
        """How long a command may still be executed after this host is gone."""
        return self._keeper.seen.late_ms

    @property
    def facts(self) -> dict[str, object]:
        """What Linux says of the way to the namespace, for status displays."""
        return self._keeper.seen.facts

    @property
    def settles_at_ns(self) -> int:
        """From this moment nothing that was sent before the last loss can still be executed (0: none was lost)."""
        return self._keeper.settles_at_ns

    @property
    def incarnation(self) -> int:
        """Grows whenever Linux has lost a controller, or may have. Of devices that are no NVMe namespaces nothing is known."""
        return self._keeper.incarnation

    @property
    def reservations(self) -> None:
        """None: not through Linux."""
        return

    async def aclose(self) -> None:
        """Wait a moment for what is in flight, close the namespace, undo what was connected. Idempotent."""
        self._workers.close()
        await self._keeper.aclose()

    # -- input and output ------------------------------------------------------------------------------------

    async def read_into(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers`, in order, from the namespace."""
        views = byte_views(buffers)
        total = sum(map(len, views))
        use = self._bounded("READ", offset_bytes, total)
        if total:
            await self._run("READ", use, use.opened.file.read, offset_bytes, views, total, mutates=False)
            self._counters.read_commands += 1
            self._counters.read_bytes += total

    async def write_from(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers`, in order."""
        views = byte_views(buffers)
        total = sum(map(len, views))
        use = self._bounded("WRITE", offset_bytes, total)
        if total:
            await self._run("WRITE", use, use.opened.file.write, offset_bytes, views, total, mutates=True)
            self._counters.write_commands += 1
            self._counters.write_bytes += total

    async def flush(self) -> None:
        """Make every write that returned before this call durable."""
        use = self._bounded("FLUSH", 0, 0)
        if use.opened.geometry.volatile_write_cache:
            await self._run("FLUSH", use, use.opened.file.flush, mutates=False)
            self._counters.flush_commands += 1

    async def deallocate(self, ranges: Sequence[ByteRange]) -> None:
        """Tell the device that the ranges hold nothing."""
        use = self._bounded("DEALLOCATE", 0, 0)
        for one in ranges:
            self._bounded("DEALLOCATE", one.offset_bytes, one.length_bytes)
        if not use.opened.geometry.can_deallocate:
            raise command_failed("DEALLOCATE", Status.INVALID_OPCODE, do_not_retry=True)
        file = use.opened.file

        def discard() -> None:
            for one in ranges:
                if one.length_bytes:
                    file.discard(one.offset_bytes, one.length_bytes)

        if ranges:
            await self._run("DEALLOCATE", use, discard, mutates=True)
            self._counters.deallocate_commands += 1

    async def write_zeroes(self, byte_range: ByteRange) -> None:
        """Zero the range without sending the zeroes."""
        use = self._bounded("WRITE ZEROES", byte_range.offset_bytes, byte_range.length_bytes)
        if not use.opened.geometry.can_write_zeroes:
            raise command_failed("WRITE ZEROES", Status.INVALID_OPCODE, do_not_retry=True)
        if byte_range.length_bytes:
            zero, where = use.opened.file.zero, (byte_range.offset_bytes, byte_range.length_bytes)
            await self._run("WRITE ZEROES", use, zero, *where, mutates=True)
            self._counters.write_zeroes_commands += 1

    def _bounded(self, what: str, offset_bytes: int, length_bytes: int) -> Use:
        """Check a range against the geometry; return what the call goes to.

        Raises:
            DeviceOffline: the namespace is not there.
            CommandFailed: the range goes beyond the end.
        """
        use = self._keeper.use
        if use is None or self._keeper.state is DeviceState.OFFLINE:
            self._counters.errors += 1
            raise DeviceOffline(f"{what}: {self._keeper.reason}")
        geometry = use.opened.geometry
        assert offset_bytes >= 0
        assert offset_bytes % geometry.block_bytes == 0
        assert length_bytes % geometry.block_bytes == 0
        if offset_bytes + length_bytes > geometry.size_bytes:
            self._counters.errors += 1
            raise command_failed(what, Status.LBA_OUT_OF_RANGE, do_not_retry=True)
        return use

    async def _run(
        self, what: str, use: Use, function: Callable[..., None], *arguments: Any, mutates: bool
    ) -> None:
        """Have a thread do it, and wait for it; a caller that is cancelled waits as well, once it has begun."""
        if self._workers.unfinished >= self._options.max_waiting_calls:
            self._counters.errors += 1
            raise DeviceBusy(f"{what}: {self._workers.unfinished} calls wait already")
        number = use.begin(self._clock())
        job = self._workers.submit(function, *arguments)
        job.future.add_done_callback(lambda _done: use.ended(number))
        try:
            await asyncio.shield(job.future)
        except asyncio.CancelledError:
            if not self._workers.withdraw(job):
                await _ended(job.future)
            raise
        except OSError as error:
            self._counters.errors += 1
            self._fail(what, use, error, mutates=mutates)

    def _fail(self, what: str, use: Use, error: OSError, *, mutates: bool) -> None:
        message = f"{what}: {error.strerror or error}"
        status = ANSWERED.get(error.errno or 0)
        if status is not None:
            raise command_failed(what, status, do_not_retry=status is not Status.INTERNAL_ERROR) from error
        settles_at_ns = self._clock() + use.opened.late_ms * NS_PER_MS
        self._keeper.may_have_lost()
        if mutates:
            self._keeper.settles_at_ns = max(self._keeper.settles_at_ns, settles_at_ns)
        if self._keeper.use is use:
            self._keeper.look(use)
        raise OutcomeUnknown(message, settles_at_ns=settles_at_ns) from error


async def _ended(future: asyncio.Future[None]) -> None:
    """Return when it is done, however often this task is cancelled meanwhile."""
    while not future.done():
        with suppress(asyncio.CancelledError, OSError):
            await asyncio.shield(future)
    if not future.cancelled():
        future.exception()
