"""The doors: judges every address, reads keys and tokens, then binds. What is wrong is found before anything is bound."""

from __future__ import annotations

import errno
import grp
import logging
import socket
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xkv_gateway.binds import (
    BindAddress,
    bind_error,
    bind_tcp,
    host_port,
    judge_bind,
    judge_bound,
    resolve_bind,
)
from xkv_gateway.errors import AddressInUseError, ConfigError
from xkv_gateway.keys.directory import KeyDirectory
from xkv_gateway.keys.watch import KeyWatch
from xkv_gateway.networks import StorageNetworks
from xkv_gateway.service.gate import Gate
from xkv_gateway.service.status import AddressStatus
from xkv_gateway.service.tokens import Tokens, read_tokens
from xkv_gateway.state import make_state_dir, regions_socket_path
from xkv_rpc.doors import Admits, Door, Doorkeeper
from xkv_rpc.errors import AddressInUseError as EndpointInUseError
from xkv_rpc.errors import EndpointError
from xkv_rpc.regions import RegionLimits, RegionServer
from xkv_rpc.server import Server
from xkv_rpc.unixpath import bind_listener, inode_of, unlink_if_same

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AsyncExitStack

    from xkv_gateway.config import Config
    from xkv_gateway.errors import GatewayError
    from xkv_rpc.doors import KeyPair, Visit
    from xkv_rpc.messages import Limits

log = logging.getLogger(__name__)

CLOSE_GRACE_MS: Final = 300
CLOSE_LINGER_MS: Final = 200
KEYS_DIRECTORY: Final = "keys"
ADMIN_SOCKET_MODE: Final = 0o600


@dataclass(frozen=True, slots=True)
class Judged:
    """Addresses that may be bound."""

    control: BindAddress | None
    curve: BindAddress | None
    admin: BindAddress
    metrics: BindAddress | None


class TokenBox:
    """The tokens that count now; they can be read again."""

    def __init__(self, config: Config, credentials: Path | None) -> None:
        self._config = config.admin
        self._credentials = credentials
        self.tokens = Tokens()
        self.read()

    def read(self) -> None:
        """Read the files. Raises ConfigError; then the tokens of before still count."""
        admin = self._config
        tokens = read_tokens(admin.token_file, admin.read_token_file, self._credentials)
        if self.tokens.asked_for and not tokens.asked_for:
            raise ConfigError("the tokens of the admin port are gone, which would open it")
        self.tokens = tokens

    def now(self) -> Tokens:
        """Return the tokens."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class Ports:
    """What is bound before the card is touched."""

    gate: Gate
    server: Server
    regions: RegionServer
    admin_bind: BindAddress
    admin_listener: socket.socket
    admin_unix_listener: socket.socket | None
    metrics_listener: socket.socket | None
    tokens: TokenBox
    keys: KeyWatch | None
    addresses: AddressStatus


def judge(config: Config, tokens: TokenBox) -> Judged:
    """Judge every address.

    Raises:
        BindRefusedError: one can be reached by people whom nobody authenticates, or is in a storage network.
        ConfigError: a name does not resolve, two ports are one, or nothing would be served.
    """
    control, curve, admin, metrics = (
        config.control,
        config.control.curve,
        config.admin,
        config.admin.metrics,
    )
    storage = StorageNetworks(config.fabric.networks)
    if not control.open and curve.bind_address is None and control.socket is None:
        raise ConfigError(
            "control.open = false leaves nothing to connect to",
            advice="Set control.socket or control.curve.bind_address.",
        )
    if curve.bind_address is None and curve.keys is not None:
        raise ConfigError(
            "control.curve.keys is set, but nobody would be asked for a key",
            advice="Set control.curve.bind_address as well, or take the keys out of the configuration.",
        )
    judged = Judged(
        control=judge_bind(
            control.bind_address,
            control.port,
            section="control",
            allow_unauthenticated=control.allow_unauthenticated,
            storage=storage,
        )
        if control.open
        else None,
        curve=None
        if curve.bind_address is None
        else resolve_bind(curve.bind_address, curve.port, section="control.curve", storage=storage),
        admin=judge_bind(
            admin.bind_address,
            admin.port,
            section="admin",
            allow_unauthenticated=admin.allow_unauthenticated or tokens.tokens.asked_for,
            storage=storage,
        ),
        metrics=None
        if metrics.bind_address is None
        else resolve_bind(metrics.bind_address, metrics.port, section="admin.metrics", storage=storage),
    )
    _require_different(judged)
    return judged


def _require_different(judged: Judged) -> None:
    """Refuse two ports in one place: it would look as if somebody else had it. Raises ConfigError."""
    sections = {
        "control": judged.control,
        "control.curve": judged.curve,
        "admin": judged.admin,
        "admin.metrics": judged.metrics,
    }
    bound = [(section, address) for section, address in sections.items() if address is not None]
    for (first, one), (second, other) in combinations(bound, 2):
        if one.collides(other):
            raise ConfigError(
                f"{first}.port and {second}.port are both {one.port}", advice="Each needs a port of its own."
            )


def keys_directory(config: Config, state_dir: Path) -> Path:
    """Return where the keys are."""
    configured = config.control.curve.keys
    return Path(configured).expanduser().absolute() if configured else state_dir / KEYS_DIRECTORY


class PortOpener:
    """Opens the doors of one gateway, in the order in which it may fail.

    Args:
        config: the settings.
        state_dir: what is kept between runs.
        limits: what one request may ask for.
        clock: monotonic nanoseconds.
        entropy: gives unguessable bytes.
        credentials: systemd's directory of credentials, where there is one.
    """

    def __init__(
        self,
        config: Config,
        state_dir: Path,
        limits: Limits,
        *,
        clock: Callable[[], int],
        entropy: Callable[[int], bytes],
        credentials: Path | None,
    ) -> None:
        self._config = config
        self._state_dir = state_dir
        self._limits = limits
        self._clock = clock
        self._entropy = entropy
        self._credentials = credentials

    async def open(self, undo: AsyncExitStack) -> Ports:
        """Judge, then bind.

        Raises:
            GatewayError: nothing is bound then.
        """
        config, control = self._config, self._config.control
        tokens = TokenBox(config, self._credentials)
        judged = judge(config, tokens)
        group = _group(control.socket_group)
        storage = StorageNetworks(config.fabric.networks)
        doorkeeper = Doorkeeper(_log_visit, storage.holds)
        make_state_dir(self._state_dir)
        watch, pair = self._keys(doorkeeper)
        admin_listener = bind_tcp(judged.admin, section="admin")
        undo.callback(admin_listener.close)
        metrics_listener = None
        if judged.metrics is not None:
            metrics_listener = bind_tcp(judged.metrics, section="admin.metrics")
            undo.callback(metrics_listener.close)
        gate, direct = Gate(), control.direct
        server = Server(gate, self._limits, clock=self._clock, doorkeeper=doorkeeper, direct=direct)
        undo.push_async_callback(server.aclose, grace_ms=CLOSE_GRACE_MS, linger_ms=CLOSE_LINGER_MS)
        regions_path = str(regions_socket_path(control.regions_socket, self._state_dir))
        regions = self._regions(regions_path, group)
        undo.push_async_callback(regions.aclose)
        doors = self._doors(judged, pair, group)
        try:
            bound = dict(
                zip((name for name, _ in doors), await server.bind([d for _, d in doors]), strict=True)
            )
            await regions.start()
            admin_unix = self._admin_unix(undo)
        except EndpointError as error:
            raise _bind_failed(error, judged) from None
        if watch is not None:
            undo.push_async_callback(watch.aclose)
            watch.start()
        addresses = AddressStatus(
            control=_tcp(bound, "open"),
            control_socket=control.socket,
            admin=host_port(*admin_listener.getsockname()[:2]),
            regions=regions_path,
            control_curve=_tcp(bound, "curve"),
            admin_socket=config.admin.socket,
            metrics=None if metrics_listener is None else host_port(*metrics_listener.getsockname()[:2]),
        )
        self._judge_bound(judged, addresses, tokens)
        return Ports(
            gate,
            server,
            regions,
            judged.admin,
            admin_listener,
            admin_unix,
            metrics_listener,
            tokens,
            watch,
            addresses,
        )

    def _keys(self, doorkeeper: Doorkeeper) -> tuple[KeyWatch | None, KeyPair | None]:
        """Read the keys, where keys are asked for; a gateway that cannot check them does not start."""
        if self._config.control.curve.bind_address is None:
            return None, None
        directory = KeyDirectory(keys_directory(self._config, self._state_dir), self._credentials)
        watch = KeyWatch(directory, doorkeeper)
        return watch, watch.begin()

    def _regions(self, path: str, group: int | None) -> RegionServer:
        control = self._config.control
        limits = RegionLimits(
            region_bytes=control.limits.regions_bytes, total_bytes=control.limits.regions_bytes
        )
        return RegionServer(
            path,
            entropy=self._entropy,
            limits=limits,
            socket_mode=int(control.socket_mode, 8),
            socket_group=group,
        )

    def _doors(self, judged: Judged, pair: KeyPair | None, group: int | None) -> list[tuple[str, Door]]:
        control = self._config.control
        doors: list[tuple[str, Door]] = []
        if judged.control is not None:
            admits = Admits.ANYONE if control.allow_unauthenticated else Admits.LOOPBACK
            doors.append(("open", Door(f"tcp://{judged.control.text}", admits)))
        if judged.curve is not None:
            doors.append(("curve", Door(f"tcp://{judged.curve.text}", Admits.KEYS, pair)))
        if control.socket is not None:
            mode = int(control.socket_mode, 8)
            doors.append(("unix", Door(f"ipc://{control.socket}", Admits.LOCAL, mode=mode, group=group)))
        return doors

    def _admin_unix(self, undo: AsyncExitStack) -> socket.socket | None:
        path = self._config.admin.socket
        if path is None:
            return None
        listener = bind_listener(path, socket.SOCK_STREAM, ADMIN_SOCKET_MODE)
        inode = inode_of(path)
        undo.callback(unlink_if_same, path, inode)
        undo.callback(listener.close)
        return listener

    def _judge_bound(self, judged: Judged, addresses: AddressStatus, tokens: TokenBox) -> None:
        """Judge what was really bound; it all is undone where that is not what was asked for."""
        control, admin = self._config.control, self._config.admin
        if judged.control is not None and addresses.control is not None:
            allowed = control.allow_unauthenticated
            judge_bound(
                judged.control.asked, addresses.control, section="control", allow_unauthenticated=allowed
            )
        allowed = admin.allow_unauthenticated or tokens.tokens.asked_for
        judge_bound(judged.admin.asked, addresses.admin, section="admin", allow_unauthenticated=allowed)


def _tcp(bound: dict[str, str], name: str) -> str | None:
    return bound[name].removeprefix("tcp://") if name in bound else None


def _group(name: str | None) -> int | None:
    """Return the id of the sockets' group. Raises ConfigError."""
    if name is None:
        return None
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"control.socket_group: there is no group {name!r}") from None


def _log_visit(visit: Visit) -> None:
    knock = visit.knock
    fields = {"event": "connection", "endpoint": knock.domain, "peer": knock.address, "key": visit.name}
    if not visit.admitted:
        log.warning("refused a connection from %s: %s", knock.address, visit.reason, extra=fields)
    elif knock.domain == Admits.LOCAL:
        # The transport says localhost:UID:GID:PID.
        log.info("a connection by the Unix socket: uid, gid, pid %s", knock.address[10:], extra=fields)
    elif knock.domain == Admits.KEYS:
        log.info("a connection of key %s from %s", visit.name, knock.address, extra=fields)
    else:
        log.debug("a connection from %s", knock.address, extra=fields)


def _bind_failed(error: EndpointError, judged: Judged) -> GatewayError:
    """Turn what the transport says into what an operator reads."""
    for address, section in ((judged.control, "control"), (judged.curve, "control.curve")):
        if address is not None and error.address == f"tcp://{address.text}":
            number = errno.EADDRINUSE if isinstance(error, EndpointInUseError) else error.errno
            return bind_error(address, number, section=section, detail=str(error))
    if isinstance(error, EndpointInUseError):
        return AddressInUseError(
            str(error), advice="Stop the other one, or choose another --state-dir or socket."
        )
    return ConfigError(
        str(error),
        advice="Choose another path: control.socket, control.regions_socket, admin.socket.",
    )
