"""Text for people that may hold what somebody else has said."""

from __future__ import annotations


def ascii_only(text: str) -> str:
    """Return `text` with whatever could move a terminal's cursor, or begin a line, spelled out."""
    return text if text.isprintable() else ascii(text)
