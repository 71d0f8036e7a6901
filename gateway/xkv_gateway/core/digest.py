"""Identity digests: 128 bits for (namespace, scope, key), what the index knows an object by.

R1 rests on them, so they are a keyed pseudo-random function of the identity. For each (namespace, scope, key length)
an AES-128 key is derived with BLAKE2b, keyed with the card's secret, over an injective encoding of the three;
the digest is the CBC-MAC of the zero-padded key under it. CBC-MAC is a pseudo-random function on inputs of one
fixed length, and since the length is bound into the derived key, each AES key only ever sees one length: the
padding is unambiguous and no input is a prefix of another. So for anyone without the secret two identities
collide with probability 2^-128 a pair (plus the birthday term of AES, q^2 / 2^128 blocks), and no choice of keys
makes that more likely. A batch is computed column by column: one AES call for the first blocks of all keys, one for
the second, and so on.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.ciphers import CipherContext

    from .arrays import U64

BLOCK_BYTES: Final = 16
_BLOCK: Final = np.dtype(np.complex128)
"""A type of 16 bytes, to move whole blocks; never calculated with."""
_WORD: Final = np.dtype("<u8")
KEY_BYTES_MAX: Final = 256
CIPHERS_MAX: Final = 1024
"""Expanded AES keys kept: about 1 KiB each; a scope that comes back costs one derivation (3 us)."""


def derive_key(secret: bytes, namespace: str, scope: bytes, key_bytes: int) -> bytes:
    """The AES-128 key of one (namespace, scope, key length). Lengths in front make the encoding injective."""
    name = namespace.encode()
    hasher = blake2b(key=secret, digest_size=BLOCK_BYTES, person=b"xkv-identity-v1")
    hasher.update(len(name).to_bytes(4, "little") + name)
    hasher.update(len(scope).to_bytes(4, "little") + scope)
    hasher.update(key_bytes.to_bytes(4, "little"))
    return hasher.digest()


class Digester:
    """Digests of whole batches; keeps the most recently used ciphers."""

    def __init__(self, secret: bytes) -> None:
        if not 16 <= len(secret) <= 64:
            msg = "the digest secret has 16 to 64 bytes"
            raise ValueError(msg)
        self._secret = secret
        self._ciphers: OrderedDict[tuple[str, bytes, int], CipherContext] = OrderedDict()

    def digest(self, namespace: str, scope: bytes, keys: Sequence[bytes]) -> tuple[U64, U64]:
        """Low and high halves of the digests, in the order of `keys` (1..256 bytes each)."""
        if not keys:
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        lengths = set(map(len, keys))
        if len(lengths) == 1:
            both = self._equal_lengths(namespace, scope, keys, lengths.pop())
            return both[:, 0], both[:, 1]
        low = np.empty(len(keys), np.uint64)
        high = np.empty(len(keys), np.uint64)
        all_lengths = np.fromiter(map(len, keys), np.int64, len(keys))
        for length in lengths:
            where = np.flatnonzero(all_lengths == length)
            both = self._equal_lengths(namespace, scope, [keys[i] for i in where.tolist()], length)
            low[where], high[where] = both[:, 0], both[:, 1]
        return low, high

    def _equal_lengths(self, namespace: str, scope: bytes, keys: Sequence[bytes], key_bytes: int) -> U64:
        if not 1 <= key_bytes <= KEY_BYTES_MAX:
            msg = "a key has 1 to 256 bytes"
            raise ValueError(msg)
        count, blocks = len(keys), -(-key_bytes // BLOCK_BYTES)
        flat = np.frombuffer(b"".join(keys), np.uint8)
        if key_bytes % BLOCK_BYTES:
            padded = np.zeros((count, blocks * BLOCK_BYTES), np.uint8)
            padded[:, :key_bytes] = flat.reshape(count, key_bytes)
            flat = padded.reshape(-1)
        encrypt = self._cipher(namespace, scope, key_bytes).update
        # Column after column, so that each can be encrypted and combined as it lies.
        columns = flat.view(_BLOCK).reshape(count, blocks).T.tobytes()
        column_bytes = count * BLOCK_BYTES
        chain = np.frombuffer(encrypt(memoryview(columns)[:column_bytes]), _WORD)
        for begin in range(column_bytes, len(columns), column_bytes):
            chain = chain ^ np.frombuffer(columns, _WORD, 2 * count, begin)
            chain = np.frombuffer(encrypt(chain.data.cast("B")), _WORD)
        both: U64 = chain.reshape(count, 2)
        return both

    def _cipher(self, namespace: str, scope: bytes, key_bytes: int) -> CipherContext:
        name = (namespace, scope, key_bytes)
        cipher = self._ciphers.get(name)
        if cipher is None:
            key = derive_key(self._secret, namespace, scope, key_bytes)
            # ECB of independent columns is the block cipher itself, which CBC-MAC chains.
            cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305
            self._ciphers[name] = cipher
            if len(self._ciphers) > CIPHERS_MAX:
                self._ciphers.popitem(last=False)
        else:
            self._ciphers.move_to_end(name)
        return cipher
