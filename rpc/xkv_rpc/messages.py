"""The requests and replies of control protocol 1 as data, its limits, and how a salt becomes a scope.

Keys, scopes, leases and regions are `bytes`; namespaces are `str`; sizes, offsets and lengths are bytes, times are
milliseconds. A request that the codec has decoded satisfies everything that its docstring says.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NewType, TypeAlias

PROTOCOL_VERSION: Final = 1
CHECKSUM_NAME: Final = "xxh3-64"
NAMESPACE_BYTES_MAX: Final = 64
SCOPE_BYTES_MAX: Final = 32
KEY_BYTES_MAX: Final = 256
TOKEN_BYTES: Final = 16
"""Length of a lease, ticket or region."""
TEXT_BYTES_MAX: Final = 1024
"""Length of `client` and `model` of hello."""
UINT64_MAX: Final = 2**64 - 1
DEFAULT_NAME: Final = "_default"
"""How the empty namespace and the empty scope are spelled outside; refused as a real name."""
SALT_CHARACTERS_MAX: Final = 128
_SALT_FORBIDDEN: Final = frozenset("@/\\\0")

PeerId = NewType("PeerId", bytes)
"""Who sent a request: hashable, opaque, lives as long as the peer's connection."""


def scope_of(salt: str) -> bytes:
    r"""Turn a `cache_salt` into the scope that keeps its tenant apart. The empty salt is the empty scope.

    Raises:
        ValueError: The salt has one of `@ / \ NUL`, has over 128 characters, is `_default`, or is not valid Unicode.
            The salt itself is not in the error.
    """
    if not salt:
        return b""
    if salt == DEFAULT_NAME:
        raise ValueError("the salt is the reserved name of the default")
    if len(salt) > SALT_CHARACTERS_MAX:
        raise ValueError(f"the salt has more than {SALT_CHARACTERS_MAX} characters")
    if not _SALT_FORBIDDEN.isdisjoint(salt):
        raise ValueError("the salt has one of the characters @ / \\ NUL")
    try:
        raw = salt.encode()
    except UnicodeEncodeError:
        # The encoder's error carries the salt as its argument: a secret, so it is not chained.
        raise ValueError("the salt is not valid Unicode") from None
    return hashlib.blake2b(raw, digest_size=16, person=b"xkv-scope-v1").digest()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for; told in `hello`."""

    keys: int = 4096
    """Keys a request."""
    object_bytes: int = 64 << 20
    inline_bytes: int = 64 << 20
    """Payload bytes in one message, either way."""
    lease_ms: int = 60_000
    """Longest lease (and ticket); what asks for more gets this."""


class LookupMode(StrEnum):
    """How a lookup counts."""

    PREFIX = "prefix"
    EACH = "each"


class LoadStatus(StrEnum):
    """Status of one key of a `load`, as on the wire."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    TOO_SMALL = "too_small"
    IO_ERROR = "io_error"


class StoreStatus(StrEnum):
    """Status of one key of a `store`, as on the wire."""

    STORED = "stored"
    EXISTS = "exists"
    IN_PROGRESS = "in_progress"
    OVER_QUOTA = "over_quota"
    NO_SPACE = "no_space"
    TOO_LARGE = "too_large"
    IO_ERROR = "io_error"
    CANCELLED = "cancelled"
    RESERVED = "reserved"
    """Only of `reserve`: the client may write it now."""


class CardState(StrEnum):
    """State of the card as told in `hello`."""

    ONLINE = "online"
    OFFLINE = "offline"
    RECOVERING = "recovering"


# --- requests ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is there? Optional; texts are at most 1024 bytes."""

    client: str
    model: str | None = None
    tokens_per_key: int | None = None


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there?"""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which keys are held? `lease_ms` is 0 (no lease) or at most the limit: it is clamped already."""

    ns: str
    scope: bytes
    keys: list[bytes]
    mode: LookupMode = LookupMode.PREFIX
    lease_ms: int = 0
    extents: bool = False
    """With a lease: and where do they lie? (feature `direct`)"""


@dataclass(frozen=True, slots=True)
class Load:
    """Give the bytes of the keys: inline, or where `region` is given into its ranges (offset, length), one a key.

    With a region, `offsets` and `lengths` are as long as `keys` and the ranges do not overlap; without, both are empty.
    Whether the ranges lie within the region is for the server to check.
    """

    ns: str
    scope: bytes
    keys: list[bytes]
    lease: bytes | None = None
    region: bytes | None = None
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Store:
    """Keep these bytes: one payload frame a key, or where `region` is given `sizes[i]` bytes at `offsets[i]` of it.

    No key occurs twice; `sizes` is as long as `keys`. Without a region each payload has exactly its size and `offsets`
    is empty; with one the ranges do not overlap, and whether they lie within it is for the server to check.
    """

    ns: str
    scope: bytes
    keys: list[bytes]
    sizes: list[int]
    region: bytes | None = None
    offsets: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Delete:
    """Forget the keys."""

    ns: str
    scope: bytes
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class Renew:
    """Let the lease live `lease_ms` (1 to the limit, clamped already) from now."""

    lease: bytes
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Release:
    """The lease is not needed any more."""

    lease: bytes


@dataclass(frozen=True, slots=True)
class Reserve:
    """Make room that the client writes to itself. No key occurs twice; `ttl_ms` is 1 to the limit, clamped already."""

    ns: str
    scope: bytes
    keys: list[bytes]
    sizes: list[int]
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Commit:
    """What was reserved is written and flushed: one checksum a reserved key, in their order; None: compute it."""

    ticket: bytes
    checksums: list[int | None]


@dataclass(frozen=True, slots=True)
class Abort:
    """What was reserved is not needed. `settled`: none of the client's writes can be executed any more."""

    ticket: bytes
    settled: bool


Request: TypeAlias = (
    Hello | Ping | Lookup | Load | Store | Delete | Renew | Release | Reserve | Commit | Abort
)

OPS: Final[dict[str, type[Request]]] = {
    "hello": Hello,
    "ping": Ping,
    "lookup": Lookup,
    "load": Load,
    "store": Store,
    "delete": Delete,
    "renew": Renew,
    "release": Release,
    "reserve": Reserve,
    "commit": Commit,
    "abort": Abort,
}
OP_OF: Final[dict[type[Request], str]] = {kind: op for op, kind in OPS.items()}


# --- replies ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CardInfo:
    """The card as told in `hello`. `uuid` is text (RFC 9562 form), empty while no card has ever been seen."""

    uuid: str
    state: CardState
    block_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Where clients with the feature `direct` find the card."""

    nqn: str
    nsid: int
    addresses: list[str]
    """`ADDRESS:PORT` each."""
    host_id: bytes | None = None
    """With the feature `direct`: the host identifier of the gateway. Where it has reserved the namespace, nobody else may write."""


@dataclass(frozen=True, slots=True)
class HelloReply:
    """Who serves, what it is backed by, and what it can do. `regions`: path of the Unix socket, or None."""

    server: str
    card: CardInfo
    limits: Limits
    features: list[str] = field(default_factory=list)
    regions: str | None = None
    target: TargetInfo | None = None
    direct_grace_ms: int | None = None
    """With the feature `direct`: how long what a client may still write to stays out of use."""


@dataclass(frozen=True, slots=True)
class PingReply:
    """Here."""


@dataclass(frozen=True, slots=True)
class LookupReply:
    """`sizes`: prefix mode, of the `hits` leading keys; each mode, one or None a key. `lease_ms`: granted, 0 without."""

    hits: int
    sizes: list[int | None]
    lease: bytes | None = None
    lease_ms: int = 0
    extents: list[list[list[int]]] | None = None
    """Where extents were asked for and a lease was granted: of each hit, [offset, length] on the namespace, in whole blocks."""
    checksums: list[int] | None = None
    """... and the checksum over exactly its bytes."""


@dataclass(frozen=True, slots=True)
class LoadReply:
    """One status (a `LoadStatus` value) and one size a key: None where the object is not held, or its size unknown.

    Inline, the reply carries one payload for each `ok`, in order.
    """

    results: list[str]
    sizes: list[int | None]


@dataclass(frozen=True, slots=True)
class StoreReply:
    """One status (a `StoreStatus` value) a key."""

    results: list[str]


@dataclass(frozen=True, slots=True)
class ReserveReply:
    """One status a key; where it is `reserved` the ranges to write, [offset, length] on the namespace, in whole blocks."""

    results: list[str]
    ticket: bytes | None
    extents: list[list[list[int]] | None]


@dataclass(frozen=True, slots=True)
class CommitReply:
    """One status (a `StoreStatus` value) a reserved key."""

    results: list[str]


@dataclass(frozen=True, slots=True)
class AbortReply:
    """Given back."""


@dataclass(frozen=True, slots=True)
class DeleteReply:
    """How many of the keys were held."""

    deleted: int


@dataclass(frozen=True, slots=True)
class RenewReply:
    """How long the lease lives from now."""

    lease_ms: int


@dataclass(frozen=True, slots=True)
class ReleaseReply:
    """Released."""


Reply: TypeAlias = (
    HelloReply
    | PingReply
    | LookupReply
    | LoadReply
    | StoreReply
    | DeleteReply
    | RenewReply
    | ReleaseReply
    | ReserveReply
    | CommitReply
    | AbortReply
)
