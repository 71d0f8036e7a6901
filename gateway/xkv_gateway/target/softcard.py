"""Keeps the soft card's process running, and ends it with the gateway.

The soft card is an NVMe/TCP target over a file, in a process of its own, reached over a real connection. It ends
when its standard input does, so it never outlives the gateway, however that ends. When it dies it is started again
with backoff, on a new port; the card is offline meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import stat
import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_gateway.cardurl import SOFT_CARD_BYTES_MIN
from xkv_gateway.errors import CardUnavailableError
from xkv_gateway.sizes import format_size
from xkv_nvmeof.initiator_retry import ReconnectLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

DEFAULT_BYTES: Final = 16 << 30
SIZE_STEP_BYTES: Final = 64 << 20
DISK_SHARE: Final = 0.9
"""Share of the free disk that a default card may take: the rest of the machine needs some too."""

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 1.0
BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
STEADY_S: Final = 10.0
"""A process that lived this long starts again without delay when it dies."""

LOOK_ADVICE: Final = "The file was left alone."

READY_LINE_BYTES_MAX: Final = 4096
LOG_LINE_CHARS_MAX: Final = 500
LOG_LINES_PER_PERIOD: Final = 20
LOG_PERIOD_NS: Final = 10_000_000_000
TAIL_LINES: Final = 5
_LOG_LINE: Final = re.compile(
    r"[-0-9]+ [0-9:,]+ (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+: (?P<message>.*)"
)
"""How the process writes its log: the time and the name of its logger are left to ours."""


@dataclass(frozen=True, slots=True)
class SoftCardReady:
    """What the process says when it serves."""

    host: str
    port: int
    nqn: str
    nsid: int


@dataclass(frozen=True, slots=True)
class SoftCardFacts:
    """For status."""

    pid: int | None
    restarts: int
    reason: str
    """Why the process is down; empty while it runs."""


def is_new(path: Path) -> bool:
    """Tell whether a soft card is to be made there: nothing is, or what a start without room has left behind."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # whoever opens it says why
    return stat.S_ISREG(found.st_mode) and not found.st_size


def default_size(directory: Path) -> int:
    """Return the size of a new default soft card in `directory`: 16 GiB, or what the disk has room for.

    Raises:
        CardUnavailableError: not even the smallest card has room, or there is no such directory.
    """
    try:
        free_bytes = int(shutil.disk_usage(directory).free * DISK_SHARE)
    except OSError as error:
        raise CardUnavailableError(
            f"no soft card can be made in {directory}: {error.strerror}",
            advice="Make that directory, or choose another place with --card soft:PATH.",
        ) from None
    if free_bytes >= DEFAULT_BYTES:
        return DEFAULT_BYTES
    size_bytes = free_bytes // SIZE_STEP_BYTES * SIZE_STEP_BYTES
    if size_bytes < SOFT_CARD_BYTES_MIN:
        raise CardUnavailableError(
            f"no room for a soft card in {directory}: {format_size(free_bytes)} can be used, "
            f"{format_size(SOFT_CARD_BYTES_MIN)} is the least",
            advice="Free some space, or choose another place with --state-dir or --card soft:PATH.",
        )
    log.warning(
        "the disk of %s has no room for %s: the soft card is made with %s",
        directory,
        format_size(DEFAULT_BYTES),
        format_size(size_bytes),
    )
    return size_bytes


class SoftCard:
    """The process behind `soft:PATH`. `start` once, then `run` in a task, `aclose` in the end.

    With `read_only` the file is opened for reading only, and must exist.
    """

    def __init__(
        self, path: Path, size_bytes: int | None, *, clock: Callable[[], int], read_only: bool = False
    ) -> None:
        self._path = path
        self._read_only = read_only
        self._size_bytes = size_bytes
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._log = _LogLimit(clock)
        self._told = ReconnectLog(log, clock)
        self._down = ""
        self._pump: asyncio.Task[None] | None = None
        self._restarts = 0
        self._started_ns = 0

    @property
    def facts(self) -> SoftCardFacts:
        """Process id (None while it is down) and how often it was started again."""
        running = self._process is not None and self._process.returncode is None
        pid = self._process.pid if self._process and running else None
        return SoftCardFacts(pid=pid, restarts=self._restarts, reason=self._down)

    async def start(self) -> SoftCardReady:
        """Start the process and wait until it serves.

        Raises:
            CardUnavailableError: it ended, or said nothing in time; with its own words.
        """
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # Ctrl-C in the terminal is for the gateway: it flushes and closes the card first.
            start_new_session=True,
        )
        self._tail.clear()
        assert process.stdout is not None
        assert process.stderr is not None
        self._pump = asyncio.create_task(self._pump_log(process.stderr), name="soft card log")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
            ready, late = _parse_ready(line), False
        except (TimeoutError, ValueError) as error:
            ready, late = None, isinstance(error, TimeoutError)
        if ready is None:
            await self._end()
            words = f"it did not answer within {START_TIMEOUT_S:.0f} s" if late else self._last_words()
            raise CardUnavailableError(
                f"the soft card {self._path} did not start: {words}",
                advice=LOOK_ADVICE
                if self._read_only
                else f"{LOOK_ADVICE} Another file can be named: soft:PATH?size=16GiB",
            )
        self._started_ns = self._clock()
        self._down = ""
        # From now on it is that card or none: a file that is gone is not made again.
        self._size_bytes = None
        return ready

    async def run(self, on_moved: Callable[[str, int], None]) -> None:
        """Start the process again whenever it ends; `on_moved(host, port)` tells where it serves now. Never returns."""
        delay_s = BACKOFF_MIN_S
        while True:
            assert self._process is not None
            code = await self._process.wait()
            if self._clock() - self._started_ns > STEADY_S * 1e9:
                delay_s = BACKOFF_MIN_S
            log.error(
                "the soft card process ended (%s); starting it again in %.1f s", _exit_words(code), delay_s
            )
            self._down = f"the soft card process ended ({_exit_words(code)})"
            await self._end()
            ready = None
            while ready is None:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, BACKOFF_MAX_S)
                try:
                    ready = await self.start()
                except CardUnavailableError as error:
                    self._down = str(error)
                    self._told.failure(self._down)
            self._restarts += 1
            log.warning("the soft card serves again on %s:%d", ready.host, ready.port)
            on_moved(ready.host, ready.port)

    def kill(self) -> None:
        """End the process on the spot. Safe from any thread."""
        process = self._process
        if process is not None and process.returncode is None:
            _signal(process.pid, signal.SIGKILL)

    async def aclose(self) -> None:
        """End the process: in order first, by force after a moment. Idempotent."""
        await self._end()

    def _command(self) -> list[str]:
        how = [] if self._size_bytes is None else ["--size", str(self._size_bytes)]
        if self._read_only:
            how = ["--read-only"]
        command = [sys.executable, "-P", "-m", "xkv_nvmeof.softcard", "--file", str(self._path), *how]
        return [*command, "--listen", "127.0.0.1:0", "--exit-with-stdin"]

    def _last_words(self) -> str:
        if self._tail:
            return " / ".join(line.removeprefix("Error: ") for line in self._tail)
        code = self._process.returncode if self._process else None
        return "it does not end" if code is None else _exit_words(code)

    async def _end(self) -> None:
        process, pump = self._process, self._pump
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is not None:
                break
            _signal(process.pid, number)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                continue
        if pump is not None:
            self._pump = None
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await pump
            except TimeoutError:
                log.warning("the soft card's log did not end")

    async def _pump_log(self, stream: asyncio.StreamReader) -> None:
        """Move what the process says to our log, line by line, bounded in length and rate."""
        rest = b""
        while chunk := await stream.read(8192):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[: LOG_LINE_CHARS_MAX * 4]
            for line in lines:
                text = line.decode(errors="replace")[:LOG_LINE_CHARS_MAX].strip()
                if text:
                    self._tail.append(text)
                    self._log.line(text)


class _LogLimit:
    """At most so many lines a period; the rest is counted and told once."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._period_start_ns = clock()
        self._lines = 0

    def line(self, text: str) -> None:
        """Log `text` with the level that it names itself, or count it."""
        now_ns = self._clock()
        if now_ns - self._period_start_ns >= LOG_PERIOD_NS:
            if self._lines > LOG_LINES_PER_PERIOD:
                log.warning("soft card: %d more lines", self._lines - LOG_LINES_PER_PERIOD)
            self._period_start_ns, self._lines = now_ns, 0
        self._lines += 1
        if self._lines <= LOG_LINES_PER_PERIOD:
            found = _LOG_LINE.fullmatch(text)
            level = logging.INFO if found is None else logging.getLevelNamesMapping()[found["level"]]
            log.log(level, "soft card: %s", text if found is None else found["message"])


def _parse_ready(line: bytes) -> SoftCardReady | None:
    """Return what the ready line says; None at end of file. Raises ValueError for anything else."""
    if not line:
        return None
    if len(line) > READY_LINE_BYTES_MAX:
        raise ValueError("the ready line is too long")
    fields = json.loads(line)
    try:
        return SoftCardReady(
            host=str(fields["host"]),
            port=int(fields["port"]),
            nqn=str(fields["nqn"]),
            nsid=int(fields["nsid"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the ready line has no {error}") from None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, number)


def _exit_words(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
