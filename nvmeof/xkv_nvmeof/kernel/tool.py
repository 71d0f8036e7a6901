"""Runs nvme-cli. It may hang beyond any kill while Linux waits for a controller: nobody waits for it longer than a deadline.

Its output goes to memory files of a fixed size instead of pipes: a child of its own that holds them open keeps nobody waiting, and
what it writes beyond that size is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import signal
from dataclasses import dataclass
from typing import Final

from xkv_nvmeof.initiator_errors import ConnectFailed, ConnectUnanswered

NAME: Final = "nvme"
PLACES: Final = "/usr/sbin:/usr/local/sbin:/sbin:/usr/bin:/bin"
OUTPUT_BYTES_MAX: Final = 8 << 20
KILL_GRACE_S: Final = 0.3
"""How long a killed one may take to end before it counts as stuck."""
MESSAGE_CHARS_MAX: Final = 300
SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class ToolMissing(ConnectFailed):
    """There is no nvme-cli on this host."""


class ToolShort(ConnectUnanswered):
    """This host has no room for another process or file now."""


class ToolStuck(ConnectUnanswered):
    """nvme-cli did not end in time; Linux still waits for a controller on its behalf."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run left behind. `code` is negative for a signal, as of `subprocess`."""

    code: int
    out: bytes
    err: str

    @property
    def said(self) -> str:
        """What it said, in one line, for people."""
        text = " ".join((self.err or self.out.decode(errors="replace")).split())
        text = "".join(char if char.isprintable() else "?" for char in text)[:MESSAGE_CHARS_MAX]
        end = f"exit code {self.code}" if self.code >= 0 else f"signal {-self.code}"
        return f"{text or 'no message'} ({end})"


class NvmeTool:
    """nvme-cli on this host. One run at a time: while one is stuck, the next is refused."""

    def __init__(self, program: str | None = None) -> None:
        self._program = program
        self._busy = asyncio.Lock()
        self._stuck: asyncio.Task[int] | None = None
        self.version = "of an unknown version"

    async def run(self, arguments: tuple[str, ...], timeout_s: float) -> Ended:
        """Run it with these arguments.

        Raises:
            ToolMissing: it is not installed.
            ToolShort: there is no room for it now.
            ToolStuck: it did not end within `timeout_s`, or one from before still has not.
        """
        ends = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._busy.acquire()
        except TimeoutError:
            raise ToolStuck("another run of nvme-cli has not ended") from None
        try:
            return await self._run(arguments, ends - asyncio.get_running_loop().time())
        finally:
            self._busy.release()

    async def _run(self, arguments: tuple[str, ...], timeout_s: float) -> Ended:
        if self._stuck is not None and not self._stuck.done():
            raise ToolStuck("the run of nvme-cli before this one has not ended: Linux waits for a controller")
        program = self._program or shutil.which(NAME) or shutil.which(NAME, path=PLACES)
        if program is None:
            raise ToolMissing("nvme-cli is not installed on this host")
        with contextlib.ExitStack() as undo:
            try:
                out, err = (_memory_file(undo, name) for name in ("nvme-out", "nvme-err"))
                process = await asyncio.create_subprocess_exec(
                    program,
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                kind = ToolShort if error.errno in SHORTAGES else ToolMissing
                raise kind(f"{program} cannot be run: {error.strerror}") from None
            waiting = asyncio.create_task(process.wait(), name="nvme-cli")
            try:
                done, _ = await asyncio.wait((waiting,), timeout=max(0.0, timeout_s))
                if not done:
                    await self._give_up(waiting, process.pid)
                    raise ToolStuck(f"nvme-cli did not end within {timeout_s:.1f} s ({arguments[0]})")
            except asyncio.CancelledError:
                self._abandon(waiting, process.pid)
                raise
            return Ended(waiting.result(), _written(out), _written(err).decode(errors="replace"))

    async def _give_up(self, waiting: asyncio.Task[int], pid: int) -> None:
        self._abandon(waiting, pid)
        await asyncio.wait((waiting,), timeout=KILL_GRACE_S)

    def _abandon(self, waiting: asyncio.Task[int], pid: int) -> None:
        """Kill it and all that it started; the task goes on until it is gone, however long that takes."""
        self._stuck = waiting
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _memory_file(undo: contextlib.ExitStack, name: str) -> int:
    """Return a file of the largest size that no writer can make larger, whatever processes it is handed to."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    undo.callback(os.close, descriptor)
    os.ftruncate(descriptor, OUTPUT_BYTES_MAX)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor


def _written(descriptor: int) -> bytes:
    """Return what has been written: the writers share our position in the file."""
    return os.pread(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR), 0)
