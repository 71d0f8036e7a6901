"""Card URLs: how the card is reached.

nvme+tcp://ADDR[:4420]/NQN[?nsid=1]   a namespace behind an NVMe/TCP controller; several addresses with commas
kernel+tcp://ADDR[:4420]/NQN[?nsid=1&nguid=...&uuid=...]
                                      the same, connected by Linux (nvme-cli), and used as a block device
/dev/...                              a block device that something else attached
soft:PATH[?size=16GiB]                a file, served over NVMe/TCP on loopback by a process of ours
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from xkv_gateway.sizes import exact_size, parse_size
from xkv_rpc.addresses import host_port

NVME_TCP_PORT: Final = 4420
NQN_BYTES_MAX: Final = 223
"""NVM Express Base 2.0, 4.5: an NQN is at most 223 bytes."""
SOFT_CARD_BYTES_MIN: Final = 64 << 20
SOFT_CARD_BLOCK_BYTES: Final = 4096

ADDRESSES_MAX: Final = 8
"""Addresses of one card."""
_NQN: Final = re.compile(r"nqn\.[0-9]{4}-[0-9]{2}\.[!-~]+", re.ASCII)
_KNOWN: Final = "write nvme+tcp://ADDR:4420/NQN?nsid=1, kernel+tcp://ADDR:4420/NQN?nsid=1, /dev/... or soft:PATH?size=16GiB"


@dataclass(frozen=True, slots=True)
class _BehindController:
    """A namespace behind an NVMe/TCP controller."""

    host: str
    port: int
    nqn: str
    nsid: int

    @property
    def address(self) -> str:
        """`HOST:PORT`, IPv6 in brackets."""
        return host_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class TcpCardUrl(_BehindController):
    """A namespace that our own initiator reaches, perhaps at several addresses: `portals` are those after the first."""

    portals: tuple[tuple[str, int], ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """All of them, `HOST:PORT`, IPv6 in brackets."""
        return (self.address, *(host_port(host, port) for host, port in self.portals))

    def __str__(self) -> str:
        """Return the canonical URL; it never holds a secret."""
        return f"nvme+tcp://{','.join(self.addresses)}/{self.nqn}?nsid={self.nsid}"


@dataclass(frozen=True, slots=True)
class KernelCardUrl(_BehindController):
    """A namespace that Linux reaches. `nguid` and `uuid` have 16 bytes, or none where the URL does not say which it has to be."""

    nguid: bytes = b""
    uuid: bytes = b""

    def __str__(self) -> str:
        """Return the canonical URL."""
        ids = "".join(
            f"&{name}={uuid.UUID(bytes=value)}"
            for name, value in (("nguid", self.nguid), ("uuid", self.uuid))
            if value
        )
        return f"kernel+tcp://{self.address}/{self.nqn}?nsid={self.nsid}{ids}"


@dataclass(frozen=True, slots=True)
class NodeCardUrl:
    """A block device of this host."""

    path: Path

    def __str__(self) -> str:
        """Return the path."""
        return str(self.path)


@dataclass(frozen=True, slots=True)
class SoftCardUrl:
    """A file that a process of ours serves. `size_bytes` is None where the URL does not say it."""

    path: Path
    size_bytes: int | None

    def __str__(self) -> str:
        """Return the canonical URL."""
        query = "" if self.size_bytes is None else f"?size={exact_size(self.size_bytes)}"
        return f"soft:{self.path}{query}"


CardUrl = TcpCardUrl | KernelCardUrl | NodeCardUrl | SoftCardUrl


def parse_card_url(text: str) -> CardUrl:
    """Return what `text` names.

    Raises:
        ValueError: not a card URL; the message names the part that is wrong.
    """
    if text.startswith("soft:"):
        return _parse_soft(text)
    if text.startswith("nvme+tcp:"):
        first, portals = _split_portals(text)
        host, port, nqn, given = _parse_tcp(first, "nsid")
        if len({(host, port), *portals}) <= len(portals):
            raise ValueError(f"card URL {text!r}: an address is given twice")
        return TcpCardUrl(host, port, nqn, _nsid(first, given), portals)
    if text.startswith("kernel+tcp:"):
        host, port, nqn, given = _parse_tcp(text, "nsid", "nguid", "uuid")
        ids = {name: _id(text, name, given[name]) for name in ("nguid", "uuid") if name in given}
        return KernelCardUrl(host, port, nqn, _nsid(text, given), **ids)
    if text.startswith("/dev/"):
        if "\0" in text or text.endswith("/"):
            raise ValueError(f"card URL {text!r}: the path names no device")
        return NodeCardUrl(Path(text))
    raise ValueError(f"card URL {text!r}: unknown scheme; {_KNOWN}")


def _split_portals(text: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return the URL with its first address alone, and the others."""
    scheme, slashes, rest = text.partition("//")
    authority, slash, path = rest.partition("/")
    first, *others = authority.split(",")
    if len(others) >= ADDRESSES_MAX:
        raise ValueError(f"card URL {text!r}: at most {ADDRESSES_MAX} addresses")
    try:
        portals = tuple(_address(text, urlsplit(f"//{other}")) for other in others)
    except ValueError as error:
        raise ValueError(
            str(error) if "card URL" in str(error) else f"card URL {text!r}: address: {error}"
        ) from None
    return f"{scheme}{slashes}{first}{slash}{path}", portals


def _query(text: str, query: str, *known: str) -> dict[str, str]:
    """Return the parameters, each of them known and given once."""
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=8)
    except ValueError:
        raise ValueError(f"card URL {text!r}: the part after '?' must be {known[0]}=VALUE") from None
    given: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            names = ", ".join(known)
            raise ValueError(f"card URL {text!r}: unknown parameter {name!r}; known here: {names}")
        if name in given:
            raise ValueError(f"card URL {text!r}: parameter {name!r} is given twice")
        given[name] = value
    return given


def _parse_soft(text: str) -> SoftCardUrl:
    rest, _, query = text.removeprefix("soft:").partition("?")
    if rest.startswith("//") or not rest:
        raise ValueError(f"card URL {text!r}: the path is missing; write soft:PATH?size=16GiB")
    if "\0" in rest:
        raise ValueError(f"card URL {text!r}: the path holds a NUL byte")
    value = _query(text, query, "size").get("size")
    if value is None:
        return SoftCardUrl(path=Path(rest).expanduser(), size_bytes=None)
    try:
        size_bytes = parse_size(value)
    except ValueError as error:
        raise ValueError(f"card URL {text!r}: size: {error}") from None
    if size_bytes < SOFT_CARD_BYTES_MIN or size_bytes % SOFT_CARD_BLOCK_BYTES:
        raise ValueError(
            f"card URL {text!r}: size: must be at least {exact_size(SOFT_CARD_BYTES_MIN)} "
            f"and a multiple of {SOFT_CARD_BLOCK_BYTES}"
        )
    return SoftCardUrl(path=Path(rest).expanduser(), size_bytes=size_bytes)


def _address(text: str, parts: SplitResult) -> tuple[str, int]:
    """Return host and port of the authority."""
    if parts.username is not None or parts.password is not None:
        raise ValueError("card URL: the address must not hold a user name or a password")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"card URL {text!r}: port: must be a number from 1 to 65535") from None
    if port == 0:
        raise ValueError(f"card URL {text!r}: port: must be a number from 1 to 65535")
    if not parts.hostname:
        raise ValueError(f"card URL {text!r}: the address is missing")
    return parts.hostname, NVME_TCP_PORT if port is None else port


def _parse_tcp(text: str, *known: str) -> tuple[str, int, str, dict[str, str]]:
    """Return host, port, NQN and parameters."""
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ValueError(f"card URL {text!r}: address: {error}") from None
    host, port = _address(text, parts)
    if parts.fragment:
        raise ValueError(f"card URL {text!r}: '#' has no meaning here")
    nqn = unquote(parts.path.removeprefix("/"))
    if not nqn:
        raise ValueError(f"card URL {text!r}: the NQN of the subsystem is missing after the address")
    if len(nqn.encode()) > NQN_BYTES_MAX or not _NQN.fullmatch(nqn):
        raise ValueError(
            f"card URL {text!r}: NQN: must look like nqn.YYYY-MM.DOMAIN:NAME and have at most {NQN_BYTES_MAX} bytes"
        )
    return host, port, nqn, _query(text, parts.query, *known)


def _nsid(text: str, given: dict[str, str]) -> int:
    value = given.get("nsid", "1")
    if len(value) > 10 or not value.isascii() or not value.isdecimal() or not 1 <= int(value) <= 0xFFFFFFFE:
        raise ValueError(f"card URL {text!r}: nsid: must be a number from 1 to 4294967294")
    return int(value)


def _id(text: str, name: str, value: str) -> bytes:
    try:
        found = uuid.UUID(value).bytes
    except ValueError:
        found = bytes(16)
    if not any(found):
        raise ValueError(f"card URL {text!r}: {name}: must be 32 hexadecimal digits, not all zero")
    return found
