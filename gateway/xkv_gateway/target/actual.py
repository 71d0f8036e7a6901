"""The SPDK target as it is: what its answers say, read without trust in their shape. Pure.

A field that is missing, or is not what it was, is None: not known. Whoever compares decides what that means.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from xkv_gateway.target.desired import Listener

SPDK_NAME: Final = "SPDK"
PORT: Final = re.compile("[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class ActualBdev:
    """A bdev."""

    name: str
    aliases: tuple[str, ...] = ()
    product: str = ""
    block_bytes: int | None = None
    blocks: int | None = None
    uuid: str | None = None
    claimed: bool | None = None
    file: str | None = None
    """aio, uring: what is behind it."""
    pci: str | None = None
    """nvme: where it sits."""
    base: str | None = None
    """A volume: the bdev that its store is on."""

    @property
    def size_bytes(self) -> int | None:
        """Its size, as far as it is known."""
        return None if self.block_bytes is None or self.blocks is None else self.block_bytes * self.blocks

    def is_called(self, name: str) -> bool:
        """Return whether this is one of its names."""
        return name == self.name or name in self.aliases


@dataclass(frozen=True, slots=True)
class ActualNamespace:
    """A namespace."""

    nsid: int
    bdev: str
    uuid: str | None = None
    nguid: str | None = None


@dataclass(frozen=True, slots=True)
class ActualHost:
    """A host that may connect; names of keys."""

    nqn: str
    dhchap: str | None = None
    dhchap_ctrl: str | None = None
    psk: str | None = None


@dataclass(frozen=True, slots=True)
class ActualListener:
    """An address where a subsystem is reached."""

    address: Listener | None
    """None: not NVMe/TCP, or none that we understand."""
    params: Mapping[str, Any] = field(default_factory=dict)
    tls: bool = False


@dataclass(frozen=True, slots=True)
class ActualSubsystem:
    """A subsystem."""

    nqn: str
    serial: str | None = None
    model: str | None = None
    allow_any_host: bool | None = None
    hosts: tuple[ActualHost, ...] = ()
    namespaces: tuple[ActualNamespace, ...] = ()
    listeners: tuple[ActualListener, ...] = ()


@dataclass(frozen=True, slots=True)
class ActualStore:
    """A store of logical volumes."""

    name: str
    base: str | None
    cluster_bytes: int | None
    free_clusters: int | None


@dataclass(frozen=True, slots=True)
class ActualTarget:
    """All that counts of a running target."""

    pid: int | None
    version: str = ""
    started: bool = True
    """False: it waits to be told its settings, and has nothing else yet."""
    transport: Mapping[str, Any] | None = None
    """Of NVMe/TCP; None: there is none."""
    startup: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """Name -> path of its file."""
    bdevs: tuple[ActualBdev, ...] = ()
    stores: tuple[ActualStore, ...] = ()
    subsystems: tuple[ActualSubsystem, ...] = ()

    def bdev(self, name: str) -> ActualBdev | None:
        """Return the bdev that has this name."""
        return next((bdev for bdev in self.bdevs if bdev.is_called(name)), None)

    def store(self, name: str) -> ActualStore | None:
        """Return the store of this name."""
        return next((store for store in self.stores if store.name == name), None)

    def subsystem(self, nqn: str) -> ActualSubsystem | None:
        """Return the subsystem of this NQN."""
        return next((subsystem for subsystem in self.subsystems if subsystem.nqn == nqn), None)


class UnreadableAnswerError(Exception):
    """An answer is not even of the outer shape that it must have: nothing can be concluded from it."""


# --- reading ----------------------------------------------------------------------------------------------------


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _list(value: Any, what: str) -> list[Mapping[str, Any]]:
    """Return the entries of an answer that must be a list: an empty list is a fact, anything else is none."""
    if not isinstance(value, list):
        raise UnreadableAnswerError(f"the answer to {what} is no list")
    return _tables(value)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def read_methods(methods: Any) -> frozenset[str]:
    """Read `rpc_get_methods`."""
    if not isinstance(methods, list):
        raise UnreadableAnswerError("the answer to rpc_get_methods is no list")
    return frozenset(name for name in methods if isinstance(name, str))


def read_pid(reactors: Any) -> int | None:
    """Read `framework_get_reactors`."""
    return _number(_table(reactors).get("pid"))


def read_version(version: Any) -> str:
    """Read `spdk_get_version`."""
    text = _text(_table(version).get("version")) or ""
    return text.removeprefix(SPDK_NAME).strip()


def read_transport(transports: Any) -> Mapping[str, Any] | None:
    """Read `nvmf_get_transports`."""
    entries = _list(transports, "nvmf_get_transports")
    return next((entry for entry in entries if str(entry.get("trtype")).upper() == "TCP"), None)


def read_keys(keys: Any) -> dict[str, str | None]:
    """Read `keyring_get_keys`; keys that are removed and still in use are gone."""
    return {
        name: _text(entry.get("path"))
        for entry in _list(keys, "keyring_get_keys")
        if (name := _text(entry.get("name"))) is not None and entry.get("removed") is not True
    }


def read_bdevs(bdevs: Any) -> tuple[ActualBdev, ...]:
    """Read `bdev_get_bdevs`."""
    found = []
    for entry in _list(bdevs, "bdev_get_bdevs"):
        name = _text(entry.get("name"))
        if name is None:
            continue
        specific = _table(entry.get("driver_specific"))
        files = (_table(specific.get(kind)) for kind in ("aio", "uring"))
        file = next((path for table in files if (path := _text(table.get("filename")))), None)
        aliases = entry.get("aliases")
        found.append(
            ActualBdev(
                name=name,
                aliases=tuple(filter(None, map(_text, aliases))) if isinstance(aliases, list) else (),
                product=_text(entry.get("product_name")) or "",
                block_bytes=_number(entry.get("block_size")),
                blocks=_number(entry.get("num_blocks")),
                uuid=_text(entry.get("uuid")),
                claimed=_flag(entry.get("claimed")),
                file=file,
                pci=_pci(specific.get("nvme")),
                base=_text(_table(specific.get("lvol")).get("base_bdev")),
            )
        )
    return tuple(found)


def _pci(nvme: Any) -> str | None:
    """Return the PCI address: versions nest it in a list, or do not."""
    for table in [*_tables(nvme), _table(nvme)]:
        address = _text(table.get("pci_address")) or _text(_table(table.get("trid")).get("traddr"))
        if address is not None:
            return address.lower()
    return None


def read_stores(stores: Any) -> tuple[ActualStore, ...]:
    """Read `bdev_lvol_get_lvstores`."""
    return tuple(
        ActualStore(
            name=name,
            base=_text(entry.get("base_bdev")),
            cluster_bytes=_number(entry.get("cluster_size")),
            free_clusters=_number(entry.get("free_clusters")),
        )
        for entry in _list(stores, "bdev_lvol_get_lvstores")
        if (name := _text(entry.get("name"))) is not None
    )


def _listener(params: Mapping[str, Any], *, tls: bool) -> ActualListener:
    """Read an address."""
    ip, port = _text(params.get("traddr")), params.get("trsvcid")
    number = int(port) if isinstance(port, str) and PORT.fullmatch(port) else _number(port)
    if str(params.get("trtype")).upper() != "TCP" or ip is None or number is None:
        return ActualListener(None, params, tls)
    try:
        return ActualListener(Listener(str(ipaddress.ip_address(ip)), number), params, tls)
    except ValueError:
        return ActualListener(None, params, tls)


def read_subsystems(subsystems: Any, saved: Any) -> tuple[ActualSubsystem, ...]:
    """Read `nvmf_get_subsystems`, and from the saved configuration what it does not show: PSKs, and TLS of listeners."""
    psks: dict[tuple[str | None, str | None], str | None] = {}
    secure: set[tuple[str | None, str, int]] = set()
    for call in _tables(saved):
        params = _table(call.get("params"))
        nqn = _text(params.get("nqn"))
        if call.get("method") == "nvmf_subsystem_add_host":
            psks[nqn, _text(params.get("host"))] = _text(params.get("psk"))
        elif call.get("method") == "nvmf_subsystem_add_listener" and params.get("secure_channel") is True:
            address = _listener(_table(params.get("listen_address")), tls=True).address
            if address is not None:
                secure.add((nqn, address.ip, address.port))
    return tuple(
        _subsystem(nqn, entry, psks, secure)
        for entry in _list(subsystems, "nvmf_get_subsystems")
        if (nqn := _text(entry.get("nqn"))) is not None and entry.get("subtype") != "Discovery"
    )


def _subsystem(
    nqn: str,
    entry: Mapping[str, Any],
    psks: Mapping[tuple[str | None, str | None], str | None],
    secure: set[tuple[str | None, str, int]],
) -> ActualSubsystem:
    listeners = []
    for params in _tables(entry.get("listen_addresses")):
        listener = _listener(params, tls=False)
        address = listener.address
        tls = address is not None and (nqn, address.ip, address.port) in secure
        listeners.append(ActualListener(address, params, tls))
    return ActualSubsystem(
        nqn=nqn,
        serial=_text(entry.get("serial_number")),
        model=_text(entry.get("model_number")),
        allow_any_host=_flag(entry.get("allow_any_host")),
        hosts=tuple(
            ActualHost(
                name,
                _text(host.get("dhchap_key")),
                _text(host.get("dhchap_ctrlr_key")),
                psks.get((nqn, name)),
            )
            for host in _tables(entry.get("hosts"))
            if (name := _text(host.get("nqn"))) is not None
        ),
        namespaces=tuple(
            ActualNamespace(nsid, bdev, _text(space.get("uuid")), _text(space.get("nguid")))
            for space in _tables(entry.get("namespaces"))
            if (nsid := _number(space.get("nsid"))) is not None
            and (bdev := _text(space.get("bdev_name")) or _text(space.get("name"))) is not None
        ),
        listeners=tuple(listeners),
    )


def read_startup(saved: Any) -> Mapping[str, Any]:
    """Read from the saved configuration what can only be set before the start."""
    for call in _tables(saved):
        if call.get("method") == "nvmf_set_config":
            return _table(call.get("params"))
    return {}
