"""Secrets in the form `DHHC-1:hh:BASE64:` (Base 2.0, 8.13.5.8): read, made, and transformed for the one who has them.

`hh` says with which hash the secret is transformed before use: 00 none, 01 SHA-256, 02 SHA-384, 03 SHA-512. The base64
holds 32, 48 or 64 bytes of secret and their CRC-32, little-endian.
"""

from __future__ import annotations

import binascii
import hmac
import re
import zlib
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.dhchap.crypto import Hash

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET_BYTES: Final = (32, 48, 64)
SECRET_TEXT_MAX: Final = 256
"""A longer text is no secret; a file of secrets is read no further."""
_CRC_BYTES: Final = 4
_FORM: Final = re.compile(r"DHHC-1:([0-9a-fA-F]{2}):([0-9A-Za-z+/=]{1,200}):", re.ASCII)
_PURPOSE: Final = b"NVMe-over-Fabrics"


class SecretFormatError(ValueError):
    """A text that is no secret. Who wrote it is at fault; the message never holds a part of it."""


class DhchapSecret:
    """One secret. It has no text form: neither `repr` nor `str` shows anything of it."""

    __slots__ = ("_secret", "transform")

    def __init__(self, secret: bytes, transform: Hash | None) -> None:
        assert len(secret) in SECRET_BYTES
        self._secret = secret
        self.transform = transform
        """The hash with which it is transformed; None: it is used as it is."""

    def __repr__(self) -> str:
        """Show that it is a secret, and no more."""
        return "DhchapSecret(...)"

    @classmethod
    def parse(cls, text: str) -> DhchapSecret:
        """Return the secret that `text` holds; white space around it is ignored.

        Raises:
            SecretFormatError: it is none; the message says what is wrong without showing it.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise SecretFormatError("not of the form DHHC-1:hh:BASE64:")
        number = int(match[1], 16)
        if number and number not in set(Hash):
            raise SecretFormatError("the hash after DHHC-1 is none of 00, 01, 02, 03")
        try:
            data = binascii.a2b_base64(match[2], strict_mode=True)
        except binascii.Error:
            raise SecretFormatError("the part behind the hash is not base64") from None
        secret, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
        if len(secret) not in SECRET_BYTES:
            raise SecretFormatError("the secret has neither 32, 48 nor 64 bytes")
        if zlib.crc32(secret).to_bytes(_CRC_BYTES, "little") != crc:
            raise SecretFormatError("the CRC-32 of the secret does not match: it was cut or mistyped")
        return cls(secret, Hash(number) if number else None)

    def is_same_as(self, other: DhchapSecret) -> bool:
        """Tell whether both are one secret, to be used in the same way."""
        return self.transform == other.transform and hmac.compare_digest(self._secret, other._secret)

    def key_of(self, nqn: str) -> bytes:
        """Return the key with which the owner of the secret, named by its NQN, answers challenges."""
        if self.transform is None:
            return self._secret
        return hmac.digest(self._secret, nqn.encode() + _PURPOSE, self.transform.hashlib_name)


def new_dhchap_secret(transform: Hash | None, entropy: Callable[[int], bytes]) -> str:
    """Return a fresh secret as text: as long as the hash, or 32 bytes where it is not transformed."""
    secret = entropy(transform.size_bytes if transform else SECRET_BYTES[0])
    data = secret + zlib.crc32(secret).to_bytes(_CRC_BYTES, "little")
    return f"DHHC-1:{transform or 0:02x}:{binascii.b2a_base64(data, newline=False).decode()}:"
