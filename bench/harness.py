"""What all parts share: child processes that are always ended, alternating rounds, bars, facts of the machine.

Wall times of one run are never compared with those of another: two things that are compared run in turns within one
run, and their medians are compared.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MIB: Final = 1024 * 1024
STOP_SECONDS: Final = 8.0
LOG_TAIL_LINES: Final = 15


class BenchError(Exception):
    """A part cannot run here, or what it measures failed. The text says why."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure with its goal; `at_most` tells which side is good."""

    name: str
    value: float
    bar: float
    at_most: bool

    @property
    def met(self) -> bool:
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def at_most(name: str, value: float, bar: float) -> dict[str, Any]:
    return Bar(name, value, bar, at_most=True).document()


def at_least(name: str, value: float, bar: float) -> dict[str, Any]:
    return Bar(name, value, bar, at_most=False).document()


def machine_facts() -> dict[str, Any]:
    """Cores that this process may use, memory, and versions."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_before": os.getloadavg()[0],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@functools.cache
def core_split() -> tuple[set[int], set[int]]:
    """One core for a target that polls, and the cores for everybody else (the same one where there is one only).

    Settled by the first call: within `on_cores` this process sees fewer cores than there are.
    """
    cores = sorted(os.sched_getaffinity(0))
    return {cores[0]}, set(cores[1:]) or {cores[0]}


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Run this process (and the children it starts) on `cores` for a while."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_port() -> int:
    """A port of loopback that was free just now, for programs that cannot say which one they took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], what: str, process: Child, seconds: float = 30.0) -> None:
    """Poll until `condition` holds; a process that ended, or the deadline, is an error that shows its log."""
    deadline = time.monotonic() + seconds
    while not condition():
        if not process.running:
            raise BenchError(f"{process.name} ended before {what}:\n{process.log_tail()}")
        if time.monotonic() > deadline:
            raise BenchError(f"{process.name}: not {what} within {seconds:.0f} s:\n{process.log_tail()}")
        time.sleep(0.05)


def accepts(port: int) -> bool:
    """Whether somebody listens on this port of loopback."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Child:
    """A child process whose output goes to a log."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def stop(self) -> None:
        """Ask, wait, then end it."""
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class CpuClock:
    """Time of the processor (user and system) that some processes have used so far. Says more than wall time on a busy
    machine."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def seconds(self) -> float:
        ticks = 0
        for pid in self._pids:
            fields = (
                Path(f"/proc/{pid}/stat")
                .read_text(encoding="ascii", errors="replace")
                .rpartition(")")[2]
                .split()
            )
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


class ProcessClock:
    """As `CpuClock`, to the nanosecond, for a process and those that it has started by now."""

    def __init__(self, pid: int) -> None:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        # What clock_getcpuclockid(3) answers on Linux.
        self._clocks = [(~each << 3) | 2 for each in (pid, *map(int, children))]

    def seconds(self) -> float:
        return sum(time.clock_gettime_ns(clock) for clock in self._clocks) / 1e9


@contextmanager
def child(
    name: str,
    command: Sequence[str],
    folder: Path,
    *,
    cores: set[int] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Run `command` until the block ends, on `cores` where given."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env) if env is not None else None,
        )
    running = Child(name, process, log)
    try:
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)
        yield running
    finally:
        running.stop()


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder that is gone afterwards. Its path is short: Unix sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="xkvb-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def alternate(rounds: int, contestants: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run all contestants in turns, `rounds` times, in reverse order every second time."""
    results: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        names = list(contestants)
        for name in names if number % 2 == 0 else reversed(names):
            results[name].append(contestants[name]())
    return results


def medians(results: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in results.items() if values}
