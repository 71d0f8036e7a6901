"""A controller that no gateway started: a soft card's process over a file, for gateways that share a card."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING

from tests.e2e.gateway import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path


@contextlib.asynccontextmanager
async def target(
    file: Path, size: str | None = "256MiB", *, reservations: bool = True, arguments: Sequence[str] = ()
) -> AsyncIterator[str]:
    """Serve the file at an address that the kernel chooses: yields its URL."""
    async with obedient_target(file, size, reservations=reservations, arguments=arguments) as (url, _):
        yield url


@contextlib.asynccontextmanager
async def obedient_target(
    file: Path, size: str | None = "256MiB", *, reservations: bool = True, arguments: Sequence[str] = ()
) -> AsyncIterator[tuple[str, Callable[[str], None]]]:
    """Yield also what tells it: `resize SIZE`, `detach`, `attach`."""
    sized = () if size is None else ("--size", size)
    features = () if reservations else ("--no-reservations",)
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "xkv_nvmeof.softcard",
            "--file",
            str(file),
            *sized,
            *features,
            *arguments,
            "--exit-with-stdin",
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    async with asyncio.timeout(HANG_S):
        ready = json.loads(await process.stdout.readline())
    try:
        stdin = process.stdin
        assert stdin is not None
        url = f"nvme+tcp://{ready['host']}:{ready['port']}/{ready['nqn']}?nsid={ready['nsid']}"
        yield url, lambda line: stdin.write(f"{line}\n".encode())
    finally:
        process.terminate()
        async with asyncio.timeout(HANG_S):
            await process.communicate()
