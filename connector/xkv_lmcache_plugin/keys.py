"""From LMCache's key of an object to the gateway's. Pure.

LMCache's chunk hashes do not hold the salt, nor what the model is; it keeps them beside the hash in its key. The salt becomes
the scope, one way; the rest goes into the gateway's key:

    bytes  0..16  SHA-256 of "xkv-lmcache/1", the model's name and the operator's `model_fingerprint`, cut to 16 bytes
    bytes 16..24  kv_rank, big-endian: which slice of the cache
    bytes 24..28  object_group_id, big-endian
    bytes 28..    chunk_hash, whole
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final, Protocol

from xkv_rpc.messages import scope_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FORMAT: Final = b"xkv-lmcache/1"
HEAD_BYTES: Final = 16
HASH_BYTES_MAX: Final = 200
_PLACE: Final = struct.Struct(">QI")


class ObjectKey(Protocol):
    """As much of LMCache's key as counts here."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


def key_of(key: ObjectKey, fingerprint: str) -> bytes:
    """Return the gateway's key.

    Raises:
        ValueError: A part is larger than its place.
    """
    if not 0 < len(key.chunk_hash) <= HASH_BYTES_MAX:
        raise ValueError(f"a chunk hash of {len(key.chunk_hash)} bytes")
    digest = hashlib.sha256()
    for part in (FORMAT, key.model_name.encode(), fingerprint.encode()):
        digest.update(len(part).to_bytes(4, "big") + part)
    try:
        place = _PLACE.pack(key.kv_rank, key.object_group_id)
    except struct.error:
        raise ValueError("a rank or a group that is no unsigned number of 64 and 32 bits") from None
    return digest.digest()[:HEAD_BYTES] + place + key.chunk_hash


def by_scope(keys: Iterable[ObjectKey], *, require_salt: bool) -> Iterator[tuple[bytes, list[int]]]:
    """Group keys by the scope that their salt stands for; yield each scope with the positions of its keys.

    Positions whose salt cannot be used, or is missing where one is required, are in no group.
    """
    positions: dict[str, list[int]] = {}
    for at, key in enumerate(keys):
        positions.setdefault(key.cache_salt, []).append(at)
    for salt, found in positions.items():
        if not salt:
            if not require_salt:
                yield b"", found
            continue
        try:
            scope = scope_of(salt)
        except ValueError:
            continue
        yield scope, found
