"""What `kv_connector_extra_config` may say. Pure.

Every setting has a default; a name that is not one, a wrong type and a value out of its range are errors that name the
field. Millisecond, byte and token settings say so in their names or below.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from xkv_rpc.addresses import host_port
from xkv_rpc.errors import EndpointError
from xkv_rpc.unixpath import check_socket_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NAMESPACE_BYTES_MAX: Final = 64
DEFAULT_NAMESPACE: Final = "_default"
LOAD_MODES: Final = ("async", "sync")


class SettingsError(ValueError):
    """A setting cannot be used.

    Attributes:
        field: Its name in `kv_connector_extra_config`.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"kv_connector_extra_config: {field}: {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's settings, checked."""

    xkv_gateway_host: str = "127.0.0.1"
    """Where the gateway's control port is."""
    xkv_gateway_port: int = 5557
    xkv_gateway_socket: str = ""
    """Path of the gateway's Unix socket; used instead of host and port where it is given."""
    xkv_keys: str = ""
    """The client's certificate (`NAME.key_secret`) for a gateway that wants CURVE keys."""
    chunk_size: int = 128
    """Tokens of one stored object; rounded up to the blocks of the cache groups."""
    require_cache_salt: bool = False
    """A request without a salt neither reads nor stores."""
    key_namespace: str = ""
    """Setting or changing it starts a new cache."""
    model_fingerprint: str = ""
    """Anything that tells these weights from others under the same name; changing it is a miss."""
    load_mode: str = "async"
    """`async`: requests wait beside the running batch. `sync`: within the step (models with one cache group only)."""
    lookup_timeout_ms: int = 1000
    """How long a request waits for the answer to "do you hold this" before it goes on without."""
    lookup_step_wait_ms: int = 2
    """How long one scheduler step waits for such answers, all requests together."""
    load_timeout_ms: int = 10_000
    """How long a request waits for its bytes before it is computed instead."""
    store_timeout_ms: int = 10_000
    lease_ms: int = 30_000
    """How long found objects are held for a request between finding and loading them."""
    staging_bytes: int = 256 << 20
    """Shared memory of each worker, half for loads, half for stores."""
    max_store_backlog_bytes: int = 512 << 20
    """Bytes a worker that wait to be stored; beyond, stores are put off or dropped. Loads never are."""

    @property
    def endpoint(self) -> str:
        """The address of the control port."""
        if self.xkv_gateway_socket:
            return f"ipc://{self.xkv_gateway_socket}"
        return f"tcp://{host_port(self.xkv_gateway_host, self.xkv_gateway_port)}"


def _between(least: int, most: int) -> Callable[[Any], str | None]:
    return lambda value: None if least <= value <= most else f"must be {least} to {most}, not {value}"


def _is_namespace(value: str) -> str | None:
    if value == DEFAULT_NAMESPACE:
        return f"{DEFAULT_NAMESPACE} is how the empty namespace is spelled elsewhere, and no name"
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return "must be valid Unicode"
    return f"has {size} bytes, of at most {NAMESPACE_BYTES_MAX}" if size > NAMESPACE_BYTES_MAX else None


def _is_load_mode(value: str) -> str | None:
    return None if value in LOAD_MODES else f"must be one of {', '.join(LOAD_MODES)}, not {value!r}"


def _is_host(value: str) -> str | None:
    if ":" in value:
        try:
            ipaddress.IPv6Address(value)
        except ValueError:
            return "must be a host name or an address, without port, scheme or brackets"
        return None
    good = value and value.isprintable() and not set(value) & set(" /@[]")
    return None if good else "must be a host name or an address"


def _is_socket(value: str) -> str | None:
    if not value:
        return None
    try:
        check_socket_path(value)
    except UnicodeEncodeError:
        return "must be valid Unicode"
    except EndpointError as error:
        return str(error)
    return None


def _is_file(value: str) -> str | None:
    return None if value.isprintable() else "must be the path of a file"


_MINUTE_MS: Final = 60_000
_CHECKS: Final[dict[str, Callable[[Any], str | None]]] = {
    "xkv_gateway_host": _is_host,
    "xkv_gateway_port": _between(1, 65_535),
    "xkv_gateway_socket": _is_socket,
    "xkv_keys": _is_file,
    "chunk_size": _between(1, 1 << 20),
    "key_namespace": _is_namespace,
    "load_mode": _is_load_mode,
    "lookup_timeout_ms": _between(1, _MINUTE_MS),
    "lookup_step_wait_ms": _between(0, 1000),
    "load_timeout_ms": _between(1, 10 * _MINUTE_MS),
    "store_timeout_ms": _between(1, 10 * _MINUTE_MS),
    "lease_ms": _between(1, _MINUTE_MS),
    "staging_bytes": _between(1 << 20, 1 << 40),
    "max_store_backlog_bytes": _between(0, 1 << 40),
}


def parse_settings(extra: Mapping[str, object] | None) -> Settings:
    """Check the settings that a user gave.

    Raises:
        SettingsError: One of them cannot be used; it is named.
    """
    defaults = Settings()
    known = {field.name: getattr(defaults, field.name) for field in fields(Settings)}
    chosen: dict[str, Any] = {}
    for name, value in (extra or {}).items():
        if name not in known:
            raise SettingsError(str(name), f"is not a setting; there are {', '.join(sorted(known))}")
        wanted = type(known[name])
        if type(value) is not wanted:
            raise SettingsError(name, f"must be {wanted.__name__}, not {type(value).__name__}")
        problem = _CHECKS.get(name, lambda _: None)(value)
        if problem is not None:
            raise SettingsError(name, problem)
        chosen[name] = value
    return Settings(**chosen)
