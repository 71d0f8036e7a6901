"""A real SPDK target's process, which knows nothing until it is told; and gateways that look after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.e2e.gateway import run
from xkv_gateway.config.model import show_value
from xkv_nvmeof.dhchap.crypto import Hash
from xkv_nvmeof.dhchap.secret import new_dhchap_secret
from xkv_rpc.addresses import SpdkAddress
from xkv_rpc.spdk import SpdkClient, SpdkError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

HANG_S: Final = 60.0
IP: Final = "127.0.5.1"
NQN: Final = "nqn.2026-01.org.example:kept"
HOST_NQN: Final = "nqn.2026-01.org.example:gateway"
HOST_ID: Final = "6f1a2f0e-6c53-4a0b-8d34-0d8f2a9c1b7e"


def free_port() -> int:
    """Return a port that was free a moment ago: SPDK cannot be asked for one."""
    with socket.socket() as probe:
        probe.bind((IP, 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """The target. It can be killed, stopped and started as often as one likes."""

    def __init__(self, rpc: str, home: Path) -> None:
        self.rpc = rpc
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
        self.client = SpdkClient(SpdkAddress(rpc), clock=time.monotonic_ns, timeout_ms=5_000)

    async def start(self, *arguments: str) -> float:
        """Start it; return when it took orders, by the monotonic clock."""
        command = [os.environ["XKV_SPDK_TGT"], "-m", "0x1", "--no-huge", "-s", "1024", "-u", "-r", self.rpc]
        self._process = subprocess.Popen(
            [*command, "--interrupt-mode", "--disable-cpumask-locks", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._home,  # orders over TCP leave a file of the address's name there
        )
        async with asyncio.timeout(HANG_S):
            while True:
                assert self._process.poll() is None, "the target ended"
                with contextlib.suppress(SpdkError):
                    await self.client.call("spdk_get_version", timeout_ms=1_000)
                    return time.monotonic()
                await asyncio.sleep(0.01)

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill -9, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.asynccontextmanager
async def process(home: Path, rpc: str | None = None, *arguments: str) -> AsyncIterator[Process]:
    """Run a target for the time of the block."""
    target = Process(rpc or str(home / "spdk.sock"), home)
    try:
        await target.start(*arguments)
        yield target
    finally:
        target.client.close()
        target.kill()


@dataclass
class Setup:
    """A configuration of a gateway with its target, written to a file."""

    home: Path
    target: dict[str, Any]
    nvme: dict[str, Any] = field(default_factory=dict)
    fabric: dict[str, Any] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    rpc: str = ""

    @property
    def url(self) -> str:
        return f"nvme+tcp://{IP}:{self.port}/{NQN}?nsid=1"

    @property
    def file(self) -> Path:
        """Write it, and return the path."""
        tables: dict[str, dict[str, Any]] = {
            "fabric": {"networks": ("127.0.5.0/24",), **self.fabric},
            "nvme": {"host_nqn": HOST_NQN, "host_id": HOST_ID, **self.nvme},
            "target": {
                "rpc": self.rpc or str(self.home / "spdk.sock"),
                "nqn": NQN,
                "listeners": (f"{IP}:{self.port}",),
            },
        }
        hosts = self.target.get("hosts", [{"nqn": HOST_NQN}])
        lines = []
        for name, value in self.target.items():
            if isinstance(value, dict):
                tables[f"target.{name}"] = value
            elif name != "hosts":
                tables["target"][name] = value
        for table, values in tables.items():
            lines += [
                f"[{table}]",
                *(f"{name} = {show_value(value, size=False)}" for name, value in values.items()),
            ]
        for host in hosts:
            lines += ["[[target.hosts]]", *(f"{name} = {json.dumps(value)}" for name, value in host.items())]
        path = self.home / "gateway.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    async def command(self, *arguments: str, code: int = 0) -> str:
        """Run a command that takes the configuration; return what it said."""
        finished = await run(self.home, *arguments, "--config", str(self.file))
        assert finished.code == code, finished
        return finished.out + finished.err

    async def make(self, *, format_store: bool = False) -> None:
        """Make the target, and format the card."""
        await self.command("target", "apply", *(["--format-store"] if format_store else []))
        await self.command("card", "format", self.url, "--state-dir", str(self.home / "state"))

    def key(self, name: str) -> str:
        """Return the path of a new key."""
        path = self.home / name
        path.write_text(new_dhchap_secret(Hash.SHA_256, os.urandom))
        path.chmod(0o600)
        return str(path)
