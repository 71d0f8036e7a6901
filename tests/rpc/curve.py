"""Keys and clients of CURVE endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.rpc.harness import RawClient
from xkv_rpc.doors import Admits, ClientKeys, Door, Doorkeeper, Grant, KeyPair
from xkv_rpc.porter import new_key_pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_rpc.doors import Visit


class Keyring:
    """A server's pair, and clients' pairs by name."""

    def __init__(self, on_visit: Callable[[Visit], None] | None = None) -> None:
        self.server = new_key_pair()
        self.doorkeeper = Doorkeeper(on_visit)
        self._grants: dict[str, Grant] = {}

    def door(self, endpoint: str = "tcp://127.0.0.1:0") -> Door:
        return Door(endpoint, Admits.KEYS, self.server)

    def new(self, name: str, *namespaces: str) -> ClientKeys:
        """Make a known key; without namespaces it may touch all."""
        pair = new_key_pair()
        self._grants[pair.public] = Grant(name, frozenset(namespaces) if namespaces else None)
        self.doorkeeper.replace(self._grants)
        return ClientKeys(self.server.public, pair)

    def revoke(self, keys: ClientKeys) -> None:
        del self._grants[keys.pair.public]
        self.doorkeeper.replace(self._grants)

    def stranger(self) -> ClientKeys:
        """Return keys that nobody knows."""
        return ClientKeys(self.server.public, new_key_pair())


def raw_client(endpoint: str, keys: ClientKeys | KeyPair, **options: int | bytes) -> RawClient:
    """Return a DEALER with these keys."""
    assert isinstance(keys, ClientKeys)
    return RawClient(
        endpoint,
        CURVE_SERVERKEY=keys.server_public.encode(),
        CURVE_PUBLICKEY=keys.pair.public.encode(),
        CURVE_SECRETKEY=keys.pair.secret.encode(),
        **options,
    )
