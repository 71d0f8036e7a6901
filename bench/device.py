"""(2) Data: 1 MiB and 128 KiB reads and writes at depth 8 through `TcpInitiator`.

Against an SPDK target (`XKV_SPDK_TGT`) beside SPDK's own perf tool (`XKV_SPDK_PERF`), in turns on the same namespace;
and against the soft card, for the record. Eight tasks walk through the whole namespace, as the perf tool does. The first
round warms both up and is not counted. The perf tool differs by a third and more from one run to the next (each is a new
process with other memory), so there are many short rounds, and the least and the most of each side is told.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import uvloop

from bench.harness import MIB, alternate, at_least, core_split, medians, on_cores, work_folder
from bench.softcard import running_softcard
from bench.spdk_target import NQN, PERF_ENV, RAW_BYTES, RAW_NSID, TARGET_ENV, perf_mib_s, spdk_target
from xkv_nvmeof.initiator import TcpInitiator
from xkv_nvmeof.initiator_options import InitiatorOptions, TargetAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.spdk_target import SpdkTarget

DEPTH: Final = 8
SIZES: Final = {"128 KiB": 128 * 1024, "1 MiB": MIB}
SECONDS: Final = 1
ROUNDS: Final = 9
SOFT_CARD_BYTES: Final = 128 * MIB
RATIO_MIN: Final = {"128 KiB read": 1.0, "128 KiB write": 0.9, "1 MiB read": 1.0, "1 MiB write": 1.0}


HOST_NQN: Final = "nqn.2026-01.org.example:bench-host"
HOST_ID: Final = bytes(range(1, 17))


class DeviceUnderTest:
    """A connected device, a loop of its own, and buffers for `DEPTH` transfers."""

    def __init__(self, address: TargetAddress) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        options = InitiatorOptions(host_nqn=HOST_NQN, host_id=HOST_ID)
        connecting = TcpInitiator.connect(address, options, clock=time.monotonic_ns, entropy=os.urandom)
        self._device = self._runner.run(connecting)
        self.moved_bytes = 0
        self.cpu_us: list[float] = []
        """What a transfer took of the processor, user and system, in each measurement."""
        self._memory = memoryview(bytearray(os.urandom(MIB) * DEPTH))

    def mib_s(self, pattern: str, io_bytes: int, seconds: float = SECONDS) -> float:
        """Throughput of `read` or `write` transfers of `io_bytes` at depth `DEPTH`."""
        return self._runner.run(self._measure(pattern, io_bytes, seconds))

    async def _measure(self, pattern: str, io_bytes: int, seconds: float) -> float:
        transfer = self._device.read_into if pattern == "read" else self._device.write_from
        limit_bytes = min(RAW_BYTES, self._device.geometry.size_bytes) // io_bytes * io_bytes
        next_bytes = 0
        done = 0
        cpu_begin = time.process_time()
        begin = time.perf_counter()
        deadline = begin + seconds

        async def walk(number: int) -> None:
            nonlocal next_bytes, done
            buffers = [self._memory[number * MIB : number * MIB + io_bytes]]
            while time.perf_counter() < deadline:
                offset_bytes = next_bytes
                next_bytes = (next_bytes + io_bytes) % limit_bytes
                await transfer(offset_bytes, buffers)
                done += 1

        async with asyncio.TaskGroup() as group:
            for number in range(DEPTH):
                group.create_task(walk(number))
        seconds = time.perf_counter() - begin
        self.cpu_us.append((time.process_time() - cpu_begin) / done * 1e6)
        self.moved_bytes += done * io_bytes
        return done * io_bytes / MIB / seconds

    def close(self) -> None:
        self._runner.run(self._device.aclose())
        self._runner.close()


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    parser = argparse.ArgumentParser(prog="bench.device", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args(list(argv))
    results: dict[str, Any] = {"depth": DEPTH, "bars": []}
    with on_cores(core_split()[1]):
        if os.environ.get(TARGET_ENV):
            _against_spdk(arguments.rounds, results)
        else:
            results["spdk"] = f"left out: {TARGET_ENV} is not set"
        _against_softcard(results)
    return results


def _against_spdk(rounds: int, results: dict[str, Any]) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        target = stack.enter_context(spdk_target(folder))
        device = DeviceUnderTest(TargetAddress("127.0.0.1", target.port, NQN, RAW_NSID))
        stack.callback(device.close)
        figures: dict[str, Any] = {}
        for size_name, io_bytes in SIZES.items():
            for pattern in ("read", "write"):
                contestants = _contestants(device, target, pattern, io_bytes)
                device.cpu_us.clear()
                every = alternate(rounds + 1, contestants)
                throughput = {name: values[1:] for name, values in every.items()}
                middle = medians(throughput)
                figures[f"{size_name} {pattern}"] = {
                    "mib_s": middle,
                    "least_and_most": {name: [min(each), max(each)] for name, each in throughput.items()},
                    "initiator_cpu_us": statistics.median(device.cpu_us[1:]),
                    "rounds": throughput,
                }
                if "perf" in middle:
                    name = f"{size_name} {pattern}: TcpInitiator / SPDK perf"
                    ratio_min = RATIO_MIN[f"{size_name} {pattern}"]
                    results["bars"].append(at_least(name, middle["initiator"] / middle["perf"], ratio_min))
    results["spdk"] = figures


def _contestants(
    device: DeviceUnderTest, target: SpdkTarget, pattern: str, io_bytes: int
) -> dict[str, Callable[[], float]]:
    contestants: dict[str, Callable[[], float]] = {"initiator": lambda: device.mib_s(pattern, io_bytes)}
    if os.environ.get(PERF_ENV):
        contestants["perf"] = lambda: perf_mib_s(target, pattern, io_bytes, DEPTH, SECONDS)
    return contestants


def _against_softcard(results: dict[str, Any]) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        card = stack.enter_context(running_softcard(folder, "card", SOFT_CARD_BYTES))
        device = DeviceUnderTest(TargetAddress(card.host, card.port, card.nqn, card.nsid))
        stack.callback(device.close)
        results["soft card"] = {
            f"{size_name} {pattern}": {"mib_s": {"initiator": device.mib_s(pattern, io_bytes)}}
            for size_name, io_bytes in SIZES.items()
            for pattern in ("write", "read")
        }


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(main(sys.argv[1:]), indent=2))
