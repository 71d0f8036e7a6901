"""The arithmetic of DH-HMAC-CHAP (Base 2.0, 8.13.5): hashes, groups of RFC 7919, responses. Pure functions.

A modular exponentiation in the largest group takes some 20 ms: call `public_value` and `shared_key` off the event loop.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import gmpy2

if TYPE_CHECKING:
    from collections.abc import Callable


class Hash(IntEnum):
    """Hash functions by their number on the wire (Base 8.13.5.1)."""

    SHA_256 = 1
    SHA_384 = 2
    SHA_512 = 3

    @property
    def hashlib_name(self) -> str:
        """Its name in `hashlib`."""
        return self.name.replace("_", "").lower()

    @property
    def size_bytes(self) -> int:
        """Length of its digest: of challenges and responses too."""
        return {Hash.SHA_256: 32, Hash.SHA_384: 48, Hash.SHA_512: 64}[self]


class Group(IntEnum):
    """Diffie-Hellman groups by their number on the wire (Base 8.13.5.1)."""

    NULL = 0
    """No exchange: whoever listens can try secrets against what was said."""
    FFDHE2048 = 1
    FFDHE3072 = 2
    FFDHE4096 = 3
    FFDHE6144 = 4
    FFDHE8192 = 5

    @property
    def size_bytes(self) -> int:
        """Length of a public value and of the shared key; 0 for NULL."""
        return _SHAPES[self][0] // 8 if self else 0


_SHAPES: Final[dict[Group, tuple[int, int, int]]] = {
    Group.FFDHE2048: (2048, 560_316, 225),
    Group.FFDHE3072: (3072, 2_625_351, 275),
    Group.FFDHE4096: (4096, 5_736_041, 325),
    Group.FFDHE6144: (6144, 15_705_020, 375),
    Group.FFDHE8192: (8192, 10_965_728, 400),
}
"""Bits of the prime, the constant X of its formula, and the least bits of an exponent (RFC 7919, appendix A, 5.2)."""
_GENERATOR: Final = 2


class BadPublicValue(ValueError):  # noqa: N818
    """A public value that would give the shared key away, or that is none of the group. The peer is at fault."""


@functools.cache
def prime(group: Group) -> int:
    """Return the prime of a group: 2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1 (RFC 7919, appendix A)."""
    bits, constant, _exponent_bits = _SHAPES[group]
    with gmpy2.context(gmpy2.get_context(), precision=bits, round=gmpy2.RoundDown):
        e = int(gmpy2.floor(gmpy2.mul_2exp(gmpy2.exp(1), bits - 130)))
    return (1 << bits) - (1 << bits - 64) + (e + constant << 64) - 1


def new_exponent(group: Group, entropy: Callable[[int], bytes]) -> int:
    """Return a fresh private exponent; 0 for NULL."""
    if group is Group.NULL:
        return 0
    size_bytes = -(-_SHAPES[group][2] // 8)
    return int.from_bytes(entropy(size_bytes), "big") | 1 << (size_bytes * 8 - 1)


def public_value(group: Group, exponent: int) -> bytes:
    """Return the public value of an exponent, as long as the prime; nothing for NULL."""
    return b"" if group is Group.NULL else _power(group, _GENERATOR, exponent)


def shared_key(group: Group, exponent: int, peer_value: bytes) -> bytes:
    """Return what both sides know and nobody else, as long as the prime; nothing for NULL.

    Raises:
        BadPublicValue: the peer's value is not in 2..p-2, or longer than the prime.
    """
    if group is Group.NULL:
        if peer_value:
            raise BadPublicValue("a public value in the NULL group")
        return b""
    value = int.from_bytes(peer_value, "big")
    if len(peer_value) > group.size_bytes or not 1 < value < prime(group) - 1:
        raise BadPublicValue(f"a public value outside of {group.name}")
    return _power(group, value, exponent)


def _power(group: Group, base: int, exponent: int) -> bytes:
    return int(gmpy2.powmod_sec(base, exponent, prime(group))).to_bytes(group.size_bytes, "big")


def host_response(
    kind: Hash,
    key: bytes,
    challenge: bytes,
    sequence: int,
    transaction: int,
    nqns: tuple[str, str],
    shared: bytes,
) -> bytes:
    """Return the host's answer to the controller's challenge; `nqns` are those of host and subsystem (8.13.5.4)."""
    host, subsystem = nqns
    text = b"HostHost" + host.encode() + b"\0" + subsystem.encode()
    return _response(kind, key, challenge, sequence, transaction, text, shared)


def controller_response(
    kind: Hash,
    key: bytes,
    challenge: bytes,
    sequence: int,
    transaction: int,
    nqns: tuple[str, str],
    shared: bytes,
) -> bytes:
    """Return the controller's answer to the host's challenge; `nqns` are those of host and subsystem (8.13.5.5)."""
    host, subsystem = nqns
    text = b"Controller" + subsystem.encode() + b"\0" + host.encode()
    return _response(kind, key, challenge, sequence, transaction, text, shared)


def _response(
    kind: Hash, key: bytes, challenge: bytes, sequence: int, transaction: int, text: bytes, shared: bytes
) -> bytes:
    """HMAC over challenge (augmented by the shared key, if there is one), sequence, transaction, SC_C = 0 and names."""
    name = kind.hashlib_name
    if shared:
        challenge = hmac.digest(hashlib.new(name, shared).digest(), challenge, name)
    numbers = sequence.to_bytes(4, "little") + transaction.to_bytes(2, "little") + b"\0"
    return hmac.digest(key, challenge + numbers + text, name)


def same(one: bytes, other: bytes) -> bool:
    """Compare two responses in a time that does not depend on where they differ."""
    return hmac.compare_digest(one, other)
