"""What the control port does, counted for the metrics at almost no cost for a request. Pure: no clock, no I/O.

Labels are bounded: so many namespaces and models as are met first, named tenants, and so many combinations of them;
everything else is `other`. A salt or a scope is never a label.

Tokens are counted for lookups by prefix on connections whose `hello` said `model` and `tokens_per_key`: a connector says that on
the one connection on which it asks for whole prompts, so that each prompt counts once, whatever its groups and ranks do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_gateway.service.histogram import Histogram, PowerHistogram
from xkv_gateway.service.reuse import ReuseTracker
from xkv_rpc import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_rpc.calls import Call
    from xkv_rpc.messages import PeerId

    Labels = tuple[str, str, str]

OTHER: Final = "other"
DEFAULT: Final = m.DEFAULT_NAME
NAMESPACES_MAX: Final = 64
MODELS_MAX: Final = 64
MODEL_BYTES_MAX: Final = 128
LABEL_SETS_MAX: Final = 2048
REUSE_TENANTS_MAX: Final = 256
PEERS_MAX: Final = 4096
KNOWN_MAX: Final = 8192
"""(peer, namespace, scope) whose cell is remembered."""
TOKENS_PER_KEY_MAX: Final = 1 << 20
TOKENS_PER_KEY_VALUES_MAX: Final = 16
"""Different values under one set of labels; lookups with more of them are not counted in tokens."""
LATENCY_BITS: Final = (16, 34)
"""Bounds of the latencies: 2^16 ns (66 us) to 2^34 ns (17 s)."""
LAG_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
TIMED: Final = (
    m.Lookup,
    m.Load,
    m.Store,
    m.Delete,
    m.Renew,
    m.Release,
    m.Reserve,
    m.Commit,
    m.Abort,
)


class LookupCell:
    """What was asked under one set of labels, with one number of tokens a key (0: not counted in tokens)."""

    __slots__ = ("hit_keys", "requested_keys", "tokens_per_key")

    def __init__(self, tokens_per_key: int) -> None:
        self.tokens_per_key = tokens_per_key
        self.requested_keys = 0
        self.hit_keys = 0


class _Labels:
    """The first so many values, each for itself; the rest is `other`."""

    def __init__(self, values_max: int, bytes_max: int) -> None:
        self._values: set[str] = set()
        self._values_max = values_max
        self._bytes_max = bytes_max

    def of(self, value: str) -> str:
        if value in self._values:
            return value
        if len(self._values) >= self._values_max or len(value.encode()) > self._bytes_max:
            return OTHER
        self._values.add(value)
        return value


class Meter:
    """Counts.

    Args:
        name_of: the operator's name for the tenant of a scope, None where it has none.
    """

    def __init__(self, name_of: Callable[[bytes], str | None] = lambda _: None) -> None:
        self._name_of = name_of
        self._names: dict[bytes, str | None] = {}
        self._namespaces = _Labels(NAMESPACES_MAX, m.NAMESPACE_BYTES_MAX)
        self._models = _Labels(MODELS_MAX, MODEL_BYTES_MAX)
        self._peers: dict[PeerId, tuple[str, int]] = {}
        self._known: dict[tuple[PeerId, str, bytes], LookupCell] = {}
        self._known_each: dict[tuple[PeerId, str, bytes], LookupCell] = {}
        """... the cells of lookups that are not by prefix."""
        self.lookups: dict[Labels, dict[int, LookupCell]] = {(OTHER, OTHER, OTHER): {}}
        """By namespace, tenant, model, and within by tokens a key."""
        self.latencies = {kind: PowerHistogram() for kind in TIMED}
        self._lookup_latency = self.latencies[m.Lookup]
        self.loop_lag = Histogram([ms * 1_000_000 for ms in LAG_MS])
        """By how many ns the loop came too late to a turn."""
        self.loop_lag_max_ns = 0
        """... at the worst, since the start."""
        self.reuse = ReuseTracker(self._reuse_label)

    def lagged(self, lag_ns: int) -> None:
        """The loop came so late to a turn."""
        self.loop_lag.add(lag_ns)
        self.loop_lag_max_ns = max(self.loop_lag_max_ns, lag_ns)

    # --- what the control service tells -----------------------------------------------------------------------

    def hello(self, peer: PeerId, request: m.Hello) -> None:
        """A client said who it is."""
        tokens = request.tokens_per_key or 0
        self._peers.pop(peer, None)
        if len(self._peers) >= PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        model = self._models.of(request.model) if request.model else OTHER
        self._peers[peer] = (model, tokens if tokens <= TOKENS_PER_KEY_MAX else 0)
        self.renamed()

    def lookup(self, call: Call, request: m.Lookup, hits: int, now_ns: int) -> None:
        """A lookup was answered."""
        duration_ns, latency = now_ns - call.received_ns, self._lookup_latency
        latency.counts[duration_ns.bit_length()] += 1
        latency.total += duration_ns
        known = self._known if request.mode is m.LookupMode.PREFIX else self._known_each
        cell = known.get((call.peer, request.ns, request.scope))
        if cell is None:
            cell = self._meet(call.peer, request, known)
        cell.requested_keys += len(request.keys)
        cell.hit_keys += hits

    def took(self, call: Call, now_ns: int) -> None:
        """Any other request was answered."""
        self.latencies[type(call.request)].add(now_ns - call.received_ns)  # type: ignore[index]  # one of TIMED

    def stored(self, request: m.Store, results: Sequence[str], now_ns: int) -> None:
        """A store ended."""
        keys = request.keys
        if results.count(m.StoreStatus.STORED) != len(keys):
            keys = [
                key for key, status in zip(keys, results, strict=True) if status == m.StoreStatus.STORED.value
            ]
        if keys:
            self.reuse.stored(request.ns, request.scope, keys, now_ns)

    def loaded(self, request: m.Load, results: Sequence[str], now_ns: int) -> None:
        """A load ended."""
        keys = request.keys
        if results.count(m.LoadStatus.OK) != len(keys):
            keys = [key for key, status in zip(keys, results, strict=True) if status == m.LoadStatus.OK.value]
        if keys:
            self.reuse.loaded(request.ns, request.scope, keys, now_ns)

    # --- names ------------------------------------------------------------------------------------------------

    def renamed(self) -> None:
        """Labels are found anew: a client said hello, or tenants got or lost names."""
        self._known.clear()
        self._known_each.clear()
        self._names.clear()

    def _name(self, scope: bytes) -> str | None:
        if scope not in self._names:
            if len(self._names) >= KNOWN_MAX:
                self._names.clear()
            self._names[scope] = self._name_of(scope)
        return self._names[scope]

    def _meet(
        self, peer: PeerId, request: m.Lookup, known: dict[tuple[PeerId, str, bytes], LookupCell]
    ) -> LookupCell:
        model, tokens = self._peers.get(peer, (OTHER, 0))
        if request.mode is not m.LookupMode.PREFIX:
            tokens = 0
        labels = (self._namespaces.of(request.ns or DEFAULT), self._name(request.scope) or OTHER, model)
        if labels not in self.lookups and len(self.lookups) >= LABEL_SETS_MAX:
            labels = (OTHER, OTHER, OTHER)
        cells = self.lookups.setdefault(labels, {})
        if tokens not in cells and len(cells) >= TOKENS_PER_KEY_VALUES_MAX:
            tokens = 0
        cell = cells.setdefault(tokens, LookupCell(tokens))
        if len(known) >= KNOWN_MAX:
            known.clear()
        known[peer, request.ns, request.scope] = cell
        return cell

    def _reuse_label(self, scope: bytes) -> str:
        name = self._name(scope)
        if name is None or (name not in self.reuse.tenants and len(self.reuse.tenants) >= REUSE_TENANTS_MAX):
            return OTHER
        return name
