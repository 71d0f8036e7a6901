"""The gateway as LMCache sees it: batches of objects that are stored, found and held, and loaded. Knows nothing of LMCache.

Whatever fails is a miss or a store that did not take place. `store`, `lookup` and `load` are each called from one thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from xkv_lmcache_plugin.keys import by_scope, key_of
from xkv_rpc.client import Client
from xkv_rpc.curve_files import read_client_keys
from xkv_rpc.errors import XkvRpcError
from xkv_rpc.messages import LookupMode, StoreStatus
from xkv_rpc.session import ClientOptions
from xkv_vllm_connector.channel import Channel, ChannelError
from xkv_vllm_connector.settings import SettingsError, parse_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xkv_lmcache_plugin.keys import ObjectKey
    from xkv_vllm_connector.settings import Settings

SETTINGS: Final = frozenset(
    {
        "xkv_gateway_host", "xkv_gateway_port", "xkv_gateway_socket", "xkv_keys", "require_cache_salt", "key_namespace",
        "model_fingerprint", "lookup_timeout_ms", "load_timeout_ms", "store_timeout_ms", "lease_ms", "staging_bytes",
    }
)  # fmt: skip
"""The settings of the vLLM connector that mean the same here."""
KEYS_MAX: Final = 4096
"""Keys of one request to the gateway."""
_HELD: Final = frozenset({StoreStatus.STORED, StoreStatus.EXISTS})
_NS_PER_MS: Final = 1_000_000


def parse_params(params: Mapping[str, object]) -> Settings:
    """Check the plugin's settings.

    Raises:
        SettingsError: One of them cannot be used; it is named.
    """
    for name in params:
        if name not in SETTINGS:
            raise SettingsError(str(name), f"is not a setting here; there are {', '.join(sorted(SETTINGS))}")
    return parse_settings(params)


@dataclass(slots=True)
class _Lease:
    """What one lookup holds."""

    token: bytes
    ends_ns: int
    keys_left: int


@dataclass(slots=True)
class Stored:
    """The outcome of a store: positions that were written now, and whether all are held."""

    written: list[int] = field(default_factory=list)
    complete: bool = True


class Backend:
    """See the module.

    Args:
        settings: From `parse_params`.
        clock: Monotonic nanoseconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], int]) -> None:
        self._settings = settings
        self._clock = clock
        self._lookups = self._client(settings.lookup_timeout_ms)
        self._loads = self._channel(settings.load_timeout_ms)
        self._stores = self._channel(settings.store_timeout_ms)
        self._lock = threading.Lock()
        self._holding: dict[tuple[bytes, bytes], list[_Lease]] = {}
        self._leases: deque[tuple[_Lease, list[tuple[bytes, bytes]]]] = deque()

    def _client(self, timeout_ms: int) -> Client:
        settings = self._settings
        try:
            keys = read_client_keys(settings.xkv_keys) if settings.xkv_keys else None
        except XkvRpcError as error:
            raise SettingsError("xkv_keys", str(error)) from error
        options = ClientOptions(timeout_ms=timeout_ms, connect_timeout_ms=timeout_ms, keys=keys)
        return Client(settings.endpoint, options, clock=self._clock)

    def _channel(self, timeout_ms: int) -> Channel:
        half = self._settings.staging_bytes // 2
        return Channel(self._client(timeout_ms), self._settings.key_namespace, half, self._clock)

    def _scopes(self, keys: Sequence[ObjectKey]) -> list[tuple[bytes, list[int], list[bytes]]]:
        """Return for each scope the positions of its keys, and what the gateway calls them."""
        fingerprint = self._settings.model_fingerprint
        grouped = by_scope(keys, require_salt=self._settings.require_cache_salt)
        return [(scope, at, [key_of(keys[one], fingerprint) for one in at]) for scope, at in grouped]

    def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Stored:
        """Write objects that are not there yet."""
        outcome = Stored(complete=False)
        try:
            scopes = self._scopes(keys)
            taken = sum(len(at) for _, at, _ in scopes)
            outcome.complete = taken == len(keys)
            for scope, at, names in scopes:
                outcome.complete &= self._store_scope(scope, at, names, buffers, outcome)
        except (ChannelError, ValueError):
            outcome.complete = False
        return outcome

    def _store_scope(
        self, scope: bytes, at: list[int], names: list[bytes], buffers: Sequence[memoryview], outcome: Stored
    ) -> bool:
        channel, timeout_ms = self._stores, self._settings.store_timeout_ms
        channel.ready(timeout_ms)
        # LMCache may name an object twice in a batch; the gateway takes a key once.
        pending = dict(zip(names, at, strict=True))
        complete = True
        for begin in range(0, len(pending), KEYS_MAX):
            batch = list(pending)[begin : begin + KEYS_MAX]
            lost = channel.missing(scope, batch, timeout_ms)
            wanted = [name for name, absent in zip(batch, lost, strict=True) if absent]
            while wanted:
                sizes = [buffers[pending[name]].nbytes for name in wanted]
                count = channel.fit(sizes)
                places = channel.places(sizes[:count])
                for name, place in zip(wanted, places, strict=False):
                    place.view[:] = buffers[pending[name]].cast("B")
                results = channel.store(scope, wanted[:count], places, timeout_ms)
                for name, result in zip(wanted, results, strict=False):
                    complete &= result in _HELD
                    if result is StoreStatus.STORED:
                        outcome.written.append(pending[name])
                wanted = wanted[count:]
        return complete

    def lookup(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Say which objects are there, and hold these until `unlock`, or until the lease ends."""
        found = [False] * len(keys)
        settings = self._settings
        with contextlib.suppress(XkvRpcError, ValueError):
            for scope, at, names in self._scopes(keys):
                for begin in range(0, len(names), KEYS_MAX):
                    batch = names[begin : begin + KEYS_MAX]
                    reply = self._lookups.lookup(
                        settings.key_namespace,
                        scope,
                        batch,
                        mode=LookupMode.EACH,
                        lease_ms=settings.lease_ms,
                        timeout_ms=settings.lookup_timeout_ms,
                    )
                    held = [name for name, size in zip(batch, reply.sizes, strict=True) if size is not None]
                    if reply.lease is not None:
                        self._hold(scope, held, reply.lease)
                    for place, size in zip(at[begin : begin + KEYS_MAX], reply.sizes, strict=True):
                        found[place] = size is not None
        return found

    def _hold(self, scope: bytes, names: list[bytes], token: bytes) -> None:
        now_ns = self._clock()
        lease = _Lease(token, now_ns + self._settings.lease_ms * _NS_PER_MS, len(names))
        places = [(scope, name) for name in names]
        with self._lock:
            while self._leases and self._leases[0][0].ends_ns < now_ns:
                ended, ended_places = self._leases.popleft()
                for place in ended_places:
                    self._let_go(place, ended)
            self._leases.append((lease, places))
            for place in places:
                self._holding.setdefault(place, []).append(lease)

    def _let_go(self, place: tuple[bytes, bytes], lease: _Lease) -> None:
        """Forget that a lease holds an object. Under the lock."""
        holders = self._holding.get(place, [])
        if lease in holders:
            holders.remove(lease)
        if not holders:
            self._holding.pop(place, None)

    def unlock(self, keys: Sequence[ObjectKey]) -> None:
        """Hold these once less; a lease whose objects are all let go is ended."""
        ended: list[bytes] = []
        try:
            scopes = self._scopes(keys)
        except ValueError:
            return
        with self._lock:
            for scope, _, names in scopes:
                for name in names:
                    holders = self._holding.get((scope, name))
                    if not holders:
                        continue
                    lease = holders[0]
                    self._let_go((scope, name), lease)
                    lease.keys_left -= 1
                    if lease.keys_left == 0:
                        ended.append(lease.token)
        for token in ended:
            with contextlib.suppress(XkvRpcError):  # a lease ends by itself, too
                self._lookups.release(token, timeout_ms=self._settings.lookup_timeout_ms)

    def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[bool]:
        """Read objects into buffers of exactly their sizes; say which came."""
        came = [False] * len(keys)
        with contextlib.suppress(ChannelError, ValueError):
            self._loads.ready(self._settings.load_timeout_ms)
            for scope, at, names in self._scopes(keys):
                begin = 0
                while begin < len(at):
                    sizes = [buffers[one].nbytes for one in at[begin:]]
                    end = begin + self._loads.fit(sizes)
                    self._load_batch(scope, at[begin:end], names[begin:end], buffers, came)
                    begin = end
        return came

    def _load_batch(
        self, scope: bytes, at: list[int], names: list[bytes], buffers: Sequence[memoryview], came: list[bool]
    ) -> None:
        sizes = [buffers[one].nbytes for one in at]
        try:
            views = self._loads.load(scope, names, sizes, None, self._settings.load_timeout_ms)
        except ChannelError as error:
            if error.unavailable:
                raise
            # One of them is gone or damaged: the others are good one by one.
            if len(at) > 1:
                for one, name in zip(at, names, strict=True):
                    self._load_batch(scope, [one], [name], buffers, came)
            return
        for one, view in zip(at, views, strict=True):
            buffers[one].cast("B")[:] = view
            came[one] = True

    def status(self) -> dict[str, Any]:
        """Return where the gateway is, and how many objects are held; no salt and no key."""
        with self._lock:
            return {"endpoint": self._settings.endpoint, "objects_held": len(self._holding)}

    def close(self) -> None:
        """End the connections."""
        self._lookups.close()
        self._loads.close()
        self._stores.close()
