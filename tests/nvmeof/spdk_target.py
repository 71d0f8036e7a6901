"""A real SPDK target in a process of its own. XKV_SPDK_TGT names the binary."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spdk.rpc.client import JSONRPCClient

if TYPE_CHECKING:
    from collections.abc import Iterator

NQN = "nqn.2026-01.org.example:spdk"
UUID = "11111111-2222-4333-8444-555555555555"
START_S = 30


def free_port() -> int:
    """Return a port that was free a moment ago: SPDK cannot be asked for an ephemeral one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Spdk:
    """A running target without anything in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._client = JSONRPCClient(str(folder / "rpc.sock"), timeout=20)

    def call(self, method: str, **parameters: Any) -> Any:
        return self._client.call(method, parameters)

    def close(self) -> None:
        self._client.close()

    def transport(self, max_io_bytes: int = 131_072, **how: Any) -> None:
        sizes = {"max_io_size": max_io_bytes, "in_capsule_data_size": 4096, "max_queue_depth": 128}
        self.call("nvmf_create_transport", trtype="TCP", **{**sizes, **how})

    def subsystem(self, bdev: str, **how: Any) -> None:
        self.call("nvmf_create_subsystem", nqn=NQN, serial_number="S1", model_number="M1", **how)
        self.add_namespace(bdev)

    def add_namespace(self, bdev: str) -> None:
        self.call("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": bdev, "nsid": 1, "uuid": UUID})

    def listen(self) -> int:
        """Listen at one more port, which is returned."""
        port = free_port()
        self.call("nvmf_subsystem_add_listener", nqn=NQN, listen_address=self.address(port))
        return port

    @staticmethod
    def address(port: int) -> dict[str, str]:
        return {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}

    def allow(self, host: str, key: str, own_key: str) -> None:
        """Let a host in that knows `key`; `own_key` is what the target proves itself with."""
        for name, text in (("host", key), ("card", own_key)):
            file = self.folder / f"{name}.key"
            file.touch(0o600)
            file.write_text(text)
            self.call("keyring_file_add_key", name=name, path=str(file))
        self.call("nvmf_subsystem_add_host", nqn=NQN, host=host, dhchap_key="host", dhchap_ctrlr_key="card")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it, in order if it does so: with hosts connected it may wait for them for ever."""
    process.terminate()
    try:
        process.wait(START_S)
    except subprocess.TimeoutExpired:
        process.kill()


def wait_until_it_listens(process: subprocess.Popen[bytes], path: Path) -> None:
    """Return once connections are taken: the socket's file is there before that."""
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "the target ended"
        with socket.socket(socket.AF_UNIX) as probe:
            if not probe.connect_ex(str(path)):
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def spdk_process() -> Iterator[Spdk]:
    """Run a target with nothing in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "rpc.sock"
        command = (os.environ["XKV_SPDK_TGT"], "-m", "0x1", "--no-huge", "-s", "512", "-u", "-r", str(path))
        with subprocess.Popen(
            [*command, "--disable-cpumask-locks"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
        ) as process:
            try:
                wait_until_it_listens(process, path)
                target = Spdk(folder)
                try:
                    yield target
                finally:
                    target.close()
            finally:
                stop(process)


@contextmanager
def spdk_target(
    max_io_bytes: int = 131_072, keys: tuple[str, str, str] | None = None
) -> Iterator[tuple[int, str]]:
    """Run a target with a namespace in memory; yield its port and NQN.

    `keys`: the one host that may connect, its key and the target's.
    """
    with spdk_process() as spdk:
        spdk.transport(max_io_bytes)
        spdk.call("bdev_malloc_create", name="m0", num_blocks=8192, block_size=4096, uuid=UUID)
        spdk.subsystem("m0", allow_any_host=keys is None)
        if keys is not None:
            spdk.allow(*keys)
        yield spdk.listen(), NQN
