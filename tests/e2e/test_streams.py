"""What the standard streams may be: closed, unwritable, or read by nobody any more."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import COMMAND, HANG_S, environment, serve_arguments
from tests.e2e.notify import Manager
from xkv_gateway.errors import ExitCode


def finished(
    package: str, *arguments: str, stdout: Any = None, stderr: Any = subprocess.PIPE, **extra: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", package, *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "", **extra},
        stdout=stdout,
        stderr=stderr,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.parametrize(
    "command", [("xkv_gateway", "config", "sample"), ("xkv_frontend", "serve", "--help")]
)
def test_output_that_nobody_reads_any_more_is_no_finding(command: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = finished(*command, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (ExitCode.OK, b"")


@pytest.mark.parametrize("command", [("xkv_gateway", "config", "sample"), ("xkv_frontend", "--help")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_said_and_has_a_code_of_its_own(
    command: tuple[str, ...], unbuffered: str
) -> None:
    with Path("/dev/full").open("wb") as full:
        done = finished(*command, stdout=full, PYTHONUNBUFFERED=unbuffered)
        assert done.returncode == ExitCode.OUTPUT
        assert b"the output cannot be written: No space left on device\n" in done.stderr
        assert b"Traceback" not in done.stderr
        # Nor can this be said where nothing can be written.
        lost = finished(*command, stdout=full, stderr=full, PYTHONUNBUFFERED=unbuffered)
        assert lost.returncode == ExitCode.OUTPUT


def test_an_error_that_nobody_can_be_told_keeps_its_code() -> None:
    with Path("/dev/full").open("wb") as full:
        for package in ("xkv_gateway", "xkv_frontend"):
            assert finished(package, "serve", "--port", "none", stderr=full).returncode == ExitCode.CONFIG


@pytest.mark.parametrize("package", ["xkv_gateway", "xkv_frontend"])
def test_too_few_open_files_are_an_error_that_names_the_limit(tmp_path: Path, package: str) -> None:
    needed = ("--upstream", "http://127.0.0.1:1", "--deployment", "d") if package == "xkv_frontend" else ()
    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -n 24 && exec "$@"', "sh", sys.executable, "-m", package, "serve", *needed],
        env=environment(tmp_path),
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == ExitCode.CONFIG
    assert b"RLIMIT_NOFILE) is 24" in done.stderr
    assert b"LimitNOFILE=" in done.stderr


WRITES_UMLAUTS = """
import click, sys
from importlib import import_module
package = import_module(sys.argv[1] + ".cli")
package.cli.add_command(click.Command("x", callback=lambda: click.echo("a\\u20acb")))
package.cli.get_command = lambda context, name: package.cli.commands[name]
sys.argv = [sys.argv[1], "x"]
sys.exit(package.main())
"""


@pytest.mark.parametrize("package", ["xkv_gateway", "xkv_frontend"])
def test_what_the_encoding_has_no_character_for_is_escaped(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITES_UMLAUTS, package],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.OK, b"a\\u20acb\n", b"")


KILLED_WHILE_STARTING = """
import os, signal, sys
from importlib import import_module
main = import_module(sys.argv[1] + ".cli").main

class Importing:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[0] + ".cli.serve":
            os.kill(os.getpid(), getattr(signal, number))

number = sys.argv[2]
sys.argv = [sys.argv[1], "serve"]
sys.meta_path.insert(0, Importing())
sys.exit(main())
"""


@pytest.mark.parametrize("package", ["xkv_gateway", "xkv_frontend"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_while_it_is_still_being_loaded_ends_it_in_order(package: str, number: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_STARTING, package, number],
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
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
