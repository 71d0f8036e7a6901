"""`[target]`: the SPDK target that the gateway looks after, as it shall be."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from xkv_gateway.config.fields import (
    LIST_ITEMS_MAX,
    KeyFile,
    NonEmpty,
    Nqn,
    Section,
    Size,
    Uuid,
    Words,
    tables,
)
from xkv_gateway.config.reasons import reason_of

MIB: Final = 1 << 20
PREFIX: Final = "xkv-"
"""What the gateway makes inside a target is called so; nothing else is ever deleted."""
RPC_SOCKET: Final = "/var/tmp/spdk.sock"  # noqa: S108 - where SPDK listens unless told otherwise
NVMF_PORT: Final = 4420
_SERIAL: Final = re.compile(r"[!-~]{1,20}", re.ASCII)
_PCI: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", re.ASCII)


def _own_name(value: str) -> str:
    if not re.fullmatch(rf"{PREFIX}[A-Za-z0-9_.-]{{1,50}}", value):
        raise ValueError(f"must begin with {PREFIX!r}, then letters, digits, '_', '.' or '-'")
    return value


def _serial(value: str) -> str:
    if not _SERIAL.fullmatch(value):
        raise ValueError("must be 1 to 20 printable ASCII characters without a space")
    return value


def _pci(value: str) -> str:
    if not _PCI.fullmatch(value.lower()):
        raise ValueError("must be a PCI address such as 0000:5e:00.0")
    return value.lower()


def split_address(text: str, default_port: int | None) -> tuple[str, int]:
    """Return the IP address and the port of `IP:PORT`, `[IPv6]:PORT`, or, with a default, of an address alone.

    Raises:
        ValueError: it is none; a name is none.
    """
    bare = text.removeprefix("[").removesuffix("]")
    try:
        if default_port is not None:
            return str(ipaddress.ip_address(bare)), default_port
    except ValueError:
        pass
    host, colon, port = text.rpartition(":")
    number = int(port) if colon and port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    if not 1 <= number <= 65535:
        raise ValueError(f"{text!r} must be an IP address and a port, such as 10.20.0.5:4420")
    try:
        return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))), number
    except ValueError:
        raise ValueError(f"{text!r}: the address must be an IP address, not a name") from None


def _listeners(value: tuple[str, ...]) -> tuple[str, ...]:
    for text in value:
        ip, _ = split_address(text, NVMF_PORT)
        if ipaddress.ip_address(ip).is_unspecified:
            raise ValueError(f"{text!r}: a target listens on addresses of the storage network, never on all")
    return value


def _rpc(value: str) -> str:
    if value.startswith("tcp://"):
        split_address(value.removeprefix("tcp://"), None)
    elif not value.startswith("/"):
        raise ValueError("must be the absolute path of a Unix socket, or tcp://IP:PORT")
    return value


class TargetHost(Section):
    """A host that may connect."""

    nqn: Nqn
    dhchap_key_file: KeyFile | None = None
    dhchap_ctrl_key_file: KeyFile | None = None
    psk_file: KeyFile | None = None

    @model_validator(mode="after")
    def _own_key_first(self) -> Self:
        if self.dhchap_ctrl_key_file is not None and self.dhchap_key_file is None:
            raise ValueError("dhchap_ctrl_key_file needs dhchap_key_file as well")
        return self

    def __str__(self) -> str:
        pairs = (f'{name} = "{value}"' for name, value in self.model_dump().items() if value is not None)
        return f"{{ {', '.join(pairs)} }}"


def _hosts(value: Any) -> Any:
    """Make the entries one by one, so that a mistake is named with its place."""
    found = []
    for index, entry in enumerate(tables(value)):
        if isinstance(entry, TargetHost):
            found.append(entry)
            continue
        if not isinstance(entry, Mapping):
            raise ValueError(f"[{index}]: must be a table")  # noqa: TRY004 - pydantic shows ValueErrors only
        try:
            found.append(TargetHost(**{str(name): item for name, item in entry.items()}))
        except ValidationError as error:
            details = error.errors(include_url=False)[0]
            place = ".".join(map(str, (f"[{index}]", *details["loc"])))
            raise ValueError(f"{place}: {reason_of(details)}") from None
    return tuple(found)


class TransportConfig(Section):
    """NVMe/TCP in the target. It is made once; on a target that has it already a difference is only told."""

    max_io_size: Size = Field(
        default=MIB, ge=8 << 10, le=16 << 20, description="Largest transfer of one command: a power of two."
    )
    in_capsule_data_size: Size = Field(
        default=4 << 10, ge=0, le=64 << 10, description="Data that may travel inside a command."
    )
    max_queue_depth: int = Field(default=128, ge=2, le=65535, description="Entries of a queue.")

    @model_validator(mode="after")
    def _power_of_two(self) -> Self:
        if self.max_io_size & (self.max_io_size - 1):
            raise ValueError("target.transport.max_io_size: must be a power of two")
        return self


class BdevConfig(Section):
    """What is behind the namespace."""

    kind: Literal["existing", "aio", "uring", "malloc", "nvme"] = Field(
        default="existing",
        description="existing: a bdev that something else makes. aio, uring: a file or block device. malloc: memory, which a"
        " restart of the target empties. nvme: an SSD, attached by its PCI address.",
    )
    name: NonEmpty = Field(
        default=f"{PREFIX}bdev0", description=f"Its name; what the gateway makes begins with {PREFIX}."
    )
    file: NonEmpty | None = Field(
        default=None, description="aio, uring: the path, on the target's machine.", examples=["/srv/card.img"]
    )
    pci: Annotated[str, AfterValidator(_pci)] | None = Field(
        default=None, description="nvme: the PCI address.", examples=["0000:5e:00.0"]
    )
    block_size: int = Field(
        default=4096, ge=512, le=65536, description="Bytes of a block (aio, uring, malloc)."
    )
    size: Size | None = Field(
        default=None,
        ge=MIB,
        description="malloc: its size. Otherwise the least that it must have; a file that has grown is looked at again.",
        examples=["1TiB"],
    )
    uuid: Uuid | None = Field(
        default=None,
        description="Which one it must be. Default: for aio, uring and malloc the UUID of the namespace, else any.",
        examples=["1f0c1d5c-3a4e-4a57-9d4b-2c7c3f6f8e21"],
    )
    fallocate: bool = Field(
        default=True, description="aio: let the card give blocks back to the file system."
    )


class LvolConfig(Section):
    """A logical volume on that bdev, as namespace in its place."""

    name: Annotated[str, AfterValidator(_own_name)] | None = Field(
        default=None, description="Name of the volume. Default: no volume.", examples=[f"{PREFIX}card"]
    )
    store: Annotated[str, AfterValidator(_own_name)] = Field(
        default=f"{PREFIX}store",
        description="Name of its store. It is made by `target apply --format-store` only.",
    )
    size: Size | None = Field(
        default=None, ge=MIB, description="Size: whole MiB. More than it has: it grows.", examples=["512GiB"]
    )
    cluster_size: Size = Field(default=4 * MIB, ge=MIB, le=1 << 30, description="Unit of the store.")
    thin: bool = Field(default=False, description="Take space only when it is written.")


class NamespaceConfig(Section):
    """The namespace: the same for ever, so that the card is known again."""

    nsid: int = Field(default=1, ge=1, le=1024, description="Its number.")
    uuid: Uuid | None = Field(
        default=None,
        description="Its UUID. Default: made from the NQN, so that it is always the same.",
        examples=["6f1a2f0e-6c53-4a0b-8d34-0d8f2a9c1b7e"],
    )
    nguid: Uuid | None = Field(
        default=None,
        description="Its NGUID. Default: the UUID.",
        examples=["6f1a2f0e6c534a0b8d340d8f2a9c1b7e"],
    )


class StartupConfig(Section):
    """What only a target that waits for us (--wait-for-rpc) can be told. Others keep what they have."""

    dhchap_digests: Words = Field(
        default=(), description="Hashes that may be used, such as sha384. Empty: all."
    )
    dhchap_dhgroups: Words = Field(
        default=(), description="Groups that may be used, such as ffdhe4096. Empty: all."
    )
    tls_buffer_size: Size | None = Field(
        default=None,
        ge=4 << 10,
        le=64 << 20,
        description="Buffers of TLS sockets; SPDK's own are too small for large transfers.",
        examples=["2MiB"],
    )


class TargetConfig(Section):
    """The SPDK target that the gateway makes, checks and makes anew (`xkv-gateway target`)."""

    rpc: Annotated[str, AfterValidator(_rpc)] | None = Field(
        default=None,
        description="Where the target takes orders: its Unix socket, or tcp://IP:PORT inside the storage networks, where"
        " something forwards to that socket. Whoever reaches it can do everything. Default: no target is looked after.",
        examples=[RPC_SOCKET],
    )
    nqn: Nqn | None = Field(
        default=None, description="NQN of the subsystem.", examples=["nqn.2014-08.com.example:card0"]
    )
    serial: Annotated[str, AfterValidator(_serial)] = Field(
        default="XKV0000000000001", description="Serial number of the subsystem."
    )
    listeners: Annotated[Words, AfterValidator(_listeners)] = Field(
        default=(),
        description='Where it listens, such as ["10.20.0.5:4420"]: IP addresses inside the storage networks.',
    )
    hosts: Annotated[tuple[TargetHost, ...], BeforeValidator(_hosts), Field(max_length=LIST_ITEMS_MAX)] = (
        Field(
            default=(),
            description="Who may connect: [[target.hosts]] with nqn and, for keys, dhchap_key_file, dhchap_ctrl_key_file (the"
            " target shows who it is, too) or psk_file (TLS). Files as the target sees them: absolute, mode 0600, its own; a bare"
            " name is a systemd credential.",
        )
    )
    allow_any_host: bool = Field(
        default=False, description="Let any host connect that reaches a listener: it has the whole card then."
    )
    tls: bool = Field(
        default=False,
        description="Listen with TLS, for hosts with a psk_file. The gateway's own initiator does not speak it yet.",
    )
    interval_s: float = Field(
        default=1.0, ge=0.1, le=60, description="How often `serve` looks whether the target is still right."
    )
    transport: TransportConfig = Field(default=TransportConfig(), description="NVMe/TCP.")
    bdev: BdevConfig = Field(default=BdevConfig(), description="What is behind the namespace.")
    lvol: LvolConfig = Field(default=LvolConfig(), description="A logical volume.")
    namespace: NamespaceConfig = Field(default=NamespaceConfig(), description="The namespace.")
    startup: StartupConfig = Field(default=StartupConfig(), description="Settings of its start.")
