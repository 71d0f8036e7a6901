"""Is a probe of another tenant's key slower or faster than a miss? 10,000 of each, in random order, against the real daemon.

One tenant has stored the keys; another one looks them up, and looks up keys that nobody has. Content is compared (it must be
the same), and so are the times: the difference of the medians, and the rank sum test (Mann-Whitney), whose `z` is beyond 3.3 by
chance once in a thousand runs. As a control that a difference would be seen at all, the owner's own hits are timed too.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from bench.gateway import running_gateway
from bench.harness import BenchError, at_least, at_most, work_folder
from xkv_rpc.client import Client

if TYPE_CHECKING:
    from collections.abc import Sequence

PROBES: Final = 10_000
KEYS: Final = 500
KEYS_A_PROBE: Final = 8
OBJECT_BYTES: Final = 512
Z_MAX: Final = 3.3
NAMESPACE: Final = "bench"
OWNER: Final = b"\x01" * 16
PROBER: Final = b"\x02" * 16
SEED: Final = 4


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    parser = argparse.ArgumentParser(prog="bench.isolation", description=__doc__)
    parser.add_argument("--probes", type=int, default=PROBES)
    arguments = parser.parse_args(list(argv))
    rng = random.Random(SEED)
    held = [rng.randbytes(32) for _ in range(KEYS)]
    nobodys = [rng.randbytes(32) for _ in range(KEYS)]
    with (
        work_folder() as folder,
        running_gateway(folder, f"soft:{folder}/card.img?size=1GiB") as gateway,
        Client(f"tcp://127.0.0.1:{gateway.port}") as client,
    ):
        client.store(NAMESPACE, OWNER, held, [bytes(OBJECT_BYTES)] * KEYS)
        # The prober holds something too: the namespace, its scope and its home exist for both kinds.
        client.store(NAMESPACE, PROBER, [b"own"], [b"own"])
        kinds = {"others": (PROBER, held), "nobodys": (PROBER, nobodys), "own": (OWNER, held)}
        times = _probe(client, kinds, arguments.probes, rng)
    z = rank_sum_z(times["others"], times["nobodys"])
    control_z = rank_sum_z(times["own"], times["nobodys"])
    medians = {name: statistics.median(values) / 1e3 for name, values in times.items()}
    return {
        "probes": arguments.probes,
        "median_us": medians,
        "z_others_against_nobodys": z,
        "z_own_against_nobodys": control_z,
        "bars": [
            at_most("isolation: |z| of others' keys against misses", abs(z), Z_MAX),
            at_least("isolation: |z| of own hits against misses (control)", abs(control_z), Z_MAX),
        ],
    }


def _probe(
    client: Client, kinds: dict[str, tuple[bytes, list[bytes]]], probes: int, rng: random.Random
) -> dict[str, list[int]]:
    order = [kind for kind in kinds for _ in range(probes)]
    rng.shuffle(order)
    times: dict[str, list[int]] = {kind: [] for kind in kinds}
    for kind in order:
        scope, keys = kinds[kind]
        wanted = rng.sample(keys, KEYS_A_PROBE)
        began = time.perf_counter_ns()
        reply = client.lookup(NAMESPACE, scope, wanted, lease_ms=0)
        times[kind].append(time.perf_counter_ns() - began)
        if (reply.hits, len(reply.sizes)) != ((KEYS_A_PROBE,) * 2 if kind == "own" else (0, 0)):
            raise BenchError(f"a lookup of {kind} keys was answered with {reply.hits} hits")
    return times


def rank_sum_z(left: Sequence[int], right: Sequence[int]) -> float:
    """The normal deviate of the rank sum of `left` among both (ties share their ranks): 0 where both are alike."""
    merged = sorted([(value, 0) for value in left] + [(value, 1) for value in right])
    rank_sum, position = 0.0, 0
    ties = 0.0
    while position < len(merged):
        end = position
        while end < len(merged) and merged[end][0] == merged[position][0]:
            end += 1
        rank = (position + 1 + end) / 2
        rank_sum += rank * sum(side == 0 for _, side in merged[position:end])
        ties += (end - position) ** 3 - (end - position)
        position = end
    n, m = len(left), len(right)
    expected = n * (n + m + 1) / 2
    variance = n * m / 12 * (n + m + 1 - ties / ((n + m) * (n + m - 1)))
    return (rank_sum - expected) / math.sqrt(variance)
