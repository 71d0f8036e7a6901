"""A real gateway as a subprocess: ephemeral ports, a small soft card, a temporary state directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from xkv_rpc.async_client import AsyncClient
from xkv_rpc.client import ClientOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

HANG_S: Final = 180.0
"""Nothing takes that long; it only keeps a hang from hanging the tests."""
CARD: Final = "256MiB"
PATIENT: Final = ClientOptions(timeout_ms=30_000, connect_timeout_ms=30_000, probe_timeout_ms=30_000)
"""A client that waits as long as a busy machine takes."""
COMMAND: Final = (sys.executable, "-m", "xkv_gateway")


def environment(home: Path, **extra: str) -> dict[str, str]:
    """Return the environment of a person with nothing set."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("XKV_", "XDG_", "STATE_"))
    }
    return {**kept, "HOME": str(home), **extra}


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str


async def reaped(process: asyncio.subprocess.Process) -> None:
    """End a process that is still there: whatever a test came to, it leaves none behind."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def run(home: Path, *arguments: str, **extra: str) -> Finished:
    """Run the command to its end."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        env=environment(home, **extra),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(HANG_S):
            out, err = await process.communicate()
    finally:
        await reaped(process)
    assert process.returncode is not None
    return Finished(process.returncode, out.decode(), err.decode())


@dataclass
class Gateway:
    """A gateway that serves."""

    process: asyncio.subprocess.Process
    said: list[str]
    log: list[str] = field(default_factory=list)
    pump: asyncio.Task[None] | None = None

    def said_at(self, name: str) -> str:
        """Return what the start message says behind `name`."""
        found = re.search(rf"^  {name} +(\S.*)$", "\n".join(self.said), re.MULTILINE)
        assert found, self.said
        return found[1]

    @property
    def control_port(self) -> int:
        return int(self.said_at("control").rpartition(":")[2])

    @property
    def admin(self) -> str:
        return self.said_at("admin").removeprefix("http://")

    @property
    def log_text(self) -> str:
        return "".join(self.log)

    def client(self) -> AsyncClient:
        """Return a client of the control port that is patient."""
        return AsyncClient(f"tcp://127.0.0.1:{self.control_port}", PATIENT)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
            return await client.get(f"http://{self.admin}{path}")

    async def status(self) -> dict[str, Any]:
        return dict(json.loads((await self.get("/v1/status")).content))

    async def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the status until it is as wanted."""
        async with asyncio.timeout(HANG_S):
            while not wanted(status := await self.status()):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        return status

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal; return the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(HANG_S):
            code = await self.process.wait()
            if self.pump is not None:
                await self.pump
        return code

    async def logged(self, words: str) -> None:
        """Return once the log says so."""
        async with asyncio.timeout(HANG_S):
            while words not in self.log_text:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)

    async def _pump(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())


@contextlib.asynccontextmanager
async def serving(
    state_dir: Path, *arguments: str, card: str | None = CARD, **extra: str
) -> AsyncIterator[Gateway]:
    """Start a gateway, wait until it says that it serves; end it at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *serve_arguments(state_dir, card),
        *arguments,
        env=environment(state_dir.parent, **extra),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    gateway = Gateway(process, [])
    gateway.pump = asyncio.create_task(gateway._pump())
    try:
        assert process.stdout is not None
        async with asyncio.timeout(HANG_S):
            while not gateway.said or "Ctrl-C" not in gateway.said[-1]:
                line = await process.stdout.readline()
                if not line:
                    await gateway.pump
                    pytest.fail(f"the gateway did not start:\n{gateway.log_text}")
                gateway.said.append(line.decode().rstrip("\n"))
        yield gateway
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await gateway.pump


def serve_arguments(state_dir: Path, card: str | None) -> Sequence[str]:
    """Return the arguments of `serve` with ports that the kernel chooses."""
    url = () if card is None else ("--card", f"soft:{state_dir}.img?size={card}")
    return ("serve", "--port", "0", "--admin-port", "0", "--state-dir", str(state_dir), *url)


def take_away(card: Path) -> Path:
    """Put the file of a soft card away and leave nothing that could be served, or made, in its place; returns where it is.

    `away.replace(card)` brings it back at one stroke, with no moment between at which a new file could be made.
    """
    away = card.with_name(f"{card.name}.away")
    card.rename(away)
    card.symlink_to(card.name)
    return away


def alive(pid: int) -> bool:
    """Whether the process exists (a zombie does not count)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


async def gone(pid: int) -> None:
    """Return once the process does not exist any more."""
    async with asyncio.timeout(HANG_S):
        while alive(pid):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
