"""A gateway for the time of a run: the real daemon, as its own process, on ports of its own."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from bench.harness import accepts, child, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from bench.harness import Child

READY_SECONDS: Final = 40.0


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that serves."""

    port: int
    admin_port: int
    process: Child


@contextmanager
def running_gateway(
    folder: Path,
    card_url: str,
    *,
    cores: set[int] | None = None,
    ready_seconds: float = READY_SECONDS,
    options: Sequence[str] = (),
    module: str = "xkv_gateway",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[RunningGateway]:
    """Start `xkv-gateway serve` on the card `card_url`, with these `options`, and end it afterwards."""
    port, admin_port = free_port(), free_port()
    state_dir = folder / "state"
    command = [
        sys.executable,
        "-m",
        module,
        "serve",
        "--card",
        card_url,
        "--state-dir",
        str(state_dir),
    ]
    command += ["--port", str(port), "--admin-port", str(admin_port), *options]
    # Settings of the person who runs the bench would make its figures somebody else's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("XKV_")}
    with child("gateway", command, folder, cores=cores, env={**env, **variables}) as process:
        wait_until(
            lambda: accepts(port) and b"In another terminal" in process.log.read_bytes(),
            "serving",
            process,
            ready_seconds,
        )
        yield RunningGateway(port, admin_port, process)
