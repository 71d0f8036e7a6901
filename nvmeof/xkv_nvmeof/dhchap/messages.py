"""The messages of DH-HMAC-CHAP (Base 2.0, 8.13.3 and 8.13.5): encoded and decoded, little-endian.

offset | size | type  | field, the same in all messages
-------|------|-------|--------------------------------
0      | 1    | u8    | AUTH_TYPE: 00h common, 01h DH-HMAC-CHAP
1      | 1    | u8    | AUTH_ID: which message
4      | 2    | u16   | T_ID, transaction: chosen by the host, the same in all messages of a transaction
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import Final

from xkv_nvmeof.dhchap.crypto import Group, Hash

MESSAGE_BYTES_MAX: Final = 4096
"""Room for any message; what a host asks for in Authentication Receive."""
_DHCHAP: Final = 1
_LIST_BYTES: Final = 30
_NEGOTIATE: Final = Struct("<BBxxHBB")
_DESCRIPTOR: Final = Struct("<BxBB30s30s")
_CHALLENGE: Final = Struct("<BBxxHBxBBHI")
_REPLY: Final = Struct("<BBxxHBxBxHI")
_SUCCESS1: Final = Struct("<BBxxHBxB7x")
_SUCCESS2: Final = Struct("<BBxxH10x")
_FAILURE: Final = Struct("<BBxxHBB")
_HEAD: Final = Struct("<BBxxH")
assert _CHALLENGE.size == _REPLY.size == _SUCCESS1.size == _SUCCESS2.size == 16
assert _DESCRIPTOR.size == 64


class MessageId(IntEnum):
    """AUTH_TYPE * 256 + AUTH_ID."""

    NEGOTIATE = 0x000
    FAILURE1 = 0x0F1
    FAILURE2 = 0x0F0
    CHALLENGE = 0x101
    REPLY = 0x102
    SUCCESS1 = 0x103
    SUCCESS2 = 0x104


class Explanation(IntEnum):
    """Why an authentication failed: the reason code explanation of the one reason code 01h (Base 8.13.3)."""

    FAILED = 1
    PROTOCOL_NOT_USABLE = 2
    CONCATENATION_MISMATCH = 3
    HASH_NOT_USABLE = 4
    GROUP_NOT_USABLE = 5
    INCORRECT_PAYLOAD = 6
    INCORRECT_MESSAGE = 7


EXPLANATIONS: Final[dict[int, str]] = {
    Explanation.FAILED: "authentication failed",
    Explanation.PROTOCOL_NOT_USABLE: "no authentication protocol that both know",
    Explanation.CONCATENATION_MISMATCH: "secure channel concatenation mismatch",
    Explanation.HASH_NOT_USABLE: "no hash function that both allow",
    Explanation.GROUP_NOT_USABLE: "no Diffie-Hellman group that both allow",
    Explanation.INCORRECT_PAYLOAD: "a field of a message is wrong",
    Explanation.INCORRECT_MESSAGE: "a message out of order",
}


class MessageError(ValueError):
    """A message that is not what it should be; `explanation` is what the peer is told."""

    def __init__(self, reason: str, explanation: Explanation = Explanation.INCORRECT_PAYLOAD) -> None:
        super().__init__(reason)
        self.explanation = explanation


def message_id(data: bytes) -> tuple[int, int]:
    """Return AUTH_TYPE * 256 + AUTH_ID, and the transaction.

    Raises:
        MessageError: too short for a message.
    """
    if len(data) < _HEAD.size:
        raise MessageError(f"a message of {len(data)} bytes")
    kind, number, transaction = _HEAD.unpack_from(data)
    return kind << 8 | number, transaction


def _unpack(data: bytes, layout: Struct, name: str) -> tuple[int, ...]:
    if len(data) < layout.size:
        raise MessageError(f"{name} of {len(data)} bytes")
    return layout.unpack_from(data)[2:]


def _parts(data: bytes, start: int, *sizes: int) -> list[bytes]:
    """Return the values behind the fixed part, which must all be there; what follows is padding."""
    found = []
    for size in sizes:
        found.append(data[start : start + size])
        start += size
    if start > len(data):
        raise MessageError(f"a message of {len(data)} bytes that should have {start}")
    return found


@dataclass(frozen=True, slots=True)
class Negotiate:
    """AUTH_Negotiate, host to controller. Hashes and groups as numbers, unknown ones included, as listed."""

    transaction: int
    hashes: tuple[int, ...]
    groups: tuple[int, ...]
    concatenation: int = 0
    protocol: int = _DHCHAP

    def to_bytes(self) -> bytes:
        """Encode, with one protocol descriptor."""
        head = _NEGOTIATE.pack(0, 0, self.transaction, self.concatenation, 1)
        lists = bytes(self.hashes), bytes(self.groups)
        return head + _DESCRIPTOR.pack(self.protocol, len(self.hashes), len(self.groups), *lists)

    @classmethod
    def from_bytes(cls, data: bytes) -> Negotiate:
        """Decode; of several descriptors the first one of DH-HMAC-CHAP counts.

        Raises:
            MessageError: malformed, or without that protocol.
        """
        transaction, concatenation, count = _unpack(data, _NEGOTIATE, "AUTH_Negotiate")
        if len(data) != _NEGOTIATE.size + count * _DESCRIPTOR.size:
            raise MessageError(f"AUTH_Negotiate of {len(data)} bytes with {count} descriptors")
        for index in range(count):
            at = _NEGOTIATE.size + index * _DESCRIPTOR.size
            protocol, hash_count, group_count, hashes, groups = _DESCRIPTOR.unpack_from(data, at)
            if protocol != _DHCHAP:
                continue
            if max(hash_count, group_count) > _LIST_BYTES:
                raise MessageError("AUTH_Negotiate with a list that is too long")
            return cls(transaction, tuple(hashes[:hash_count]), tuple(groups[:group_count]), concatenation)
        raise MessageError("no descriptor of DH-HMAC-CHAP", Explanation.PROTOCOL_NOT_USABLE)


@dataclass(frozen=True, slots=True)
class Challenge:
    """DH-HMAC-CHAP_Challenge, controller to host."""

    transaction: int
    hash: Hash
    group: Group
    sequence: int
    challenge: bytes = field(repr=False)
    public: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """Encode."""
        numbers = (len(self.challenge), self.hash, self.group, len(self.public), self.sequence)
        return _CHALLENGE.pack(1, 1, self.transaction, *numbers) + self.challenge + self.public

    @classmethod
    def from_bytes(cls, data: bytes) -> Challenge:
        """Decode; bytes behind it are padding.

        Raises:
            MessageError: malformed, or a hash or group that does not exist.
        """
        transaction, size, hash_number, group_number, public_size, sequence = _unpack(
            data, _CHALLENGE, "Challenge"
        )
        if hash_number not in set(Hash):
            raise MessageError(f"hash {hash_number} in a Challenge", Explanation.HASH_NOT_USABLE)
        if group_number not in set(Group):
            raise MessageError(f"group {group_number} in a Challenge", Explanation.GROUP_NOT_USABLE)
        kind, group = Hash(hash_number), Group(group_number)
        if size != kind.size_bytes or sequence == 0:
            raise MessageError(f"a Challenge of {size} bytes with sequence {sequence}")
        _check_public(public_size, group)
        challenge, public = _parts(data, _CHALLENGE.size, size, public_size)
        return cls(transaction, kind, group, sequence, challenge, public)


@dataclass(frozen=True, slots=True)
class Reply:
    """DH-HMAC-CHAP_Reply, host to controller. `challenge` is empty when the controller need not prove anything."""

    transaction: int
    response: bytes = field(repr=False)
    sequence: int
    challenge: bytes = field(repr=False)
    public: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """Encode; an absent challenge is zeroes of the same length."""
        size = len(self.response)
        numbers = (size, bool(self.challenge), len(self.public), self.sequence)
        head = _REPLY.pack(1, 2, self.transaction, *numbers)
        return head + self.response + self.challenge.ljust(size, b"\0") + self.public

    @classmethod
    def from_bytes(cls, data: bytes, kind: Hash, group: Group) -> Reply:
        """Decode exactly one, in answer to a Challenge of that hash and group.

        Raises:
            MessageError: malformed.
        """
        transaction, size, challenged, public_size, sequence = _unpack(data, _REPLY, "Reply")
        if size != kind.size_bytes or challenged > 1 or (challenged and sequence == 0):
            raise MessageError("a Reply whose lengths or numbers do not fit the Challenge")
        _check_public(public_size, group)
        response, challenge, public = _parts(data, _REPLY.size, size, size, public_size)
        if len(data) != _REPLY.size + 2 * size + public_size:
            raise MessageError(f"a Reply of {len(data)} bytes")
        return cls(transaction, response, sequence, challenge if challenged else b"", public)


def _check_public(size: int, group: Group) -> None:
    if bool(size) != bool(group) or size > group.size_bytes or size % 4:
        raise MessageError(f"a public value of {size} bytes in {group.name}")


@dataclass(frozen=True, slots=True)
class Success1:
    """DH-HMAC-CHAP_Success1, controller to host. `response` is empty when the host has asked for none."""

    transaction: int
    size: int
    response: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """Encode."""
        return _SUCCESS1.pack(1, 3, self.transaction, self.size, bool(self.response)) + self.response

    @classmethod
    def from_bytes(cls, data: bytes) -> Success1:
        """Decode; bytes behind it are padding.

        Raises:
            MessageError: malformed.
        """
        transaction, size, valid = _unpack(data, _SUCCESS1, "Success1")
        if valid > 1:
            raise MessageError("RVALID of a Success1")
        (response,) = _parts(data, _SUCCESS1.size, size if valid else 0)
        return cls(transaction, size, response)


@dataclass(frozen=True, slots=True)
class Success2:
    """DH-HMAC-CHAP_Success2, host to controller: the controller has proved itself."""

    transaction: int

    def to_bytes(self) -> bytes:
        """Encode."""
        return _SUCCESS2.pack(1, 4, self.transaction)


@dataclass(frozen=True, slots=True)
class Failure:
    """AUTH_Failure1 (controller to host) or AUTH_Failure2 (host to controller)."""

    kind: MessageId
    transaction: int
    explanation: int
    reason: int = 1

    def to_bytes(self) -> bytes:
        """Encode."""
        return _FAILURE.pack(0, self.kind & 0xFF, self.transaction, self.reason, self.explanation)

    @classmethod
    def from_bytes(cls, data: bytes) -> Failure:
        """Decode; bytes behind it are padding.

        Raises:
            MessageError: too short.
        """
        transaction, reason, explanation = _unpack(data, _FAILURE, "AUTH_Failure")
        return cls(MessageId(data[1]), transaction, explanation, reason)
