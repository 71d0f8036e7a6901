"""What IsolatedLRU costs over LRU on the whole way: stores into cards that evict all the time, from a client to a soft card.

Three real daemons with the same tenants and quotas, and one client: two with LRU, which tell how much two equal ones differ, and
one with IsolatedLRU. They take turns, in reverse order every second round. Wall time is judged; beside it stands the time of the processor
of daemon and soft card, which says more on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from bench.gateway import running_gateway
from bench.harness import (
    MIB,
    BenchError,
    ProcessClock,
    alternate,
    at_most,
    core_split,
    medians,
    on_cores,
    work_folder,
)
from bench.tenants_admin import Admin
from xkv_rpc.client import Client

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TENANTS: Final = 100
CARD_BYTES: Final = 512 * MIB
INTERVAL_S: Final = 0.1
"""Of the cycles: as many in the life of an object as on a card ten times as large by default, so the background keeps up."""
OBJECT_BYTES: Final = 64 << 10
BATCH: Final = 16
STORES_A_ROUND: Final = 100
ROUNDS: Final = 15
COST_PERCENT_MAX: Final = 5
SIDES: Final = {"LRU": "LRU", "LRU again": "LRU", "IsolatedLRU": "IsolatedLRU"}
"""Name and policy."""


class _Side:
    """A daemon, and the client that stores to it."""

    def __init__(self, stack: ExitStack, folder: Path, policy: str, tenants: Sequence[int]) -> None:
        folder.mkdir()
        gateway = stack.enter_context(
            running_gateway(
                folder,
                f"soft:{folder}/card.img?size={CARD_BYTES // MIB}MiB",
                cores=core_split()[0],
                options=("--eviction-policy", policy, "--eviction-interval", str(INTERVAL_S)),
            )
        )
        self._client = stack.enter_context(Client(f"tcp://127.0.0.1:{gateway.port}"))
        self._payloads = [os.urandom(OBJECT_BYTES)] * BATCH
        self._numbers = itertools.count()
        self._tenants = tenants
        self._clock = ProcessClock(gateway.process.process.pid)
        admin = Admin(gateway.admin_port)
        for tenant in range(TENANTS):
            # Nobody is over quota: it is the card that is full.
            admin.set_tenant(tenant, _scope(tenant), CARD_BYTES)
        self.stores(CARD_BYTES // (BATCH * OBJECT_BYTES) * 5 // 4)
        self.cpu_ms: list[float] = []

    def stores(self, count: int) -> None:
        for _ in range(count):
            number = next(self._numbers)
            keys = [(number * BATCH + place).to_bytes(32, "little") for place in range(BATCH)]
            scope = _scope(self._tenants[number % len(self._tenants)])
            statuses = self._client.store("bench", scope, keys, self._payloads, timeout_ms=30_000)
            if set(statuses) != {"stored"}:
                raise BenchError(f"a store was answered {statuses}")

    def timed(self) -> float:
        """Wall milliseconds of a store."""
        cpu_s, began_s = self._clock.seconds(), time.perf_counter()
        self.stores(STORES_A_ROUND)
        took_s = time.perf_counter() - began_s
        self.cpu_ms.append((self._clock.seconds() - cpu_s) / STORES_A_ROUND * 1e3)
        return took_s / STORES_A_ROUND * 1e3


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.tenants_stack", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args(list(argv)).rounds
    dice = random.Random(4)
    tenants = [dice.randrange(TENANTS) for _ in range(4096)]
    with work_folder() as folder, ExitStack() as stack, on_cores(core_split()[1]):
        sides = {
            name: _Side(stack, folder / str(number), policy, tenants)
            for number, (name, policy) in enumerate(SIDES.items())
        }
        wall_ms = medians(alternate(rounds, {name: side.timed for name, side in sides.items()}))
    cpu_ms = {name: statistics.median(side.cpu_ms) for name, side in sides.items()}
    more = {
        name: {"wall_percent": _more(wall_ms, name), "cpu_percent": _more(cpu_ms, name)}
        for name in ("LRU again", "IsolatedLRU")
    }
    return {
        "tenants": TENANTS,
        "batch": BATCH,
        "object_bytes": OBJECT_BYTES,
        "store_ms": wall_ms,
        "cpu_ms": cpu_ms,
        "more_than_LRU": more,
        "bars": [
            at_most("a store under IsolatedLRU over LRU, whole way (% more)", more["IsolatedLRU"]["wall_percent"], COST_PERCENT_MAX),
            at_most("... in time of the processor (% more)", more["IsolatedLRU"]["cpu_percent"], COST_PERCENT_MAX),
        ],
    }  # fmt: skip


def _more(figures: dict[str, float], name: str) -> float:
    return (figures[name] / figures["LRU"] - 1) * 100


def _scope(tenant: int) -> bytes:
    return b"tenant %d" % tenant


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
