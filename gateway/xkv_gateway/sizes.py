"""Sizes in bytes as people write them: `16GiB`, `5GB`, `1TiB`, `65536`."""

from __future__ import annotations

import re
from typing import Final

UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
SIZE_MAX_BYTES: Final = (1 << 63) - 1

_SIZE: Final = re.compile(r"(?P<number>[0-9]{1,19}(\.[0-9]{1,9})?) ?(?P<unit>[A-Za-z]{0,3})", re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes that `text` means. KB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB of 1024.

    Raises:
        ValueError: not a size, not a whole number of bytes, or more than 2**63 - 1 bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = UNITS.get(found["unit"].upper()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it like 16GiB, 5GB or 65536")
    whole, _, fraction = found["number"].partition(".")
    scaled = int(whole + fraction) * unit
    tenths: int = 10 ** len(fraction)
    size_bytes, rest = divmod(scaled, tenths)
    if rest:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    if size_bytes > SIZE_MAX_BYTES:
        raise ValueError(f"{text!r} is more than 2^63-1 bytes")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Return `size_bytes` in the largest binary unit that keeps it at 1 or more, two decimals at most."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = UNITS[unit.upper()]
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size_bytes} B"


def exact_size(size_bytes: int) -> str:
    """Return `size_bytes` in the largest binary unit that is exact, so that `parse_size` gives it back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = UNITS[unit.upper()]
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)
