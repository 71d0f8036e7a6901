"""What the standard streams may be: closed, unwritable, or read by nobody any more."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.gateway import COMMAND, HANG_S, environment, serve_arguments
from tests.e2e.notify import Manager
from xkv_gateway.errors import ExitCode


@pytest.mark.parametrize(
    "command", [("xkv_gateway", "config", "sample"), ("xkv_frontend", "serve", "--help")]
)
def test_output_that_nobody_reads_any_more_is_no_finding(command: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", *command],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=HANG_S,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (ExitCode.OK, b"")


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
async def test_it_serves_whatever_its_standard_streams_are(home: Path, streams: str) -> None:
    manager = Manager(home / "notify")
    process = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        f'exec "$@" {streams}',
        "sh",
        *COMMAND,
        *serve_arguments(home / "state", "64MiB"),
        env=environment(home, NOTIFY_SOCKET=str(manager.path)),
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        await manager.until("READY=1")
        # No file or socket of its own has the number of a standard stream: whatever is printed would go there.
        used = {str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)}
        assert used <= {"/dev/null", "/dev/full"}
        process.terminate()
        async with asyncio.timeout(HANG_S):
            assert await process.wait() == ExitCode.OK
    finally:
        manager.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
