"""`replay --tenants` against a real gateway with quotas, beside a simulation that knows nothing but the documented rules."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.e2e.commands import Commands
from tests.e2e.gateway import run, serving
from xkv_gateway.errors import ExitCode
from xkv_gateway.replay.generate import PACKAGED
from xkv_gateway.replay.tenants import tenant_of, tenant_scopes
from xkv_rpc import scope_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

UNIT_BYTES = 64 << 10
BLOCK_BYTES = "4KiB"
"""So small that all stores of a prompt are one message; each takes one unit."""


@dataclass
class Tenant:
    """What one tenant holds under a hard quota: the least recently used goes first, the tail of a prompt before its head."""

    limit: int
    held: dict[int, None] = field(default_factory=dict)
    """Blocks, the next one to go first."""
    requests: int = 0
    asked: int = 0
    hits: int = 0
    stored: int = 0
    over_quota: int = 0

    def play(self, prompt: list[int]) -> None:
        hits = next((n for n, block in enumerate(prompt) if block not in self.held), len(prompt))
        self.requests += 1
        self.asked += len(prompt)
        self.hits += hits
        self._use(prompt[:hits])
        rest = list(dict.fromkeys(block for block in prompt[hits:] if block not in prompt[:hits]))
        # What is read, or held already, cannot go for the sake of the same prompt.
        kept = {*prompt[:hits], *(block for block in rest if block in self.held)}
        free = self.limit - len(self.held)
        others = [block for block in self.held if block not in kept]
        wanted = [block for block in rest if block not in self.held]
        admitted = wanted[: free + len(others)]
        self.over_quota += len(wanted) - len(admitted)
        for block in others[: max(0, len(admitted) - free)]:
            del self.held[block]
        # What fits at once comes first; the rest when the space of what went is free.
        self._use(admitted[:free])
        self._use(admitted[free:])
        self.stored += len(admitted)

    def _use(self, blocks: Iterable[int]) -> None:
        for block in reversed(list(blocks)):
            self.held.pop(block, None)
            self.held[block] = None


def prompts(limit: int) -> Iterator[list[int]]:
    for line in gzip.decompress(PACKAGED.read_bytes()).decode().splitlines()[:limit]:
        yield json.loads(line)["hash_ids"]


@pytest.mark.parametrize("quota_units", [70, 25])
async def test_each_tenants_hits_are_those_of_an_independent_simulation(home: Path, quota_units: int) -> None:
    count, limit = 3, 250
    simulated = [Tenant(quota_units) for _ in range(count)]
    for prompt in prompts(limit):
        # The rule as the help says it: by the second block.
        simulated[prompt[1] % count if len(prompt) > 1 else prompt[0] % count].play(prompt)
    async with serving(home / "s", XKV_EVICTION__POLICY="IsolatedLRU") as gateway:
        do = Commands(home, gateway)
        for number in range(count):
            do.json("quota", "set", "-", str(quota_units * UNIT_BYTES), stdin=b"replay-%d" % number)
        arguments = ("replay", "--tenants", str(count), "--limit", str(limit), "--block-bytes", BLOCK_BYTES)
        done = await run(home, *arguments, "--port", str(gateway.control_port), "--json")
        held = do.json("quota", "list")
    assert (done.code, done.err) == (ExitCode.OK, "")
    outcome = json.loads(done.out)
    assert outcome["mismatches"] == 0
    told = [
        Tenant(
            quota_units,
            {},
            part["requests"],
            part["blocks_asked"],
            part["hits"],
            part["stores"].get("stored", 0),
            part["stores"].get("over_quota", 0),
        )
        for part in outcome["tenants"]
    ]
    expected = [Tenant(t.limit, {}, t.requests, t.asked, t.hits, t.stored, t.over_quota) for t in simulated]
    assert told == expected
    assert sum(part.over_quota for part in told) == 0 or quota_units == 25
    assert [entry["charged_bytes"] for entry in held] == [len(t.held) * UNIT_BYTES for t in simulated]
    assert outcome["hits"] == sum(part.hits for part in told)


def test_the_rule_of_the_split_and_the_scopes_are_as_documented() -> None:
    assert tenant_of([0, 7, 8], 3) == 1
    assert tenant_of([5], 3) == 2
    assert tenant_of([0, 7, 8], 1) == 0
    assert tenant_scopes(2) == [scope_of("replay-0"), scope_of("replay-1")]


async def test_tenants_and_a_scope_exclude_each_other(home: Path) -> None:
    done = await run(home, "replay", "--tenants", "2", "--scope", "ab")
    assert done.code == ExitCode.CONFIG
    assert "--tenants and --scope" in done.err
