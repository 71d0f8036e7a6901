"""The file of API keys: hashes only, several keys a tenant, each with a public id by which it is revoked.

Text, one record a line, words separated by blanks; `#` begins a comment:

    xkv-frontend-keys 1
    salt 32 hexadecimal digits
    key ID TENANT HASH active [USER]
    key ID TENANT HASH revoked [USER]

HASH is HMAC-SHA256(salt, key). Keys are random (32 bytes) or have at least 24 characters, so that a fast hash is enough; the
salt keeps files apart and makes the place of a hash in a table unguessable. One hash is computed for every key presented,
right or wrong, and the table is asked for that hash: the time says nothing about how much of a guess was right.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from xkv_frontend.core.names import NameRefusedError, TenantName, UserName, tenant_name, user_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HEADER: Final = "xkv-frontend-keys 1"
SALT_BYTES: Final = 16
KEY_BYTES: Final = 32
KEY_CHARACTERS_MIN: Final = 24
KEY_CHARACTERS_MAX: Final = 512
KEYS_MAX: Final = 100_000
FILE_BYTES_MAX: Final = 32 << 20
_ID: Final = re.compile(r"[a-z0-9]{4,32}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_STATES: Final = {"active": True, "revoked": False}


class KeysFileError(ValueError):
    """The file is not one of keys. The text names the line, not its content."""


@dataclass(frozen=True, slots=True)
class Key:
    """One record."""

    id: str
    tenant: TenantName
    digest: bytes
    active: bool
    user: UserName | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """The content of a file."""

    salt: bytes
    records: Mapping[str, Key]
    """By id, in the order of the file."""

    def table(self) -> dict[bytes, Key]:
        """Return the active records by digest."""
        return {record.digest: record for record in self.records.values() if record.active}

    def digest(self, key: bytes) -> bytes:
        """Return the hash under which a key is kept: 32 bytes."""
        return hmac.digest(self.salt, key, hashlib.sha256)

    def tenants(self) -> frozenset[TenantName]:
        """Return the tenants with a key, revoked or not."""
        return frozenset(record.tenant for record in self.records.values())

    def add(
        self, tenant: TenantName, key: str, entropy: Callable[[int], bytes], user: UserName | None = None
    ) -> Keys:
        """Return the content with one more key.

        Raises:
            KeysFileError: The key is too short, too long, has blanks, or is there already; or there are too many.
        """
        if (
            not KEY_CHARACTERS_MIN <= len(key) <= KEY_CHARACTERS_MAX
            or not key.isascii()
            or not key.isprintable()
            or " " in key
        ):
            raise KeysFileError(
                f"a key has {KEY_CHARACTERS_MIN} to {KEY_CHARACTERS_MAX} printable characters, no blanks"
            )
        digest = self.digest(key.encode())
        if any(record.digest == digest for record in self.records.values()):
            raise KeysFileError("this key is in the file already")
        if len(self.records) >= KEYS_MAX:
            raise KeysFileError(f"a file holds at most {KEYS_MAX} keys")
        identifier = entropy(6).hex()
        return replace(
            self,
            records={**self.records, identifier: Key(identifier, tenant, digest, active=True, user=user)},
        )

    def revoke(self, identifier: str) -> Keys:
        """Return the content with one key revoked. Revoking twice is the same as once.

        Raises:
            KeysFileError: There is no such key.
        """
        if identifier not in self.records:
            raise KeysFileError("there is no key with this id")
        return replace(
            self, records={**self.records, identifier: replace(self.records[identifier], active=False)}
        )


def new_key(entropy: Callable[[int], bytes]) -> str:
    """Return a new random key."""
    return "xkv-" + base64.urlsafe_b64encode(entropy(KEY_BYTES)).rstrip(b"=").decode("ascii")


def empty_keys(entropy: Callable[[int], bytes]) -> Keys:
    """Return the content of a new file."""
    return Keys(entropy(SALT_BYTES), {})


def parse_keys(text: str) -> Keys:
    """Return the content of a file.

    Raises:
        KeysFileError: A line is not as above; two records have one id or one hash.
    """
    salt: bytes | None = None
    records: dict[str, Key] = {}
    digests: set[bytes] = set()
    lines = [(n, line.partition("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line]
    if not lines or lines[0][1] != HEADER:
        raise KeysFileError(f"the first line is not {HEADER!r}")
    for number, line in lines[1:]:
        match line.split():
            case ["salt", digits] if salt is None and re.fullmatch(r"[0-9a-f]{32}", digits):
                salt = bytes.fromhex(digits)
            case ["key", *words]:
                record = _record(words, number)
                if record.id in records or record.digest in digests:
                    raise KeysFileError(f"line {number}: this id or this key stands twice")
                records[record.id] = record
                digests.add(record.digest)
            case _:
                raise KeysFileError(f"line {number}: neither a salt nor a key")
    if salt is None:
        raise KeysFileError("there is no salt")
    if len(records) > KEYS_MAX:
        raise KeysFileError(f"a file holds at most {KEYS_MAX} keys")
    return Keys(salt, records)


def _record(words: list[str], number: int) -> Key:
    if len(words) not in (4, 5):
        raise KeysFileError(f"line {number}: a key is ID TENANT HASH active|revoked [USER]")
    identifier, tenant, digest, state = words[:4]
    if not _ID.fullmatch(identifier) or not _HASH.fullmatch(digest) or state not in _STATES:
        raise KeysFileError(f"line {number}: a key is ID TENANT HASH active|revoked [USER]")
    try:
        user = user_name(words[4]) if len(words) == 5 else None
        return Key(identifier, tenant_name(tenant), bytes.fromhex(digest), _STATES[state], user)
    except NameRefusedError as error:
        raise KeysFileError(f"line {number}: {error}") from None


def format_keys(keys: Keys) -> str:
    """Return the text of a file."""
    lines = [HEADER, f"salt {keys.salt.hex()}"]
    for record in keys.records.values():
        state = "active" if record.active else "revoked"
        user = f" {record.user}" if record.user else ""
        lines.append(f"key {record.id} {record.tenant} {record.digest.hex()} {state}{user}")
    return "\n".join(lines) + "\n"
