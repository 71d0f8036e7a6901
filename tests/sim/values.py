"""Payloads that say whose they are: every 32 bytes carry the identity, the version, the size and their place."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

CELL_BYTES: Final = 32


@dataclass(frozen=True)
class Identity:
    """What an object is known by."""

    namespace: str
    scope: bytes
    key: bytes

    @cached_property
    def tag(self) -> int:
        """64 bits for the payload's cells."""
        text = repr((self.namespace, self.scope, self.key)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def __str__(self) -> str:
        return f"{self.namespace or '-'}/{self.scope.hex() or '-'}/{self.key.decode()}"


def payload_of(identity: Identity, version: int, size_bytes: int) -> bytes:
    """The bytes of one version of an object."""
    cells = np.empty((-(-size_bytes // CELL_BYTES), 4), "<u8")
    cells[:, 0] = identity.tag
    cells[:, 1] = version
    cells[:, 2] = size_bytes
    cells[:, 3] = np.arange(len(cells))
    return cells.tobytes()[:size_bytes]


def whose(payload: bytes, identities: dict[int, Identity]) -> str:
    """Say what wrong bytes consist of, for people."""
    whole = len(payload) // CELL_BYTES * CELL_BYTES
    cells = np.frombuffer(payload[:whole], "<u8").reshape(-1, 4)
    parts: list[str] = []
    for tag, version, size_bytes, place in cells.tolist():
        owner = identities.get(tag)
        part = (
            f"{owner} version {version} of {size_bytes} bytes"
            if owner
            else "zeroes"
            if not tag
            else "garbage"
        )
        if owner and place != len(parts):
            part += " (from another place)"
        parts.append(part)
    counted = {part: parts.count(part) for part in dict.fromkeys(parts)}
    return "; ".join(f"{count} cells of {part}" for part, count in counted.items()) or f"{len(payload)} bytes"
