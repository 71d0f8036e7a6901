"""Every setting of the gateway: name, type, bounds, default and one sentence.

The sample file, `config show`, the names of the environment variables and the error messages all follow from this.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from xkv_gateway.cardurl import parse_card_url
from xkv_gateway.config.fabric import FabricConfig
from xkv_gateway.config.fields import Host, HostId, HostNqn, NonEmpty, Port, Section, Size, SocketMode
from xkv_gateway.config.target import TargetConfig, TargetHost
from xkv_gateway.sizes import exact_size

MIB: Final = 1 << 20
GIB: Final = 1 << 30


def _card_url(value: str) -> str:
    parse_card_url(value)
    return value


class CardConfig(Section):
    """The card, and how it is used."""

    url: Annotated[str, AfterValidator(_card_url)] | None = Field(
        default=None,
        description="How the card is reached: nvme+tcp://ADDR:4420/NQN?nsid=1, kernel+tcp://... (the same, connected by"
        " Linux), /dev/... (a block device), or soft:PATH?size=16GiB (a file, for development and small set-ups). Default: a soft card of 16 GiB in the state directory, smaller"
        " where the disk has no room for that.",
        examples=["nvme+tcp://192.0.2.10:4420/nqn.2014-08.com.example:card0?nsid=1"],
    )
    wait: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether a start waits for a card that nobody answers for, as when the target boots later than the"
        ' gateway: "auto" = under a service manager (it is told, and READY=1 comes later), else the start ends with'
        " exit code 6. A card that answers and is not the right one, or refuses this host, ends it in any case.",
    )
    au: Size = Field(
        default=64 << 10,
        ge=4 << 10,
        le=16 << 20,
        description="Allocation unit: objects take whole units of this size. A power of two from 4KiB to 16MiB.",
    )
    durability: Literal["power", "process"] = Field(
        default="power",
        description='What a store must survive before it is acknowledged: "power" = a loss of power (the card is'
        ' flushed), "process" = a kill of the gateway.',
    )
    max_objects: int | None = Field(
        default=None,
        ge=1,
        le=1 << 31,
        description="How many objects the index has room for. Default: one for each allocation unit, at most 10 million.",
        examples=[1_000_000],
    )

    @model_validator(mode="after")
    def _power_of_two(self) -> Self:
        if self.au & (self.au - 1):
            raise ValueError("card.au: must be a power of two")
        return self


class LimitsConfig(Section):
    """What one request and one tenant may ask for."""

    keys: int = Field(default=4096, ge=1, le=65536, description="Keys in one request.")
    object_bytes: Size = Field(default=64 * MIB, ge=1, le=GIB, description="Bytes of one object.")
    inline_bytes: Size = Field(
        default=64 * MIB, ge=1, le=GIB, description="Payload bytes that travel inside one message."
    )
    lease_ms: int = Field(
        default=60_000, ge=1, le=60_000, description="Longest lease; a longer wish is clamped."
    )
    leases_per_scope: int = Field(
        default=4096, ge=1, le=1 << 20, description="Leases that one tenant may hold at a time."
    )
    leased_bytes_per_scope: Size | None = Field(
        default=None,
        ge=1,
        description="Bytes that one tenant may hold under leases at a time. Default: half of the card.",
        examples=["8GiB"],
    )
    regions_bytes: Size = Field(
        default=4 * GIB,
        ge=1,
        le=1 << 40,
        description="Shared memory that all clients together may attach as regions.",
    )


class CurveConfig(Section):
    """The control port's endpoint for clients with keys (CURVE), from wherever they come."""

    bind_address: Host | None = Field(
        default=None,
        description="Address to listen on, for clients with known keys only. Default: no such endpoint.",
        examples=["192.0.2.20"],
    )
    port: Port = Field(default=5559, description="TCP port; 0 lets the kernel choose.")
    keys: NonEmpty | None = Field(
        default=None,
        description="Directory of the keys (`xkv-gateway keys`). Default: keys in the state directory. The gateway's own"
        " pair may be a systemd credential named server.key_secret instead.",
        examples=["/etc/xkv-gateway/keys"],
    )


class ControlConfig(Section):
    """The control port, which connectors speak to."""

    open: bool = Field(
        default=True,
        description="Serve bind_address and port without keys. false: only the Unix socket and the endpoint with keys.",
    )
    bind_address: Host = Field(default="127.0.0.1", description="Address to listen on.")
    port: Port = Field(
        default=5557, description="TCP port; 0 lets the kernel choose (`xkv-gateway status` tells)."
    )
    socket: NonEmpty | None = Field(
        default=None,
        description="Path of a Unix socket that serves the same protocol. Default: none.",
        examples=["/run/xkv-gateway/control.sock"],
    )
    regions_socket: NonEmpty | None = Field(
        default=None,
        description="Path of the Unix socket through which clients attach shared memory."
        " Default: regions.sock in the state directory.",
        examples=["/run/xkv-gateway/regions.sock"],
    )
    socket_mode: SocketMode = Field(
        default="0600", description="Permissions of both Unix sockets: whoever may write may connect."
    )
    socket_group: NonEmpty | None = Field(
        default=None,
        description="Group of both Unix sockets. Default: the one that the gateway runs as.",
        examples=["vllm"],
    )
    allow_unauthenticated: bool = Field(
        default=False,
        description="Allow an address outside of loopback on the port without keys. Everybody who"
        " reaches it can read and write every tenant's cache.",
    )
    direct: bool = Field(
        default=False,
        description="Let clients on this host (loopback and the Unix socket; never those with keys) read and write the card"
        " themselves, by its storage network. It gives each of them the whole card, whatever its namespace: for one trust domain only.",
    )
    direct_grace_ms: int = Field(
        default=30_000,
        ge=1_000,
        le=600_000,
        description="How long space stays out of use to which such a client may still write, after its time. Longer than its"
        " commands may be on their way: the keep-alive time of its association, and some seconds.",
    )
    curve: CurveConfig = Field(default=CurveConfig(), description="The endpoint with keys.")
    limits: LimitsConfig = Field(default=LimitsConfig(), description="Limits of requests.")

    @model_validator(mode="after")
    def _one_trust_domain(self) -> Self:
        if self.direct and self.allow_unauthenticated:
            raise ValueError(
                "control.direct: not together with control.allow_unauthenticated, which lets in more than this host"
            )
        return self


class MetricsConfig(Section):
    """An address of its own for GET /metrics and /healthz: nothing else is there, and no token is asked for."""

    bind_address: Host | None = Field(
        default=None,
        description="Address to listen on; whoever reaches it can read the metrics. Default: no such address.",
        examples=["192.0.2.20"],
    )
    port: Port = Field(default=5560, description="TCP port; 0 lets the kernel choose.")


class AdminConfig(Section):
    """The admin port (HTTP): status, health, metrics."""

    bind_address: Host = Field(default="127.0.0.1", description="Address to listen on.")
    port: Port = Field(
        default=5558, description="TCP port; 0 lets the kernel choose (the start message tells)."
    )
    allow_unauthenticated: bool = Field(
        default=False,
        description="Allow an address outside of loopback although no token is configured.",
    )
    socket: NonEmpty | None = Field(
        default=None,
        description="Path of a Unix socket (mode 0600) that serves the same; no token is asked for there. Default: none.",
        examples=["/run/xkv-gateway/admin.sock"],
    )
    token_file: NonEmpty | None = Field(
        default=None,
        description="File (mode 0600) of the bearer token that may read and change. Default: the systemd credential"
        " admin-token, else none: whoever reaches the port may do everything.",
        examples=["/etc/xkv-gateway/admin-token"],
    )
    read_token_file: NonEmpty | None = Field(
        default=None,
        description="File of the token that may only read. Default: the systemd credential admin-read-token, else none.",
        examples=["/etc/xkv-gateway/admin-read-token"],
    )
    metrics: MetricsConfig = Field(default=MetricsConfig(), description="Metrics elsewhere.")


class EvictionConfig(Section):
    """Making room, and quotas."""

    policy: Literal["LRU", "IsolatedLRU", "noop"] = Field(
        default="LRU",
        description="Whose objects go when the card is full. LRU: the least recently used of all. IsolatedLRU: those"
        " of the tenant that uses the greatest part of its quota. noop: nobody's; a full card refuses stores, and"
        " quotas do not apply.",
    )
    trigger_watermark: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Share of the card's bytes in use (with soft enforcement also: of a tenant's quota) at which"
        " objects go in the background ...",
    )
    eviction_ratio: float = Field(
        default=0.2, gt=0, le=1, description="... and the share of what is in use that goes then."
    )
    interval_s: float = Field(
        default=1.0, ge=0.01, le=3600, description="Time between two looks in the background, in seconds."
    )
    enforcement: Literal["hard", "soft"] = Field(
        default="hard",
        description="hard: a store that would pass its tenant's quota evicts that tenant's oldest objects first, and"
        " what cannot fit is refused. soft: it is accepted, and the excess goes in the background.",
    )
    unregistered_limit: Size = Field(
        default=0,
        ge=0,
        le=(1 << 63) - 1,
        description="Quota of a tenant that has none of its own. Only with IsolatedLRU; with LRU it has no limit.",
    )
    store_wait_ms: int = Field(
        default=5_000,
        ge=0,
        le=60_000,
        description="How long a store waits for room that is being made for it.",
    )


class AdmissionConfig(Section):
    """What may be written."""

    bytes_per_day: Size = Field(
        default=0,
        ge=0,
        le=(1 << 63) - 1,
        description="Payload bytes that stores may write to the card within 24 hours, so that its medium lasts; what is"
        " beyond is refused. 0: no limit.",
        examples=["2TB"],
    )


class NvmeConfig(Section):
    """The NVMe/TCP initiator."""

    host_nqn: HostNqn | None = Field(
        default=None,
        description="NQN of this host, together with host_id. Default: made once and kept in the state directory.",
        examples=["nqn.2014-08.org.nvmexpress:uuid:6f1a2f0e-6c53-4a0b-8d34-0d8f2a9c1b7e"],
    )
    host_id: HostId | None = Field(
        default=None,
        description="Host identifier (a UUID), together with host_nqn. No two hosts may share it.",
        examples=["6f1a2f0e-6c53-4a0b-8d34-0d8f2a9c1b7e"],
    )
    io_queues: int = Field(
        default=2, ge=1, le=64, description="I/O queues to ask for; each is one TCP connection."
    )
    queue_depth: int = Field(default=64, ge=2, le=1024, description="Commands in flight on one I/O queue.")
    keep_alive_ms: int = Field(
        default=10_000, ge=1_000, le=600_000, description="Keep-alive timeout of the association."
    )
    command_timeout_ms: int = Field(
        default=10_000, ge=100, le=600_000, description="Deadline of one command."
    )
    connect_timeout_ms: int = Field(
        default=5_000, ge=100, le=600_000, description="Deadline of one attempt to connect."
    )
    header_digest: Literal["off", "preferred", "required"] = Field(
        default="off", description="CRC32C of PDU headers."
    )
    data_digest: Literal["off", "preferred", "required"] = Field(
        default="off", description="CRC32C of PDU payloads."
    )

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.host_nqn is None) != (self.host_id is None):
            missing = "host_nqn" if self.host_nqn is None else "host_id"
            raise ValueError(f"nvme.{missing}: host_nqn and host_id belong together; set both or none")
        return self


class LogConfig(Section):
    """What is logged, to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged. Changes with a reload (SIGHUP)."
    )
    format: Literal["text", "json"] = Field(
        default="text", description="Lines for people, or one JSON object a line."
    )


class Config(Section):
    """All settings."""

    state_dir: NonEmpty | None = Field(
        default=None,
        description="Directory of what is kept between runs (soft card, host identity, sockets). Default:"
        " $STATE_DIRECTORY (set by systemd, /var/lib/xkv-gateway there), else $XDG_STATE_HOME/xkv-gateway,"
        " else ~/.local/state/xkv-gateway.",
        examples=["/var/lib/xkv-gateway"],
    )
    card: CardConfig = Field(default=CardConfig(), description="The card.")
    control: ControlConfig = Field(default=ControlConfig(), description="The control port.")
    admin: AdminConfig = Field(default=AdminConfig(), description="The admin port (HTTP).")
    eviction: EvictionConfig = Field(default=EvictionConfig(), description="Making room.")
    admission: AdmissionConfig = Field(default=AdmissionConfig(), description="What may be written.")
    nvme: NvmeConfig = Field(default=NvmeConfig(), description="The NVMe/TCP initiator.")
    fabric: FabricConfig = Field(default=FabricConfig(), description="The storage network.")
    target: TargetConfig = Field(default=TargetConfig(), description="The SPDK target.")
    log: LogConfig = Field(default=LogConfig(), description="The log, on standard error.")


def show_value(value: object, *, size: bool) -> str:
    """Return `value` as TOML; sizes with their unit."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() if size:
            return f'"{exact_size(value)}"'
        case int() | float():
            return str(value)
        case TargetHost():
            return str(value)
        case tuple():
            return f"[{', '.join(show_value(item, size=False) for item in value)}]"
        case _:
            text = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{text}"'
