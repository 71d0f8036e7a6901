"""Who may come in, and what for: endpoints, keys, grants, and the judgement of every handshake. Pure.

The transport asks about each connection before its first message (rfc.zeromq.org, 27/ZAP): by the address of the peer
where there are no keys, by its key where there are. What an endpoint admits is the name of its ZAP domain. Whatever is not
expressly let in stays out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from xkv_rpc.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OPEN_USER: Final = "open"
"""The user id of peers that were let in without a key; no key is so short."""
KEY_CHARACTERS: Final = 40
"""A CURVE key is 32 bytes, in Z85."""


class Admits(StrEnum):
    """Whom an endpoint lets in; each endpoint has one mechanism."""

    LOOPBACK = "loopback"
    """Peers whose address is a loopback one, whatever was bound; no keys."""
    ANYONE = "anyone"
    """Everybody who reaches it; no keys."""
    LOCAL = "local"
    """Processes that may open the Unix socket; no keys."""
    KEYS = "keys"
    """Whoever has a known CURVE key, and nobody else, from wherever."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, in Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs for a CURVE endpoint, in Z85: whom it trusts, and who it is."""

    server_public: str
    pair: KeyPair


@dataclass(frozen=True, slots=True)
class Grant:
    """What a peer may touch."""

    name: str
    """The operator's name for the key; empty: no key was needed."""
    namespaces: frozenset[str] | None
    """None: every namespace."""
    direct: bool = False
    """Whether its holder may read and write the card itself, all of it. No key grants that: it would grant every namespace."""

    def covers(self, namespace: str) -> bool:
        """Return whether this namespace may be touched."""
        return self.namespaces is None or namespace in self.namespaces


EVERYTHING: Final = Grant("", None, direct=True)
"""The grant of peers for which no key is needed."""


@dataclass(frozen=True, slots=True)
class Door:
    """An endpoint and whom it admits."""

    endpoint: str
    """`tcp://ADDRESS:PORT` or `ipc://PATH`."""
    admits: Admits
    keys: KeyPair | None = None
    """The server's own pair; exactly where keys are admitted."""
    mode: int = 0o600
    """Permissions of a Unix socket."""
    group: int | None = None
    """Group of a Unix socket; None: as it comes."""

    def __post_init__(self) -> None:
        assert (self.keys is not None) == (self.admits is Admits.KEYS), "keys and mechanism belong together"
        assert (self.admits is Admits.LOCAL) == self.endpoint.startswith("ipc://"), "local is a Unix socket"


@dataclass(frozen=True, slots=True)
class Knock:
    """What the transport asks about a connection."""

    domain: str
    address: str
    """IP address; of a Unix socket `localhost:UID:GID:PID`."""
    mechanism: str
    key: str
    """The client's public key in Z85, proven; empty: there is none."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A knock and what became of it."""

    knock: Knock
    admitted: bool
    reason: str
    """For people; no secret."""
    user: str = ""
    """What the transport then says about each message of the connection."""
    name: str = ""
    """The operator's name for the key."""


class Doorkeeper:
    """Judges handshakes, and knows what each key may touch now.

    `judge` is for one thread at a time, `replace` and `grant_of` for one other: between them goes one reference.

    Args:
        on_visit: told of each judgement, in the thread that judges.
        barred: tells of an IP address whether nobody is let in from there, whatever else speaks for it.
    """

    def __init__(
        self,
        on_visit: Callable[[Visit], None] | None = None,
        barred: Callable[[str], bool] | None = None,
    ) -> None:
        self._on_visit = on_visit
        self._barred = barred
        self._grants: Mapping[str, Grant] = {}
        self.admitted = 0
        self.refused = 0

    def replace(self, grants: Mapping[str, Grant]) -> None:
        """Know these keys and no others, from the next message on: also on connections that are open."""
        self._grants = dict(grants)

    def judge(self, knock: Knock) -> Visit:
        """Decide about a connection."""
        visit = self._judged(knock)
        if visit.admitted:
            self.admitted += 1
        else:
            self.refused += 1
        if self._on_visit is not None:
            self._on_visit(visit)
        return visit

    def _judged(self, knock: Knock) -> Visit:
        if self._barred is not None and knock.domain != Admits.LOCAL and _holds(self._barred, knock.address):
            return Visit(knock, admitted=False, reason="from the storage network")
        match knock.domain, knock.mechanism:
            case Admits.KEYS, "CURVE":
                grant = self._grants.get(knock.key)
                if grant is None:
                    return Visit(knock, admitted=False, reason="its key is not known")
                return Visit(knock, admitted=True, reason="known key", user=knock.key, name=grant.name)
            case Admits.LOOPBACK, "NULL":
                if not _holds(is_loopback, knock.address):
                    return Visit(knock, admitted=False, reason="not from loopback, and without a key")
                return Visit(knock, admitted=True, reason="from loopback", user=OPEN_USER)
            case Admits.ANYONE, "NULL":
                return Visit(knock, admitted=True, reason="the endpoint is open", user=OPEN_USER)
            case Admits.LOCAL, "NULL":
                return Visit(knock, admitted=True, reason="by the Unix socket", user=OPEN_USER)
        return Visit(knock, admitted=False, reason="not the mechanism of this endpoint")

    def grant_of(self, user: str) -> Grant | None:
        """Return what the sender of a message may touch; None: it is not, or no longer, known."""
        return EVERYTHING if user == OPEN_USER else self._grants.get(user)


def _holds(rule: Callable[[str], bool], address: str) -> bool:
    try:
        return rule(address)
    except ValueError:
        return False
