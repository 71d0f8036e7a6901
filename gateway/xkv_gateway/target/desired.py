"""The SPDK target as the configuration wants it. Pure.

What the gateway makes inside a target can be told from everything else there, without any memory of our own: the subsystem has
our model number beside the configured NQN and serial number, and bdevs, controllers, stores, volumes and keys have names that
begin with `xkv-`. The names of keys follow from the NQN and the path of their file, so that another file is another key.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from xkv_gateway.config.target import NVMF_PORT, PREFIX, split_address
from xkv_gateway.errors import ConfigError
from xkv_rpc.addresses import SpdkAddress, host_port

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_gateway.config import TargetConfig
    from xkv_gateway.config.target import TargetHost
    from xkv_gateway.networks import StorageNetworks

MODEL: Final = "xkv-gateway"
"""Model number of a subsystem that the gateway made."""
MAX_NAMESPACES: Final = 32
_UUID_SPACE: Final = uuid.UUID("0a4a4a5c-6f3b-5e0f-9a44-2f8a2f8f6a55")
"""For namespaces whose UUID follows from their NQN."""


@dataclass(frozen=True, slots=True)
class Listener:
    """An address where the subsystem is reached."""

    ip: str
    port: int

    @property
    def family(self) -> str:
        """As SPDK calls it."""
        return "IPv6" if ":" in self.ip else "IPv4"

    @property
    def params(self) -> dict[str, str]:
        """As SPDK's calls want it."""
        return {
            "trtype": "TCP",
            "adrfam": self.family,
            "traddr": self.ip,
            "trsvcid": str(self.port),
        }

    def __str__(self) -> str:
        return host_port(self.ip, self.port)


@dataclass(frozen=True, slots=True)
class Key:
    """A key's file, under the name that the target knows it by."""

    name: str
    path: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class HostAccess:
    """A host that may connect, and the keys it has to have."""

    nqn: str
    dhchap: Key | None
    dhchap_ctrl: Key | None
    psk: Key | None

    @property
    def keys(self) -> tuple[Key, ...]:
        """Those that there are."""
        return tuple(key for key in (self.dhchap, self.dhchap_ctrl, self.psk) if key is not None)


@dataclass(frozen=True, slots=True)
class Bdev:
    """What is behind the namespace, or behind the store of volumes."""

    kind: str
    """existing, aio, uring, malloc or nvme."""
    name: str
    file: str | None
    pci: str | None
    block_bytes: int
    size_bytes: int | None
    """malloc: exactly; else at least. None: whatever it has."""
    uuid: str | None
    """None: any."""
    fallocate: bool

    @property
    def bdev_name(self) -> str:
        """The bdev's own name: that of an SSD's is made from its controller's."""
        return f"{self.name}n1" if self.kind == "nvme" else self.name


@dataclass(frozen=True, slots=True)
class Volume:
    """A logical volume."""

    name: str
    store: str
    size_bytes: int
    cluster_bytes: int
    thin: bool

    @property
    def alias(self) -> str:
        """The name by which it is found; its own is a UUID."""
        return f"{self.store}/{self.name}"


@dataclass(frozen=True, slots=True)
class Transport:
    """NVMe/TCP."""

    max_io_bytes: int
    in_capsule_bytes: int
    queue_depth: int


@dataclass(frozen=True, slots=True)
class Startup:
    """What is settled before a target is initialised."""

    dhchap_digests: tuple[str, ...]
    dhchap_dhgroups: tuple[str, ...]
    tls_buffer_bytes: int | None


@dataclass(frozen=True, slots=True)
class DesiredTarget:
    """All of it."""

    rpc: SpdkAddress
    nqn: str
    serial: str
    listeners: tuple[Listener, ...]
    tls: bool
    allow_any_host: bool
    hosts: tuple[HostAccess, ...]
    transport: Transport
    startup: Startup
    bdev: Bdev
    volume: Volume | None
    nsid: int
    uuid: str
    nguid: str
    """32 hexadecimal digits."""

    @property
    def keys(self) -> dict[str, Key]:
        """Every key by its name."""
        return {key.name: key for host in self.hosts for key in host.keys}

    @property
    def key_prefix(self) -> str:
        """How the names of the keys of this subsystem begin."""
        return _key_prefix(self.nqn)


def desired_of(config: TargetConfig, storage: StorageNetworks, credentials: Path | None) -> DesiredTarget:
    """Return the target of `[target]`, where `rpc` is set.

    Args:
        config: the section.
        storage: where it may listen, and take orders.
        credentials: systemd's directory of credentials, where there is one.

    Raises:
        ConfigError: settings do not fit together.
        FabricRefusedError: an address is outside of the storage networks.
    """
    assert config.rpc is not None, "the caller asks for a target that is configured"
    _check(config)
    assert config.nqn is not None
    rpc = _rpc(config.rpc)
    if rpc.port is not None:
        storage.judge_target(rpc.host, "target.rpc")
    listeners = []
    for text in config.listeners:
        listener = Listener(*split_address(text, NVMF_PORT))
        storage.judge_target(listener.ip, "target.listeners")
        listeners.append(listener)
    namespace, lvol, bdev = config.namespace, config.lvol, config.bdev
    number = namespace.uuid or str(uuid.uuid5(_UUID_SPACE, f"{config.nqn}#{namespace.nsid}"))
    own_uuid = number if bdev.kind in {"aio", "uring", "malloc"} else None
    return DesiredTarget(
        rpc=rpc,
        nqn=config.nqn,
        serial=config.serial,
        listeners=tuple(listeners),
        tls=config.tls,
        allow_any_host=config.allow_any_host,
        hosts=tuple(_access(config.nqn, host, credentials) for host in config.hosts),
        transport=Transport(
            config.transport.max_io_size,
            config.transport.in_capsule_data_size,
            config.transport.max_queue_depth,
        ),
        startup=Startup(
            config.startup.dhchap_digests, config.startup.dhchap_dhgroups, config.startup.tls_buffer_size
        ),
        bdev=Bdev(
            bdev.kind,
            bdev.name,
            bdev.file,
            bdev.pci,
            bdev.block_size,
            bdev.size,
            bdev.uuid or own_uuid,
            bdev.fallocate,
        ),
        volume=None
        if lvol.name is None
        else Volume(lvol.name, lvol.store, lvol.size or 0, lvol.cluster_size, lvol.thin),
        nsid=namespace.nsid,
        uuid=number,
        nguid=(namespace.nguid or number).replace("-", ""),
    )


def _check(config: TargetConfig) -> None:
    """Check the rules that join settings. Raises ConfigError."""
    bdev, lvol = config.bdev, config.lvol
    nqns = {host.nqn for host in config.hosts}
    rules = (
        (config.nqn is not None, "nqn: the subsystem needs one"),
        (config.nqn != "nqn.2014-08.org.nvmexpress.discovery", "nqn: is that of discovery"),
        (bool(config.listeners), 'listeners: say where it listens, such as ["10.20.0.5:4420"]'),
        (
            bool(config.hosts) != config.allow_any_host,
            "hosts: name the hosts that may connect, or write allow_any_host = true: one of both",
        ),
        (len(nqns) == len(config.hosts), "hosts: one of them is there twice"),
        (
            not config.tls or (config.hosts and all(host.psk_file for host in config.hosts)),
            "tls: every host needs a psk_file",
        ),
        (
            (bdev.file is not None) == (bdev.kind in {"aio", "uring"}),
            "bdev.file: belongs to kind aio and uring, and they need it",
        ),
        ((bdev.pci is not None) == (bdev.kind == "nvme"), "bdev.pci: belongs to kind nvme, which needs it"),
        (bdev.kind != "malloc" or bdev.size is not None, "bdev.size: memory needs a size"),
        (
            bdev.kind != "malloc" or (bdev.size or 0) % bdev.block_size == 0,
            "bdev.size: must be whole blocks",
        ),
        (bdev.block_size & (bdev.block_size - 1) == 0, "bdev.block_size: must be a power of two"),
        (
            bdev.kind == "existing" or bdev.name.startswith(PREFIX),
            f"bdev.name: what the gateway makes begins with {PREFIX}",
        ),
        (lvol.name is None or lvol.size is not None, "lvol.size: a volume needs a size"),
        ((lvol.size or 0) % (1 << 20) == 0, "lvol.size: must be whole MiB"),
    )
    for holds, words in rules:
        if not holds:
            raise ConfigError(f"target.{words}")


def _rpc(text: str) -> SpdkAddress:
    if text.startswith("tcp://"):
        return SpdkAddress(*split_address(text.removeprefix("tcp://"), None))
    return SpdkAddress(text)


def _access(nqn: str, host: TargetHost, credentials: Path | None) -> HostAccess:
    def key(setting: str, file: str | None) -> Key | None:
        if file is None:
            return None
        path = file
        if not file.startswith("/"):
            if credentials is None:
                raise ConfigError(
                    f"target.hosts: {setting} = {file!r} is a systemd credential, and there are none here",
                    advice="Write the absolute path of a file, or run it as a service with LoadCredential=.",
                )
            path = str(credentials / file)
        return Key(_key_prefix(nqn) + _short(path), path)

    return HostAccess(
        host.nqn,
        key("dhchap_key_file", host.dhchap_key_file),
        key("dhchap_ctrl_key_file", host.dhchap_ctrl_key_file),
        key("psk_file", host.psk_file),
    )


def _key_prefix(nqn: str) -> str:
    return f"{PREFIX}{_short(nqn)}-"


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
