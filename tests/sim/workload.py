"""What one seed draws before anything runs: which operations and faults there are, and how large everything is (swarm).

A run with everything enabled rarely gets far into anything: so each seed first drops a part of what it could do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tests.sim.faults import Faults
from tests.sim.gateway import Settings
from tests.sim.values import Identity
from xkv_gateway.core.tenancy import EvictionRules
from xkv_gateway.core.types import EngineLimits

if TYPE_CHECKING:
    import random

NS_PER_MS: Final = 1_000_000

WEIGHTS: Final = {
    "store": 30,
    "load": 20,
    "lookup": 8,
    "lease": 10,
    "leased_load": 14,
    "renew": 3,
    "release": 4,
    "delete": 7,
    "replace": 5,
    "wipe": 1,
    "break": 1,
    "cancel": 1,
    "probe": 6,
    "restart": 0.3,
}
ALWAYS: Final = {"store", "load"}
FAULTS: Final = {
    "slow_probability": 0.2,
    "break_probability": 0.01,
    "fail_probability": 0.02,
    "transient_flip_probability": 0.02,
    "persistent_flip_probability": 0.003,
    "misdirect_probability": 0.01,
    "digest_probability": 0.01,
}
OUTAGE_SEEDS: Final = 0.35
"""Share of the seeds in which the target loses its power now and then, while the gateway lives ..."""
OUTAGE_PROBABILITY: Final = 0.05
"""... that is, when it is asked to flush."""


DIRECT_SEEDS: Final = 0.35
"""Share of the seeds in which clients write to the card themselves as well, some of them too late."""
GRACE_SLACK_NS: Final = 1000 * NS_PER_MS
"""Longer than the slowest command takes."""


@dataclass(frozen=True, slots=True)
class Swarm:
    """One seed's choice."""

    settings: Settings
    block_bytes: int
    units: int
    weights: dict[str, float]
    namespaces: list[str]
    scopes: list[bytes]
    keys: int
    clients: int
    depth: int
    batch_max: int
    region_share: float
    think_ns_max: int

    def operation(self, rng: random.Random) -> str:
        """Draw what to do next."""
        return rng.choices(list(self.weights), list(self.weights.values()))[0]

    def home(self, rng: random.Random) -> tuple[str, bytes]:
        """Draw a namespace and a scope."""
        return rng.choice(self.namespaces), rng.choice(self.scopes)

    def identities(self, rng: random.Random, home: tuple[str, bytes]) -> list[Identity]:
        """Draw different keys of one home; low numbers are popular."""
        count = rng.randint(1, min(self.batch_max, self.keys))
        numbers = {int(self.keys * rng.random() ** 2) for _ in range(count)}
        chosen = sorted(numbers)
        rng.shuffle(chosen)
        return [Identity(*home, b"key %d" % number) for number in chosen]

    def size_bytes(self, rng: random.Random) -> int:
        """Draw the size of an object."""
        au_bytes, largest = self.settings.limits.au_bytes, self.settings.limits.object_bytes_max
        return min(
            largest + (rng.random() < 0.01),
            rng.choice(
                (
                    rng.randrange(largest + 1),
                    au_bytes * rng.randint(1, 4),
                    au_bytes,
                    rng.randrange(au_bytes * 2),
                    rng.choice((0, 1, 511, 512, 513, au_bytes - 1, au_bytes + 1)),
                )
            ),
        )


def _faults(rng: random.Random, *, crowded: bool) -> Faults:
    enabled = {name: p * rng.random() * 2 for name, p in FAULTS.items() if rng.random() < 0.3}
    if rng.random() < 0.25:
        enabled = {}
    if crowded:
        enabled["slow_probability"] = 0.2
    return Faults(
        latency_ns_max=rng.choice((50_000, 400_000, 5_000_000)),
        slow_ns_max=rng.choice((20, 200)) * NS_PER_MS,
        settle_ns=rng.choice((50, 1000, 5000)) * NS_PER_MS,
        offline_ns_max=rng.choice((5, 500, 5000)) * NS_PER_MS,
        **enabled,
    )


def draw(rng: random.Random) -> Swarm:
    """The swarm of a seed."""
    au_bytes = rng.choice((4096, 4096, 8192))
    # A third of the seeds crowd a small card, where space that is free too early is reused at once.
    crowded = rng.random() < 0.35
    units = 16 if crowded else rng.choice((16, 24, 40, 64, 128))
    low = rng.choice((0.5, 0.8, 0.9))
    limits = EngineLimits(
        capacity_au=units,
        au_bytes=au_bytes,
        max_objects=4 * units if crowded else rng.choice((8, units, 4 * units)),
        object_bytes_max=au_bytes * rng.randint(2, 5 if crowded else max(3, units // 3)),
        lease_ttl_max_ns=rng.choice((20, 300, 5000)) * NS_PER_MS,
        leases_per_scope_max=rng.choice((2, 8, 64)),
        leased_bytes_per_scope_max=au_bytes * rng.choice((units // 4, units)),
        eviction=EvictionRules(
            trigger_watermark=rng.choice((low, 0.95, 1.0)),
            eviction_ratio=1 - low,
            interval_ns=(1 if low < 0.9 else 1000) * NS_PER_MS,
        ),
        corrupt_hold_ns=rng.choice((100, 600_000)) * NS_PER_MS,
    )
    kept = {name: weight for name, weight in WEIGHTS.items() if name in ALWAYS or rng.random() < 0.65}
    if crowded:
        kept["replace"] = kept["delete"] = 15
    swarm = Swarm(
        settings=Settings(
            limits,
            _faults(rng, crowded=crowded),
            journal_delay_ns_max=rng.choice((0, 200_000, 5_000_000)),
            store_wait_ns=rng.choice((1, 50, 2000)) * NS_PER_MS,
            inline_loads_bytes_max=rng.choice((limits.object_bytes_max, 64 << 20)),
        ),
        block_bytes=rng.choice((512, 4096)),
        units=units,
        weights=kept,
        namespaces=["", "chat", "code"][: rng.randint(1, 3)],
        scopes=[b"", b"alice", b"bob"][: rng.randint(1, 3)],
        keys=rng.choice((6, 20)) if crowded else rng.choice((2, 6, 20, 60)),
        clients=5 if crowded else rng.randint(1, 5),
        depth=rng.choice((1, 2, 6)),
        batch_max=2 if crowded else rng.choice((1, 3, 12)),
        region_share=rng.choice((0.0, 0.5)),
        think_ns_max=rng.choice((300_000, 5_000_000)) if crowded else rng.choice((0, 300_000, 20_000_000)),
    )
    # Drawn last, so that what else a seed does is as it was without.
    if rng.random() < OUTAGE_SEEDS:
        faults = replace(swarm.settings.faults, outage_probability=OUTAGE_PROBABILITY)
        swarm = replace(swarm, settings=replace(swarm.settings, faults=faults))
    if rng.random() < DIRECT_SEEDS:
        settings = swarm.settings
        # A write that has failed may land until it is settled: a client's last one as well.
        grace_ns = 2 * settings.faults.settle_ns + GRACE_SLACK_NS
        settings = replace(settings, limits=replace(limits, direct_grace_ns=grace_ns))
        swarm = replace(swarm, settings=settings, weights={**swarm.weights, "direct": 12})
    return swarm
