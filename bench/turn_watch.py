"""The daemon with a stopwatch in its loop: `python -m bench.turn_watch serve ...` is `xkv-gateway serve ...` and notes its longest turns.

A turn is what the loop does between two calls of its own: whatever arrives meanwhile waits for its end. Each is measured in wall
time and in time of the processor of the loop's thread, so what the machine did meanwhile (`preemptions`: how often the thread had to leave
its core) and what the garbage collector did are told apart from work of the gateway's own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xkv_gateway.cli import main
from xkv_gateway.daemon import lag, run

if TYPE_CHECKING:
    from collections.abc import Callable

TURNS_TO: Final = "BENCH_TURNS_TO"
"""Variable that names the file that the longest turns go to, at the end."""
NOTED_MS: Final = 2.0
"""Turns of this time of the processor, or twice as much wall time, are noted."""
NOTED_MAX: Final = 100_000
_STEPS: Final = (
    ("xkv_gateway.core.engine", "Engine", "tick"),
    ("xkv_gateway.core.engine", "Engine", "persisted"),
    ("xkv_gateway.core.engine", "Engine", "begin_store"),
    ("xkv_gateway.core.engine", "Engine", "wipe"),
    ("xkv_gateway.core.image", "EngineImage", "rows"),
    ("xkv_gateway.core.image", "EngineImage", "lives"),
    ("xkv_gateway.core.image", "EngineImage", "names"),
    ("xkv_gateway.card.writer", "", "encode_batches"),
    ("xkv_gateway.card.writer", "", "encode_batch"),
)
"""Steps whose part in a turn is told."""


class TurnWatch:
    """Asks for a turn after each turn: the loop never sleeps, and every turn is seen."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.turns = 0
        self.noted: list[dict[str, Any]] = []
        self._steps_ns: dict[str, int] = {}
        self._gc_ns = self._gc_began_ns = 0
        gc.callbacks.append(self._collected)
        for module, owner, name in _STEPS:
            self._time(module, owner, name)
        self._began_ns, self._cpu_ns, self._usage = self._now()
        loop.call_soon(self._turn)

    def _now(self) -> tuple[int, int, resource.struct_rusage]:
        return time.monotonic_ns(), time.thread_time_ns(), resource.getrusage(resource.RUSAGE_THREAD)

    def _turn(self) -> None:
        ended_ns, cpu_ns, usage = self._now()
        wall_ms, cpu_ms = (ended_ns - self._began_ns) / 1e6, (cpu_ns - self._cpu_ns) / 1e6
        if (cpu_ms >= NOTED_MS or wall_ms >= 2 * NOTED_MS) and len(self.noted) < NOTED_MAX:
            self.noted.append(
                {
                    "at_s": self._began_ns / 1e9,
                    "wall_ms": wall_ms,
                    "cpu_ms": cpu_ms,
                    "gc_ms": self._gc_ns / 1e6,
                    "preemptions": usage.ru_nivcsw - self._usage.ru_nivcsw,
                    "system_ms": (usage.ru_stime - self._usage.ru_stime) * 1e3,
                    "page_faults": usage.ru_minflt - self._usage.ru_minflt,
                    "steps_ms": {name: ns / 1e6 for name, ns in self._steps_ns.items()},
                }
            )
        self.turns += 1
        self._gc_ns = 0
        self._steps_ns.clear()
        self._began_ns, self._cpu_ns, self._usage = ended_ns, cpu_ns, usage
        self._loop.call_soon(self._turn)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            self._gc_began_ns = time.thread_time_ns()
        else:
            self._gc_ns += time.thread_time_ns() - self._gc_began_ns

    def _time(self, module: str, owner: str, name: str) -> None:
        place: Any = sys.modules[module]
        place = getattr(place, owner) if owner else place
        step, steps_ns = getattr(place, name), self._steps_ns

        def timed(*args: Any, **named: Any) -> Any:
            begin_ns = time.thread_time_ns()
            try:
                return step(*args, **named)
            finally:
                steps_ns[name] = steps_ns.get(name, 0) + time.thread_time_ns() - begin_ns

        setattr(place, name, timed)


async def _watch(clock: Callable[[], int], tell: Callable[[int], None]) -> None:
    watch = TurnWatch(asyncio.get_running_loop())
    try:
        await lag.watch_lag(clock, tell)
    finally:
        Path(os.environ[TURNS_TO]).write_text(
            json.dumps({"turns": watch.turns, "noted": watch.noted}), encoding="utf-8"
        )


if __name__ == "__main__":
    run.watch_lag = _watch  # type: ignore[attr-defined] # what the daemon's loop is watched with
    sys.exit(main())
