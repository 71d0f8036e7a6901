"""A client that does everything at random until it is killed: `python -m tests.e2e.soak_client ENDPOINT SEED`."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING

from xkv_rpc.client import Client, ClientOptions
from xkv_rpc.errors import GatewayUnavailableError, RpcError

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = 400
BATCH_MAX = 32
PAYLOAD_BYTES_MAX = 200_000
LEASE_MS = 3000
REGION_BYTES = 8 << 20


class SoakClient:
    """Keys are shared by all clients of a scope, so that they meet."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._client = Client(endpoint, ClientOptions(timeout_ms=20_000, connect_timeout_ms=20_000))
        self._region = self._client.attach_region(REGION_BYTES)
        self._payload = self._rng.randbytes(PAYLOAD_BYTES_MAX)
        self._leases: list[bytes] = []

    def step(self) -> None:
        """Do one thing."""
        rng = self._rng
        steps: list[Callable[[str, bytes, list[bytes]], None]] = [
            self._store, self._store_from, self._lookup, self._lookup, self._load, self._load_into, self._delete,
        ]  # fmt: skip
        keys = [b"%d" % number for number in rng.sample(range(KEYS), rng.randint(1, BATCH_MAX))]
        with contextlib.suppress(RpcError, GatewayUnavailableError):
            rng.choice(steps)(f"namespace {rng.randrange(3)}", b"scope %d" % rng.randrange(5), keys)

    def _store(self, ns: str, scope: bytes, keys: list[bytes]) -> None:
        payloads = [memoryview(self._payload)[: self._rng.randint(1, PAYLOAD_BYTES_MAX)] for _ in keys]
        self._client.store(ns, scope, keys, payloads)

    def _store_from(self, ns: str, scope: bytes, keys: list[bytes]) -> None:
        sizes = [self._rng.randint(1, PAYLOAD_BYTES_MAX) for _ in keys]
        offsets = [i * PAYLOAD_BYTES_MAX for i in range(len(keys))]
        self._client.store_from(ns, scope, keys, sizes, self._region.token, offsets)

    def _lookup(self, ns: str, scope: bytes, keys: list[bytes]) -> None:
        found = self._client.lookup(ns, scope, keys, lease_ms=LEASE_MS)
        if found.lease is not None:
            self._leases.append(found.lease)
        if len(self._leases) > 4:
            lease = self._leases.pop(0)
            if self._rng.random() < 0.5:
                self._client.renew(lease, LEASE_MS)
            self._client.release(lease)

    def _load(self, ns: str, scope: bytes, keys: list[bytes]) -> None:
        lease = self._leases[-1] if self._leases and self._rng.random() < 0.5 else None
        self._client.load(ns, scope, keys, lease=lease)

    def _load_into(self, ns: str, scope: bytes, keys: list[bytes]) -> None:
        offsets = [i * PAYLOAD_BYTES_MAX for i in range(len(keys))]
        self._client.load_into(ns, scope, keys, self._region.token, offsets, [PAYLOAD_BYTES_MAX] * len(keys))

    def _delete(self, ns: str, scope: bytes, keys: list[bytes]) -> None:
        self._client.delete(ns, scope, keys[:4])


if __name__ == "__main__":
    soak = SoakClient(sys.argv[1], int(sys.argv[2]))
    while True:
        soak.step()
