"""What can be wrong with bytes read from a card. One class a kind of fault; each names structure and field.

Whatever bytes are given to a decoder of the card format, it returns a value or raises one of these: any other
exception is a bug.
"""

from __future__ import annotations

from typing import ClassVar


class FormatError(Exception):
    """Base of all faults of the card format.

    `structure` and `field` are names of FORMAT.md; `field` is empty where the fault is not in one field.
    """

    code: ClassVar[str] = "format_error"

    def __init__(self, structure: str, field: str, detail: str) -> None:
        super().__init__(f"{structure}{'.' if field else ''}{field}: {detail}")
        self.structure = structure
        self.field = field
        self.detail = detail


class Truncated(FormatError):  # noqa: N818
    """Fewer bytes than the structure has."""

    code: ClassVar[str] = "truncated"


class BadMagic(FormatError):  # noqa: N818
    """Not this structure: never written, overwritten, or somebody else's."""

    code: ClassVar[str] = "bad_magic"


class BadChecksum(FormatError):  # noqa: N818
    """Torn, flipped, or partly overwritten."""

    code: ClassVar[str] = "bad_checksum"


class UnknownVersion(FormatError):  # noqa: N818
    """Whole, but of a format version that this program does not speak. It must not be written to."""

    code: ClassVar[str] = "unknown_version"

    def __init__(self, structure: str, version: int, known: int) -> None:
        super().__init__(structure, "format_version", f"{version}, and this program knows {known}")
        self.version = version


class UnknownFeature(FormatError):  # noqa: N818
    """Whole, but written with features that this program does not know. It must not be written to."""

    code: ClassVar[str] = "unknown_feature"

    def __init__(self, structure: str, field: str, bits: int) -> None:
        unknown = ", ".join(f"bit {bit}" for bit in range(64) if bits >> bit & 1)
        super().__init__(structure, field, f"unknown features: {unknown}")
        self.bits = bits


class BadField(FormatError):  # noqa: N818
    """The checksum is right and a value is not possible: written by a faulty program."""

    code: ClassVar[str] = "bad_field"


class ForeignCard(FormatError):  # noqa: N818
    """A whole structure of another card: a copy, or left from before the card was formatted."""

    code: ClassVar[str] = "foreign_card"


class StaleWrite(FormatError):  # noqa: N818
    """A whole structure of this card that does not belong here: of an earlier run, lap or checkpoint."""

    code: ClassVar[str] = "stale_write"


class ChainBroken(FormatError):  # noqa: N818
    """A whole batch that does not continue the one before it."""

    code: ClassVar[str] = "chain_broken"


class Incomplete(FormatError):  # noqa: N818
    """A table file (checkpoint, ledger) that was never finished."""

    code: ClassVar[str] = "incomplete"


class CopiesDisagree(FormatError):  # noqa: N818
    """Two whole superblocks of two cards, neither of them newer."""

    code: ClassVar[str] = "copies_disagree"


class NoSuperblock(FormatError):  # noqa: N818
    """The card bears our stamp, and neither copy of the superblock can be read. `faults` tells why, by copy."""

    code: ClassVar[str] = "no_superblock"

    def __init__(self, faults: tuple[FormatError, ...]) -> None:
        super().__init__("superblock", "", "; ".join(f"copy {i}: {e}" for i, e in enumerate(faults)))
        self.faults = faults


class WrongNamespace(FormatError):  # noqa: N818
    """The superblock was written on another namespace: a copied card, or another card under the same name."""

    code: ClassVar[str] = "wrong_namespace"


class GeometryChanged(FormatError):  # noqa: N818
    """The namespace is smaller than the format says, or has another block size."""

    code: ClassVar[str] = "geometry_changed"


class CardTooSmall(FormatError):  # noqa: N818
    """There is no room for the structures and a useful data area."""

    code: ClassVar[str] = "card_too_small"


class NoRoom(FormatError):  # noqa: N818
    """The region is full: the journal needs a checkpoint first, or a table file outgrew its region."""

    code: ClassVar[str] = "no_room"
