"""Durations in whole seconds as people write them: `90s`, `15min`, `1h`, `7d`, `2w`."""

from __future__ import annotations

import re
from typing import Final

UNITS_S: Final = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_DURATION: Final = re.compile(r"(?P<number>[0-9]{1,10}) ?(?P<unit>[a-z]{0,3})", re.ASCII)


def parse_duration(text: str) -> int:
    """Return the seconds that `text` means.

    Raises:
        ValueError: not a duration.
    """
    found = _DURATION.fullmatch(text.strip())
    unit_s = UNITS_S.get(found["unit"]) if found else None
    if found is None or unit_s is None:
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 15min, 1h or 7d")
    return int(found["number"]) * unit_s


def format_duration(seconds: int) -> str:
    """Return whole seconds in the largest units: `1d 12h`; `parse_duration` reads one that has a single unit."""
    parts: list[str] = []
    for unit in ("d", "h", "min", "s"):
        value, seconds = divmod(seconds, UNITS_S[unit])
        if value:
            parts.append(f"{value}{unit}")
    return " ".join(parts) or "0s"
