"""A real SPDK target in a process of its own, with one namespace in memory. XKV_SPDK_TGT names the binary."""

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


def free_port() -> int:
    """Return a port that was free a moment ago: SPDK cannot be asked for an ephemeral one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _configure(path: Path, port: int, max_io_bytes: int, keys: tuple[str, str, str] | None) -> None:
    client = JSONRPCClient(str(path), timeout=20)

    def call(method: str, **parameters: Any) -> None:
        client.call(method, parameters)

    call(
        "nvmf_create_transport",
        trtype="TCP",
        max_io_size=max_io_bytes,
        in_capsule_data_size=4096,
        max_queue_depth=128,
    )
    call("bdev_malloc_create", name="m0", num_blocks=8192, block_size=4096, uuid=UUID)
    call("nvmf_create_subsystem", nqn=NQN, serial_number="S1", model_number="M1", allow_any_host=keys is None)
    call("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": "m0", "nsid": 1, "uuid": UUID})
    if keys is not None:
        host, *secrets = keys
        for name, text in zip(("host", "card"), secrets, strict=True):
            file = path.with_name(f"{name}.key")
            file.touch(0o600)
            file.write_text(text)
            call("keyring_file_add_key", name=name, path=str(file))
        call("nvmf_subsystem_add_host", nqn=NQN, host=host, dhchap_key="host", dhchap_ctrlr_key="card")
    listen = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    call("nvmf_subsystem_add_listener", nqn=NQN, listen_address=listen)
    client.close()


@contextmanager
def spdk_target(
    max_io_bytes: int = 131_072, keys: tuple[str, str, str] | None = None
) -> Iterator[tuple[int, str]]:
    """Run a target; yield its port and the NQN. `keys`: the one host that may connect, its key and the target's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rpc.sock"
        command = (os.environ["XKV_SPDK_TGT"], "-m", "0x1", "--no-huge", "-s", "512", "-u", "-r", str(path))
        with subprocess.Popen(
            [*command, "--disable-cpumask-locks"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
        ) as process:
            try:
                deadline = time.monotonic() + 30
                while not path.exists():
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                port = free_port()
                _configure(path, port, max_io_bytes, keys)
                yield port, NQN
            finally:
                process.terminate()
