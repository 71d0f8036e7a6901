"""A soft card for the time of a run."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.harness import child, core_split, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class SoftCard:
    """Where a running soft card is reached."""

    host: str
    port: int
    nqn: str
    nsid: int


@contextmanager
def running_softcard(folder: Path, name: str, size_bytes: int) -> Iterator[SoftCard]:
    """Start a soft card over a file in `folder`, on the core that targets poll on."""
    command = [sys.executable, "-m", "xkv_nvmeof.softcard", "--file", str(folder / f"{name}.img")]
    command += ["--size", str(size_bytes), "--listen", "127.0.0.1:0"]
    with child(f"softcard-{name}", command, folder, cores=core_split()[0]) as process:
        wait_until(lambda: b"\n" in process.log.read_bytes(), "ready", process)
        told = json.loads(process.log.read_text(encoding="utf-8").splitlines()[0])
        yield SoftCard(told["host"], told["port"], told["nqn"], told["nsid"])
