"""(3) The whole way: `load` and `store` of 1 MiB objects through a region, beside the bare device on the same target.

The gateway's card and the raw namespace of `TcpInitiator` are two namespaces of one target; both sides run in turns,
with eight transfers of 1 MiB in flight. On an SPDK target where `XKV_SPDK_TGT` is set; on two soft cards for the
record. Beside the throughput stands what it costs in time of the processor, of all processes but the target.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import uvloop

from bench.blank_card import format_blank_card
from bench.device import DeviceUnderTest
from bench.gateway import running_gateway
from bench.harness import (
    MIB,
    BenchError,
    CpuClock,
    alternate,
    at_least,
    core_split,
    medians,
    on_cores,
    work_folder,
)
from bench.softcard import running_softcard
from bench.spdk_target import CARD_NSID, NQN, RAW_NSID, TARGET_ENV, spdk_target
from xkv_nvmeof.initiator_options import TargetAddress
from xkv_rpc.client import AsyncClient, ClientOptions
from xkv_rpc.messages import LoadStatus, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

DEPTH: Final = 8
OBJECT_BYTES: Final = MIB
OBJECTS: Final = 256
"""Objects of a round: 256 MiB."""
OBJECTS_A_REQUEST: Final = 4
"""As an inference engine stores and loads them: the blocks of a prompt together. Eight objects are in flight all the same."""
SEVERAL: Final = f"{OBJECTS_A_REQUEST} objects a request"
ROUNDS: Final = 5
RATIO_MIN: Final = 0.8
TIMEOUT_MS: Final = 20_000
NAMESPACE: Final = "bench"
SOFT_BYTES: Final = 512 * MIB
GIB: Final = 1024 * MIB


class Mover(Protocol):
    """Something that moves bytes."""

    moved_bytes: int


class GatewayUnderTest:
    """A client of a running gateway with a region of `DEPTH` objects and a loop of its own."""

    def __init__(self, port: int) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._client, self._region = self._runner.run(self._open(port))
        self._region.view[:] = os.urandom(OBJECT_BYTES) * DEPTH
        self.moved_bytes = 0
        self._keys = [hashlib.blake2b(b"%d" % n, digest_size=32).digest() for n in range(OBJECTS)]

    async def _open(self, port: int) -> tuple[AsyncClient, Any]:
        client = AsyncClient(f"tcp://127.0.0.1:{port}", ClientOptions(timeout_ms=TIMEOUT_MS))
        return client, await client.attach_region(DEPTH * OBJECT_BYTES)

    def store_mib_s(self, objects: int = 1) -> float:
        """Throughput of storing all objects, so many a request; those of the round before are deleted first, untimed."""
        self._runner.run(self._client.delete(NAMESPACE, b"", self._keys))
        return self._runner.run(self._measure("store", objects))

    def load_mib_s(self, objects: int = 1) -> float:
        """Throughput of loading all objects, so many a request; they were stored by `store_mib_s`."""
        return self._runner.run(self._measure("load", objects))

    async def _measure(self, operation: str, objects: int) -> float:
        requests = iter([self._keys[at : at + objects] for at in range(0, OBJECTS, objects)])
        begin = time.perf_counter()

        async def walk(slot: int) -> None:
            for keys in requests:
                await self._one(operation, keys, slot)

        async with asyncio.TaskGroup() as group:
            for slot in range(0, DEPTH, objects):
                group.create_task(walk(slot))
        self.moved_bytes += OBJECTS * OBJECT_BYTES
        return OBJECTS * OBJECT_BYTES / MIB / (time.perf_counter() - begin)

    async def _one(self, operation: str, keys: list[bytes], slot: int) -> None:
        offsets = [(slot + number) * OBJECT_BYTES for number in range(len(keys))]
        sizes, token = [OBJECT_BYTES] * len(keys), self._region.token
        if operation == "store":
            stored = await self._client.store_from(NAMESPACE, b"", keys, sizes, token, offsets)
            done = all(status is StoreStatus.STORED for status in stored)
        else:
            loaded = (await self._client.load_into(NAMESPACE, b"", keys, token, offsets, sizes)).statuses
            done = all(status is LoadStatus.OK for status in loaded)
        if not done:
            raise BenchError(f"{operation} of 1 MiB was not answered with success")

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._region.close()
        self._runner.close()


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    parser = argparse.ArgumentParser(prog="bench.whole_way", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args(list(argv)).rounds
    results: dict[str, Any] = {"depth": DEPTH, "bars": []}
    with on_cores(core_split()[1]):
        if os.environ.get(TARGET_ENV):
            results["spdk"] = _on_spdk(rounds)
            for operation in ("load", "store"):
                middle = results["spdk"][operation]["mib_s"]
                name = f"1 MiB {operation}: gateway / TcpInitiator, SPDK target"
                results["bars"].append(at_least(name, middle["gateway"] / middle["initiator"], RATIO_MIN))
                results["bars"].append(
                    at_least(f"{name}, {SEVERAL}", middle[SEVERAL] / middle["initiator"], RATIO_MIN)
                )
        else:
            results["spdk"] = f"left out: {TARGET_ENV} is not set"
        results["soft card"] = _on_softcard(rounds)
    return results


def _on_spdk(rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        target = stack.enter_context(spdk_target(folder))
        raw, card = (TargetAddress("127.0.0.1", target.port, NQN, nsid) for nsid in (RAW_NSID, CARD_NSID))
        return _compare(stack, folder, card, raw, rounds)


def _on_softcard(rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        cards = [stack.enter_context(running_softcard(folder, name, SOFT_BYTES)) for name in ("raw", "card")]
        raw, card = (TargetAddress(soft.host, soft.port, soft.nqn, soft.nsid) for soft in cards)
        return _compare(stack, folder, card, raw, rounds)


def _compare(
    stack: ExitStack, folder: Path, card: TargetAddress, raw: TargetAddress, rounds: int
) -> dict[str, Any]:
    format_blank_card(card)
    url = f"nvme+tcp://{card.host}:{card.port}/{card.nqn}?nsid={card.nsid}"
    device = DeviceUnderTest(raw)
    stack.callback(device.close)
    gateway = stack.enter_context(running_gateway(folder, url))
    client = GatewayUnderTest(gateway.port)
    stack.callback(client.close)
    clock = CpuClock(os.getpid(), gateway.process.process.pid)
    # One round nobody counts: the first writes of a file or a region make its pages.
    for warm in (client.store_mib_s, client.load_mib_s):
        warm()
    costs: dict[str, dict[str, list[float]]] = {
        operation: {"gateway": [], SEVERAL: [], "initiator": []} for operation in ("store", "load")
    }

    def costed(costs_of: list[float], measure: Callable[[], float], under_test: Mover) -> float:
        begin_bytes, begin_cpu_s = under_test.moved_bytes, clock.seconds()
        mib_s = measure()
        moved_gib = (under_test.moved_bytes - begin_bytes) / GIB
        costs_of.append((clock.seconds() - begin_cpu_s) * 1e3 / moved_gib)
        return mib_s

    contestants: dict[str, dict[str, Callable[[], float]]] = {
        "store": {
            "gateway": client.store_mib_s,
            SEVERAL: partial(client.store_mib_s, OBJECTS_A_REQUEST),
            "initiator": lambda: device.mib_s("write", OBJECT_BYTES),
        },
        "load": {
            "gateway": client.load_mib_s,
            SEVERAL: partial(client.load_mib_s, OBJECTS_A_REQUEST),
            "initiator": lambda: device.mib_s("read", OBJECT_BYTES),
        },
    }
    movers: dict[str, Mover] = {"gateway": client, SEVERAL: client, "initiator": device}
    results: dict[str, Any] = {}
    for operation, pair in contestants.items():
        throughput = alternate(
            rounds,
            {
                name: partial(costed, costs[operation][name], measure, movers[name])
                for name, measure in pair.items()
            },
        )
        cpu = medians(costs[operation])
        results[operation] = {"mib_s": medians(throughput), "cpu_ms_gib": cpu, "rounds": throughput}
    return results


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(main(sys.argv[1:]), indent=2))
