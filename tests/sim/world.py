"""One seed: a card, a gateway, clients, faults; audits after every step, and the account at the end.

in every step   engine.audit() (R5), the sum of the usage, the breaches that the oracle found
at the end      faults cease; every request is answered; leases and quarantines run out; nothing is reserved, doomed,
                quarantined, leased, pinned or waiting; every object is loaded once more; an object of the largest size can be
                stored; when all is wiped, all units are free and no name is left
"""

from __future__ import annotations

import asyncio
import collections
import logging
import random
from dataclasses import dataclass
from typing import Final

from tests.sim import recovery
from tests.sim.client import Client
from tests.sim.faults import Faults
from tests.sim.gateway import RESERVED_BYTES, SECRET, Gateway, LogTrap, Parts
from tests.sim.loop import SimLoop, SimulationError
from tests.sim.medium import Image, Medium
from tests.sim.oracle import Oracle
from tests.sim.values import Identity, payload_of
from tests.sim.workload import Swarm, draw
from xkv_gateway.core.digest import Digester
from xkv_nvmeof.blockdev import DeviceState

HISTORY_LINES: Final = 40
ANSWER_S_MAX: Final = 3600.0
QUIET_S: Final = 700.0
"""Longer than any lease, quarantine and hold."""


class Violation(AssertionError):  # noqa: N818 - a finding, not a failure of the simulation
    """An invariant does not hold. The message has the seed and the last of the history."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did."""

    seed: int
    steps: int
    virtual_ns: int
    payloads_checked: int
    crashes_checked: int
    commands: int
    late_writes: int
    evicted: int
    trace: str


class World:
    """The run of one seed."""

    def __init__(self, seed: int, steps: int, parts: Parts | None = None) -> None:
        self._seed = seed
        self._steps = steps
        self._parts = parts or Parts()
        self._rng = random.Random(f"{seed}/world")
        self.swarm: Swarm = draw(random.Random(f"{seed}/swarm"))
        self._loop = SimLoop(random.Random(f"{seed}/loop"), keep_trace=True)
        swarm = self.swarm
        size_bytes = RESERVED_BYTES + swarm.units * swarm.settings.limits.au_bytes
        self._medium = Medium(size_bytes, swarm.block_bytes)
        digester = Digester(SECRET)
        self.oracle = Oracle(lambda i: _digest(digester, i))
        self._history: collections.deque[str] = collections.deque(maxlen=HISTORY_LINES)
        self._done = 0
        self._crashes = 0
        self._commands = 0
        self._late = 0
        self._evicted = 0
        self._up: asyncio.Event
        self._restarting = False
        self._quiet_s = QUIET_S
        self.gateway: Gateway

    def run(self) -> Report:
        """Play the seed. Raises Violation."""
        trap = LogTrap()
        log = logging.getLogger("xkv_gateway")
        log.addHandler(trap)
        propagate, log.propagate = log.propagate, False
        try:
            self._loop.run(self._play())
        except (AssertionError, SimulationError, Exception) as error:
            tail = "\n  ".join(self._history)
            logged = "\n".join(trap.lines[-2:])
            raise Violation(
                f"seed {self._seed}, step {self._done}: {type(error).__name__}: {error}\n"
                f"  python -m tests.sim --seed {self._seed} --steps {self._steps}\n  {tail}\n{logged}"
            ) from error
        finally:
            log.removeHandler(trap)
            log.propagate = propagate
            self._loop.close()
        return Report(
            self._seed,
            self._done,
            self._loop.clock(),
            self.oracle.checked,
            self._crashes,
            self._commands,
            self._late,
            self._evicted,
            self._loop.trace(),
        )

    # --- the run ----------------------------------------------------------------------------------------------

    async def _play(self) -> None:
        self._up = asyncio.Event()
        await self._start_gateway()
        await asyncio.gather(*(self._client(peer) for peer in range(self.swarm.clients)))
        await self._settle()
        await self._account()
        self._collect()
        await self.gateway.kill()

    async def _client(self, peer: int) -> None:
        rng = random.Random(f"{self._seed}/client {peer}")
        client = Client(peer, self.swarm, rng, self.oracle, self._note)
        open_tasks: set[asyncio.Task[None]] = set()
        while self._done < self._steps:
            self._done += 1
            await self._up.wait()
            operation = self.swarm.operation(rng)
            if operation in {"break", "cancel", "probe", "wipe", "restart"}:
                await self._disturb(operation, rng)
            else:
                task = asyncio.create_task(client.do(operation, self.gateway))
                open_tasks.add(task)
                task.add_done_callback(open_tasks.discard)
                if len(open_tasks) >= self.swarm.depth or rng.random() < 0.2:
                    await task
            self._check()
            if self.swarm.think_ns_max:
                await asyncio.sleep(rng.randrange(self.swarm.think_ns_max) / 1e9)
        async with asyncio.timeout(ANSWER_S_MAX):
            for task in sorted(open_tasks, key=lambda each: each.get_name()):
                await task

    async def _disturb(self, operation: str, rng: random.Random) -> None:
        self._note(operation)
        match operation:
            case "break":
                self.gateway.device.break_connection(
                    1 + rng.randrange(self.swarm.settings.faults.offline_ns_max)
                )
            case "cancel":
                self.gateway.cancel_one()
            case "probe":
                self._probe(rng)
            case "wipe":
                namespace, scope = self.swarm.home(rng)
                await self._wipe(namespace, scope if rng.random() < 0.7 else None)
            case "restart":
                await self._restart(rng)

    def _probe(self, rng: random.Random) -> Image:
        """What if the power failed now?"""
        self._crashes += 1
        return recovery.power_failure_now(self.gateway, self.oracle, rng)

    async def _wipe(self, namespace: str, scope: bytes | None) -> None:
        gateway = self.gateway
        if not gateway.online:
            return
        gone = self.oracle.wiped(namespace, scope)
        outcome = gateway.engine.wipe(namespace, scope, gateway.clock())
        gateway.store.changed()
        gateway.store.when_durable(
            outcome.lsn, lambda: None if gateway.gone else self.oracle.removal_answered(gone)
        )

    async def _restart(self, rng: random.Random) -> None:
        """The power fails, or the process dies; then the gateway opens the card again, cold."""
        if self._restarting:
            return
        self._restarting = True
        self._up.clear()
        old = self.gateway
        if rng.random() < 0.5:
            image = self._probe(rng)
            old.device.lose_power()
            await old.kill()
            self._medium.lose_power(image)
        else:
            old.device.die()
            await old.kill()
            # What the dead process sent may be executed until then, so nobody may write before.
            await asyncio.sleep(self.swarm.settings.faults.settle_ns / 1e9)
        self._check()
        self._collect()
        self.oracle.restarted_cold()
        await self._start_gateway()
        self._restarting = False

    async def _start_gateway(self) -> None:
        self.gateway = Gateway(
            self._loop, self._medium, self._rng, self.swarm.settings, self._parts, self.oracle.blame
        )
        self.oracle.gateway = self.gateway
        self._up.set()

    # --- checks -----------------------------------------------------------------------------------------------

    def _raise_breaches(self) -> None:
        if self.oracle.breaches:
            raise Violation("; ".join(self.oracle.breaches[:3]))

    def _check(self) -> None:
        gateway = self.gateway
        self._raise_breaches()
        if self._loop.failures:
            raise self._loop.failures[0]
        if gateway.gone:
            return
        gateway.engine.audit()
        usage = gateway.engine.usage()
        total = usage.free_au + usage.reserved_au + usage.live_au + usage.doomed_au + usage.quarantined_au
        assert total == gateway.limits.capacity_au, f"{usage} is not the capacity (R5)"
        assert len(gateway.device._in_flight) <= 256, "more transfers in flight than the card store allows"

    async def _settle(self) -> None:
        """Faults cease, everything is answered, all time runs out."""
        gateway = self.gateway
        gateway.device.faults = Faults(settle_ns=gateway.device.faults.settle_ns)
        async with asyncio.timeout(ANSWER_S_MAX):
            while gateway._open or gateway.device.state is not DeviceState.ONLINE:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)
        await asyncio.sleep(self._quiet_s)
        self._check()
        self._require_quiet()

    def _require_quiet(self) -> None:
        gateway = self.gateway
        usage = gateway.engine.usage()
        for name in ("reserved_au", "doomed_au", "quarantined_au", "leases", "leased_au"):
            assert getattr(usage, name) == 0, f"{name} is {getattr(usage, name)} long after all has ended"
        assert not gateway.engine._state.slots.pins.any(), "a pin is left"
        assert not gateway.engine.tickets.by_id, "a ticket is left"
        assert not gateway.engine._removal.recorded, "a reservation is left that nobody holds"
        assert not gateway.engine._state.recency.parked, "something is parked for ever"
        service, store = gateway.service, gateway.store
        assert not service._tasks, "a task is left"
        assert not service._orders, "an order is left"
        assert service._inline_loads_bytes == 0, "bytes of inline loads are counted that are not there"
        assert not store._waiting, "a reply waits for a record that is durable"
        assert not store._room, "a store waits for room that has long come"
        assert not gateway.journal.latest.lsn - gateway.journal.durable.lsn, "records are left"
        assert not gateway.regions.by_token, "a region is left"

    async def _account(self) -> None:
        """Load everything once more, store one of the largest, wipe all: nothing is left."""
        gateway = self.gateway
        client = Client(999, self.swarm, random.Random(f"{self._seed}/account"), self.oracle, self._note)
        for identity in self.oracle.known():
            await client.load_these(gateway, [identity], None)
        limits = gateway.limits
        size_bytes = min(limits.object_bytes_max, limits.capacity_au * limits.au_bytes)
        largest = Identity(self.swarm.namespaces[0], self.swarm.scopes[0], b"largest")
        version = self.oracle.next_version()
        content = [(largest, version, payload_of(largest, version, size_bytes))]
        statuses = await client.store_these(gateway, content)
        if statuses == ["no_space"]:
            # It waits for tombstones no longer than it is allowed to; they come all the same.
            await asyncio.sleep(self._quiet_s)
            statuses = await client.store_these(gateway, content)
        assert statuses == ["stored"], f"an object of the largest size is {statuses} on a quiet card (A2)"
        await client.load_these(gateway, [largest], None)
        for namespace in self.swarm.namespaces:
            await self._wipe(namespace, None)
        await asyncio.sleep(self._quiet_s)
        self._check()
        self._require_quiet()
        usage = gateway.engine.usage()
        assert usage.free_au == limits.capacity_au, f"{usage} after everything was wiped"
        names = gateway.engine._state.names
        assert not names.namespaces, "a namespace is left without an object"
        assert not names.scopes, "a scope is left without an object"

    def _collect(self) -> None:
        self._commands += self.gateway.device.commands
        self._late += self.gateway.device.injected.late_writes
        counters = self.gateway.engine.counters
        self._evicted += counters.evicted_demand + counters.evicted_watermark

    def _note(self, what: str) -> None:
        self._history.append(f"{(self._loop.clock()) / 1e6:.3f} ms  {what}")


def _digest(digester: Digester, identity: Identity) -> tuple[int, int]:
    low, high = digester.digest(identity.namespace, identity.scope, [identity.key])
    return int(low[0]), int(high[0])


def play(seed: int, steps: int, parts: Parts | None = None) -> Report:
    """Play one seed. Raises Violation."""
    return World(seed, steps, parts).run()
