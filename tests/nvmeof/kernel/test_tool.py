"""nvme-cli that hangs, floods, dies or is not there holds nobody up, and is told apart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_nvmeof.kernel.tool import OUTPUT_BYTES_MAX, NvmeTool, ToolMissing, ToolShort, ToolStuck

if TYPE_CHECKING:
    from collections.abc import Callable

HANG_S = 60.0


@pytest.fixture
def tool(tmp_path: Path) -> Callable[[str], NvmeTool]:
    """A tool that does what a Python script says."""

    def make(script: str) -> NvmeTool:
        program = tmp_path / "nvme"
        program.write_text(f"#!{sys.executable} -IS\nimport os, signal, subprocess, sys, time\n{script}\n")
        program.chmod(0o755)
        return NvmeTool(str(program))

    return make


async def test_what_it_says_and_how_it_ends_is_told(tool: Callable[[str], NvmeTool]) -> None:
    ended = await tool("print(sys.argv[1:]); sys.stderr.write('al\\x1bready\\nconnected'); sys.exit(1)").run(
        ("connect", "-o", "json"), HANG_S
    )
    assert (ended.code, ended.out) == (1, b"['connect', '-o', 'json']\n")
    assert ended.said == "al?ready connected (exit code 1)"


async def test_one_that_is_killed_is_told_from_one_that_fails(tool: Callable[[str], NvmeTool]) -> None:
    ended = await tool("os.kill(os.getpid(), signal.SIGTERM)").run(("list",), HANG_S)
    assert ended.code == -signal.SIGTERM
    assert "signal 15" in ended.said


async def test_one_that_is_not_there_or_cannot_be_run_is_missing(tmp_path: Path) -> None:
    for program in (tmp_path / "none", tmp_path):
        with pytest.raises(ToolMissing):
            await NvmeTool(str(program)).run(("list",), HANG_S)


async def test_a_host_that_is_out_of_files_says_so_and_has_room_again_later(
    tool: Callable[[str], NvmeTool],
) -> None:
    there = tool("print(1)")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, limits[1]))
        with pytest.raises(ToolShort, match="Too many open files"):
            await there.run(("list",), HANG_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(taken)
    assert (await there.run(("list",), HANG_S)).code == 0


@pytest.mark.parametrize("who", ["itself", "a child of its own"])
async def test_a_flood_of_output_takes_a_bounded_part_of_memory(
    tool: Callable[[str], NvmeTool], who: str
) -> None:
    flood = "while True: os.write(1, bytes(1 << 20))"
    if who != "itself":
        flood = f"sys.exit(subprocess.run([sys.executable, '-IS', '-c', 'import os\\n{flood}']).returncode)"
    ended = await tool(flood).run(("list",), HANG_S)
    assert ended.code != 0
    assert len(ended.out) == OUTPUT_BYTES_MAX
    assert "not permitted" in ended.err


async def test_at_its_deadline_it_is_killed_with_all_that_it_started(
    tool: Callable[[str], NvmeTool], tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    program = tmp_path / "nvme"
    # A shell: it has begun long before the deadline, however slow the machine is.
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > {pids}\nwait\n")
    program.chmod(0o755)
    beats = [0]
    beating = asyncio.create_task(beat(beats))
    async with asyncio.timeout(HANG_S):
        with pytest.raises(ToolStuck, match="did not end within"):
            await NvmeTool(str(program)).run(("connect",), 2)
    beating.cancel()
    assert beats[0] > 20, "the loop went on all the time"
    for pid in map(int, pids.read_text().split()):
        await gone(pid)
    # Nothing is left of it: the next run is not refused.
    assert (await tool("pass").run(("list",), HANG_S)).code == 0


async def test_while_one_is_stuck_the_next_is_refused_at_once(tool: Callable[[str], NvmeTool]) -> None:
    stuck = tool("signal.pause()")
    stuck._stuck = asyncio.create_task(asyncio.sleep(HANG_S, 0))
    with pytest.raises(ToolStuck, match="before"):
        await stuck.run(("list",), HANG_S)
    stuck._stuck.cancel()


async def test_two_runs_do_not_overlap(tool: Callable[[str], NvmeTool], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = f"""
os.mkdir({str(mark)!r}); time.sleep(0.05); os.rmdir({str(mark)!r})"""
    one = tool(script)
    ended = await asyncio.gather(*(one.run(("list",), HANG_S) for _ in range(4)))
    assert [each.code for each in ended] == [0] * 4


async def test_a_caller_that_gives_up_leaves_no_process_behind(
    tool: Callable[[str], NvmeTool], tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    one = tool(
        f"open({str(pid)!r} + '.new', 'w').write(str(os.getpid())); os.rename({str(pid)!r} + '.new', {str(pid)!r}); time.sleep(120)"
    )
    run = asyncio.create_task(one.run(("connect",), HANG_S))
    async with asyncio.timeout(HANG_S):
        while not pid.exists():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert run.cancelled()
    await gone(int(pid.read_text()))


async def beat(beats: list[int]) -> None:
    while True:
        await asyncio.sleep(0.005)
        beats[0] += 1


async def gone(pid: int) -> None:
    """Return once the process is not there, not even as a zombie of ours."""
    async with asyncio.timeout(HANG_S):
        while True:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if state[0] not in "ZX" or state[1] == str(os.getpid()):
                    await asyncio.sleep(0.01)
                    continue
            return
