"""What may be answered. A read returns a value that is possible, or a miss that is allowed.

Invariants checked
    R1   the bytes of an `ok` are exactly one version that was stored under that identity; wrong bytes say whose they are
    R2   what a lookup shows is durable; what is called stored is durable
    gone a version that was deleted or wiped before a load without lease was asked for is not returned
    miss what is durable and was neither deleted, wiped, evicted nor found corrupt, while the card was there, is not missed
    lease while it lives its objects are loaded, each time the same version, unless wiped
    R6   `corrupt` and `io_error` are answered only where the device did something wrong
    R9   `in_progress`, `exists` and `cancelled` each have their cause
    crash what a recovery finds is possible, whole, and holds all that was acknowledged and not evicted or removed

Breaches are collected, not raised: the code that calls in here has boundaries that would hide them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.sim.values import Identity, whose
from xkv_gateway.card.save import DURABLE_WAIT_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.sim.gateway import Gateway
    from tests.sim.replay import Digest, Entry

NEVER = math.inf
NEVER_VISIBLE = frozenset(
    {"exists", "in_progress", "no_space", "too_large", "io_error", "cancelled", "refused"}
)


@dataclass(slots=True, eq=False)
class Attempt:
    """One try to store one version. `status` is None until it is answered, `unknown` if it never will be."""

    identity: Identity
    version: int
    payload: bytes
    client: int
    asked: int
    asked_ns: int
    status: str | None = None
    answered: int | None = None
    gone: float = NEVER
    """From when on no read that is asked for may see it."""
    gone_for_good: bool = False
    """... and no recovery."""

    @property
    def may_be_visible(self) -> bool:
        """Whether anybody may ever see it."""
        return self.status not in NEVER_VISIBLE


@dataclass(slots=True)
class Lease:
    """A granted lease as its owner knows it."""

    namespace: str
    scope: bytes
    identities: set[Identity]
    ends_ns: int
    versions: dict[Identity, bytes] = field(default_factory=dict)
    wiped: bool = False


@dataclass(slots=True)
class LoadAsked:
    """What was known of the world when a load was asked for."""

    identities: list[Identity]
    lease: Lease | None
    asked: int
    entries: list[Entry | None]
    """What was visible for certain."""
    online: bool
    wiped: bool
    device_errors: int
    read_faults: int
    asked_ns: int


class Oracle:
    """Follows every request and reply. `digest_of` knows the card's secret; `gateway` is the run that serves now."""

    def __init__(self, digest_of: Callable[[Identity], Digest]) -> None:
        self.breaches: list[str] = []
        self.identities: dict[int, Identity] = {}
        self.leases: dict[bytes, Lease] = {}
        self.checked = 0
        """Payloads compared."""
        self.digest_of = digest_of
        self._attempts: dict[Identity, list[Attempt]] = {}
        self._removals: dict[Identity, int] = {}
        """Removals of each identity that were asked for, ever."""
        self._versions = 0
        self._sequence = 0
        self.gateway: Gateway

    def blame(self, what: str) -> None:
        """Note a breach."""
        self.breaches.append(what)

    def known(self) -> list[Identity]:
        """Every identity that somebody tried to store, in order."""
        return list(self._attempts)

    # --- stores -----------------------------------------------------------------------------------------------

    def next_version(self) -> int:
        """Versions are unique over the run."""
        self._versions += 1
        return self._versions

    def store_asked(self, client: int, contents: Iterable[tuple[Identity, int, bytes]]) -> list[Attempt]:
        """A store of (identity, version, payload) leaves."""
        self._sequence += 1
        now_ns = self.gateway.clock()
        attempts = [
            Attempt(i, version, payload, client, self._sequence, now_ns) for i, version, payload in contents
        ]
        for attempt in attempts:
            self.identities[attempt.identity.tag] = attempt.identity
            self._attempts.setdefault(attempt.identity, []).append(attempt)
        return attempts

    def store_answered(
        self, attempts: Sequence[Attempt], statuses: Sequence[str], errors_before: int
    ) -> None:
        """Each has its status."""
        self._sequence += 1
        journal = self.gateway.journal
        for attempt, status in zip(attempts, statuses, strict=True):
            attempt.status, attempt.answered = status, self._sequence
            if status == "io_error" and self.gateway.clock() - attempt.asked_ns >= DURABLE_WAIT_NS:
                attempt.status = "unknown"  # written, and nobody knows whether its record will be durable
            where = f"store of {attempt.identity} version {attempt.version}: {status}"
            if status == "stored":
                if (
                    self.digest_of(attempt.identity),
                    self.gateway.checksum_of(attempt.payload),
                ) not in journal.durable.ever:
                    self.blame(f"{where}, and its record is not durable (R2)")
            elif status == "io_error" and self.gateway.device.injected.errors == errors_before:
                self.blame(f"{where}, and the device did nothing wrong")
            elif status == "in_progress" and not self._overlapping(attempt):
                self.blame(f"{where}, and nobody else is writing it")
            elif status == "cancelled" and not self._removals.get(attempt.identity):
                self.blame(f"{where}, and nobody deleted it")
            elif status == "exists" and not any(
                a.may_be_visible for a in self._attempts[attempt.identity] if a is not attempt
            ):
                self.blame(f"{where}, and nobody ever stored it")

    def _overlapping(self, attempt: Attempt) -> bool:
        return any(
            other is not attempt
            and (other.answered is None or other.answered > attempt.asked or other.status == "unknown")
            for other in self._attempts[attempt.identity]
        )

    # --- removals -----------------------------------------------------------------------------------------------

    def removal_asked(self, client: int, identities: Iterable[Identity]) -> list[Attempt]:
        """A delete leaves. Returns what will be gone once it is answered."""
        self._sequence += 1
        gone: list[Attempt] = []
        for identity in identities:
            self._removals[identity] = self._removals.get(identity, 0) + 1
            # What another connection is still writing may wait for room and come later.
            gone += [
                a for a in self._attempts.get(identity, ()) if a.client == client or a.answered is not None
            ]
        # A store that was cut short may have been waiting for its record: then it comes before the removal.
        return gone

    def removal_answered(self, gone: Iterable[Attempt]) -> None:
        """It has taken effect, for good."""
        self._sequence += 1
        for attempt in gone:
            attempt.gone = min(attempt.gone, self._sequence)
            attempt.gone_for_good = True

    def wiped(self, namespace: str, scope: bytes | None) -> list[Attempt]:
        """A wipe takes effect at once, for leases as well. Returns what is to be told to `removal_answered` once durable."""
        hit = [i for i in self._attempts if i.namespace == namespace and scope in {None, i.scope}]
        gone = self.removal_asked(-1, hit)
        self._sequence += 1
        for attempt in gone:
            attempt.gone = min(attempt.gone, self._sequence)
        for lease in self.leases.values():
            lease.wiped |= lease.namespace == namespace and scope in {None, lease.scope}
        return gone

    def restarted_warm(self) -> list[Attempt]:
        """The gateway begins anew with what was durable. Returns everything that was ever tried."""
        self.leases.clear()
        everything = [attempt for attempts in self._attempts.values() for attempt in attempts]
        for attempt in everything:
            if attempt.answered is None:
                attempt.status, attempt.answered = "unknown", self._sequence
            if not attempt.gone_for_good:
                attempt.gone = (
                    NEVER  # a wipe that was not durable yet: whether it happened is seen from what is back
                )
        return everything

    def restarted_cold(self) -> None:
        """The gateway begins anew with an empty index."""
        self.removal_answered(self.restarted_warm())

    # --- lookups ------------------------------------------------------------------------------------------------

    def lookup_answered(
        self, identities: Sequence[Identity], sizes: Sequence[int | None], lease: bytes | None, lease_ns: int
    ) -> None:
        """Judge a lookup at the moment of its answer, which is the moment at which it took effect."""
        journal, online = self.gateway.journal, self.gateway.online
        for identity, size_bytes in zip(identities, sizes, strict=False):
            entry = journal.latest.live.get(self.digest_of(identity))
            if size_bytes is None:
                if online:
                    self._miss_must_be_explained(identity, entry, "lookup")
                continue
            if not online:
                self.blame(f"lookup shows {identity} while the card is away (R10)")
            if not _same(journal.durable.live.get(self.digest_of(identity)), entry):
                self.blame(f"lookup shows {identity}, which is not durable (R2)")
            if not any(len(a.payload) == size_bytes for a in self._possible(identity, self._sequence)):
                self.blame(f"lookup shows {identity} with {size_bytes} bytes, which nobody stored")
        if len(sizes) < len(identities) and online:
            identity = identities[len(sizes)]
            self._miss_must_be_explained(
                identity, journal.latest.live.get(self.digest_of(identity)), "lookup"
            )
        if lease is not None:
            covered = {i for i, size_bytes in zip(identities, sizes, strict=False) if size_bytes is not None}
            first = identities[0]
            ends_ns = self.gateway.clock() + lease_ns
            self.leases[lease] = Lease(first.namespace, first.scope, covered, ends_ns)

    def _miss_must_be_explained(self, identity: Identity, entry: Entry | None, what: str) -> None:
        """`entry` was visible for certain: once this turn's records are there, it must have been removed."""
        gateway = self.gateway
        if entry is None or not _same(gateway.journal.durable.live.get(entry.digest), entry):
            return

        def look() -> None:
            if not gateway.gone and _same(gateway.journal.latest.live.get(entry.digest), entry):
                self.blame(f"{what} misses {identity}, which is held")

        gateway.after_this_turn(look)

    # --- loads --------------------------------------------------------------------------------------------------

    def load_asked(self, identities: list[Identity], lease: bytes | None) -> LoadAsked:
        """A load leaves."""
        gateway = self.gateway
        self._sequence += 1
        known = None if lease is None else self.leases.get(lease)
        durable, latest = gateway.journal.durable.live, gateway.journal.latest.live
        entries: list[Entry | None] = []
        for identity in identities:
            digest = self.digest_of(identity)
            entries.append(latest.get(digest) if _same(latest.get(digest), durable.get(digest)) else None)
        return LoadAsked(
            identities,
            known,
            self._sequence,
            entries,
            gateway.online,
            known is not None and known.wiped,
            gateway.device.injected.errors,
            gateway.read_faults,
            gateway.clock(),
        )

    def load_answered(
        self, asked: LoadAsked, statuses: Sequence[str], payloads: Sequence[bytes | None]
    ) -> None:
        """Judge a load."""
        gateway, lease = self.gateway, asked.lease
        calm = asked.online and gateway.online and gateway.device.injected.errors == asked.device_errors
        for at, (identity, status) in enumerate(zip(asked.identities, statuses, strict=True)):
            payload = payloads[at]
            if status == "ok":
                assert payload is not None
                self._check_bytes(asked, at, payload)
                if asked.wiped:
                    self.blame(f"load of {identity} under a lease that was wiped is ok")
            elif (
                status == "corrupt"
                and gateway.read_faults == asked.read_faults
                and not gateway.device.medium.damaged
            ):
                self.blame(f"load of {identity} is corrupt, and the device read nothing wrong (R3, R4)")
            elif status == "io_error" and calm and gateway.read_faults == asked.read_faults:
                self.blame(f"load of {identity} is io_error, and the device did nothing wrong")
            elif status == "miss" and calm and lease is None:
                self._miss_must_be_explained(identity, asked.entries[at], "load")
            elif (
                status == "miss"
                and calm
                and lease is not None
                and identity in lease.identities
                and not lease.wiped
                and gateway.clock() < lease.ends_ns
            ):
                self.blame(f"load of {identity} under a living lease is a miss")

    def _check_bytes(self, asked: LoadAsked, at: int, payload: bytes) -> None:
        identity, lease = asked.identities[at], asked.lease
        self.checked += 1
        since = asked.asked if lease is None else 0
        if not any(attempt.payload == payload for attempt in self._possible(identity, since)):
            gone = any(a.payload == payload for a in self._attempts.get(identity, ()))
            said = "bytes that were removed or never stored" if gone else "wrong bytes (R1)"
            self.blame(f"load of {identity} gave {said}: {whose(payload, self.identities)}")
        if lease is not None:
            if identity not in lease.identities:
                self.blame(f"load of {identity} under a lease that does not cover it is ok")
            elif lease.versions.setdefault(identity, payload) != payload:
                self.blame(f"load of {identity} gave two versions under one lease")

    def _possible(self, identity: Identity, since: int) -> list[Attempt]:
        """What a read may see that was asked for at `since`."""
        return [a for a in self._attempts.get(identity, ()) if a.may_be_visible and a.gone >= since]

    # --- crashes ------------------------------------------------------------------------------------------------

    def check_recovered(self, found: dict[Identity, bytes]) -> None:
        """Judge what a recovery would serve after a power failure now: the bytes of each live object."""
        journal = self.gateway.journal
        for identity, payload in found.items():
            possible = [
                a for a in self._attempts.get(identity, ()) if a.may_be_visible and not a.gone_for_good
            ]
            if not any(attempt.payload == payload for attempt in possible):
                self.blame(f"after a crash {identity} would be: {whose(payload, self.identities)}")
        for identity in self._attempts:
            digest = self.digest_of(identity)
            # What is called stored is durable: that is checked when it is answered.
            held = _same(journal.latest.live.get(digest), journal.durable.live.get(digest))
            if held and identity not in found:
                self.blame(f"after a crash {identity} would be lost, which is durable")


def _same(one: Entry | None, other: Entry | None) -> bool:
    return (
        one is not None
        and other is not None
        and (one.slot, one.generation, one.checksum) == (other.slot, other.generation, other.checksum)
    )
