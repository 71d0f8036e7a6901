"""How long stored objects wait for their first read, and how much their tenant does meanwhile. Pure.

What is tracked is a random sample by identity: all of it while there is little, and half as much each time the table
is full. A sampled observation counts for all those that were not. Of an identity only a hash is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_gateway.service.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TRACKED_MAX: Final = 65_536
WAIT_MAX_NS: Final = 24 * 3600 * 1_000_000_000
"""What was not read for so long is given up: gaps beyond are not told."""
GAP_SECONDS_BOUNDS_NS: Final = tuple(int(s * 1e9) for s in (1, 10, 60, 600, 3600, 21_600))
GAP_OBJECTS_BOUNDS: Final = (10, 100, 1_000, 10_000, 100_000, 1_000_000)


class TenantReuse:
    """The gaps of one tenant's label."""

    __slots__ = ("accesses", "objects", "seconds")

    def __init__(self) -> None:
        self.accesses = 0
        """Objects written and read."""
        self.seconds = Histogram(GAP_SECONDS_BOUNDS_NS)
        self.objects = Histogram(GAP_OBJECTS_BOUNDS)


class ReuseTracker:
    """Watches stores and loads.

    Args:
        label_of: the label of a scope; the caller bounds how many there are.
    """

    def __init__(self, label_of: Callable[[bytes], str], tracked_max: int = TRACKED_MAX) -> None:
        self._label_of = label_of
        self._tracked_max = tracked_max
        self._mask = 0
        self._written: dict[int, tuple[int, int]] = {}
        """Hash of the identity -> when it was written, and the accesses of its tenant until then; oldest first."""
        self.tenants: dict[str, TenantReuse] = {}

    def stored(self, namespace: str, scope: bytes, keys: Iterable[bytes], now_ns: int) -> None:
        """Note that these objects were written."""
        tenant = self.of(scope)
        written, mask = self._written, self._mask
        for key in keys:
            tenant.accesses += 1
            ident = hash((namespace, scope, key))
            if not ident & mask:
                written.pop(ident, None)
                written[ident] = (now_ns, tenant.accesses)
        if len(written) > self._tracked_max:
            self._shrink(now_ns)

    def loaded(self, namespace: str, scope: bytes, keys: Iterable[bytes], now_ns: int) -> None:
        """Note that these objects were read."""
        tenant = self.of(scope)
        written, weight = self._written, self._mask + 1
        for key in keys:
            tenant.accesses += 1
            found = written.pop(hash((namespace, scope, key)), None)
            if found is not None:
                written_ns, accesses = found
                # After a change of names the tenant counts from another start.
                tenant.seconds.add(max(0, now_ns - written_ns), weight)
                tenant.objects.add(max(0, tenant.accesses - accesses - 1), weight)

    def of(self, scope: bytes) -> TenantReuse:
        """Return what belongs to the label of a scope."""
        label = self._label_of(scope)
        tenant = self.tenants.get(label)
        if tenant is None:
            tenant = self.tenants[label] = TenantReuse()
        return tenant

    def _shrink(self, now_ns: int) -> None:
        young_ns = now_ns - WAIT_MAX_NS
        kept = {ident: entry for ident, entry in self._written.items() if entry[0] >= young_ns}
        while len(kept) > self._tracked_max // 2:
            self._mask = 2 * self._mask + 1
            kept = {ident: entry for ident, entry in kept.items() if not ident & self._mask}
        self._written = kept
