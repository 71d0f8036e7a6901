"""An SPDK target on loopback for the time of a run, and SPDK's own perf tool against it.

`XKV_SPDK_TGT` names the `nvmf_tgt` binary, `XKV_SPDK_PERF` the `spdk_nvme_perf` binary. The target polls on one core
of its own where there are two.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from spdk.rpc.client import JSONRPCClient, JSONRPCException

from bench.harness import MIB, BenchError, child, core_split, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bench.harness import Child

TARGET_ENV: Final = "XKV_SPDK_TGT"
PERF_ENV: Final = "XKV_SPDK_PERF"
NQN: Final = "nqn.2026-01.org.example:bench"
RAW_NSID: Final = 1
"""Namespace of the device measurements: overwritten at will."""
CARD_NSID: Final = 2
"""Namespace of the gateway's card."""
RAW_BYTES: Final = 256 * MIB
CARD_BYTES: Final = 512 * MIB
MEMORY_MIB: Final = 1536
BLOCK_BYTES: Final = 4096
MAX_IO_BYTES: Final = MIB
RPC_SECONDS: Final = 30.0

_TOTAL: Final = re.compile(r"^Total\s*:\s*(?P<iops>[\d.]+)\s+(?P<mib_s>[\d.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SpdkTarget:
    """A running target."""

    port: int
    process: Child


@contextmanager
def spdk_target(folder: Path) -> Iterator[SpdkTarget]:
    """Start a target with two malloc namespaces and end it afterwards.

    Raises:
        BenchError: `XKV_SPDK_TGT` is not set, or the target does not come up.
    """
    binary = os.environ.get(TARGET_ENV)
    if not binary:
        raise BenchError(f"{TARGET_ENV} does not name an nvmf_tgt binary")
    rpc_path = folder / "spdk.sock"
    polling, _ = core_split()
    mask = hex(1 << min(polling))
    command = [binary, "-m", mask, "--no-huge", "-s", str(MEMORY_MIB), "-u", "-r", str(rpc_path)]
    # Another SPDK process on the same core is the business of whoever runs the machine.
    command.append("--disable-cpumask-locks")
    with child("nvmf_tgt", command, folder) as process:
        wait_until(lambda: _listens(rpc_path), "its socket", process)
        port = free_port()
        client = JSONRPCClient(str(rpc_path), timeout=RPC_SECONDS)
        try:
            _configure(client, port)
        except JSONRPCException as error:
            raise BenchError(f"the SPDK target refused its configuration: {error.message}") from None
        finally:
            client.close()
        yield SpdkTarget(port, process)


def _listens(rpc_path: Path) -> bool:
    """Whether somebody takes connections there: the path is there a moment earlier."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(rpc_path)) == 0


def _configure(client: Any, port: int) -> None:
    client.call("framework_wait_init", {})
    client.call("nvmf_create_transport", {"trtype": "TCP", "max_io_size": MAX_IO_BYTES})
    client.call(
        "nvmf_create_subsystem",
        {"nqn": NQN, "serial_number": "BENCH", "model_number": "B", "allow_any_host": True},
    )
    for nsid, size_bytes in ((RAW_NSID, RAW_BYTES), (CARD_NSID, CARD_BYTES)):
        name = f"bench{nsid}"
        uuid = f"00000000-0000-4000-8000-00000000000{nsid}"
        blocks = size_bytes // BLOCK_BYTES
        client.call(
            "bdev_malloc_create",
            {"name": name, "num_blocks": blocks, "block_size": BLOCK_BYTES, "uuid": uuid},
        )
        client.call(
            "nvmf_subsystem_add_ns",
            {"nqn": NQN, "namespace": {"bdev_name": name, "nsid": nsid, "uuid": uuid}},
        )
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(port)}
    client.call("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": address})


def perf_mib_s(target: SpdkTarget, pattern: str, io_bytes: int, depth: int, seconds: int) -> float:
    """Run SPDK's perf tool on the raw namespace, on the cores that the target leaves free; MiB/s."""
    binary = os.environ.get(PERF_ENV)
    if not binary:
        raise BenchError(f"{PERF_ENV} does not name a spdk_nvme_perf binary")
    _, others = core_split()
    where = f"trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{target.port} subnqn:{NQN} ns:{RAW_NSID}"
    command = [binary, "-q", str(depth), "-o", str(io_bytes), "-w", pattern, "-t", str(seconds)]
    command += ["-c", hex(1 << min(others)), "--no-huge", "-s", "512", "-r", where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 30, check=False)
    found = _TOTAL.search(done.stdout)
    if done.returncode or found is None:
        raise BenchError(f"spdk_nvme_perf failed ({done.returncode}):\n{(done.stdout + done.stderr)[-1500:]}")
    return float(found["mib_s"])
