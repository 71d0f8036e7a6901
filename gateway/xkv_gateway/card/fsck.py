"""What a check of a card judges, and how it says so: findings as data. Pure.

A *finding* is damage: something that was whole once and is not any more, or that cannot be. A *note* is what an end that was
not in order, or a card that grew, leaves behind: the next start takes care of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from xkv_gateway.card.format_errors import BadChecksum, ForeignCard, Incomplete

if TYPE_CHECKING:
    import numpy.typing as npt

    from xkv_gateway.card.format_errors import FormatError

    I64 = npt.NDArray[np.int64]

FINDINGS_MAX: Final = 1000
"""So many are listed; the others are counted."""

CODES: Final = {
    "blank": "the card was never formatted, or was zeroed",
    "stranger": "somebody else's data",
    "no_superblock": "both superblocks are damaged",
    "unknown_version": "written by a program that knows more than this one",
    "unknown_feature": "as above",
    "copies_disagree": "superblocks of two cards",
    "wrong_namespace": "formatted on another namespace: a copy, or another card under this name",
    "geometry_changed": "smaller than when it was formatted, or with another block size",
    "superblock_damaged": "one of the two copies is damaged; the next start repairs it",
    "superblock_contested": "two gateways opened the card at the same moment",
    "table_damaged": "a checkpoint or ledger that was completed is damaged",
    "chunk_damaged": "a part of a checkpoint or ledger is damaged",
    "journal_gap": "records are missing in the middle of the journal",
    "journal_short": "the journal ends before the newest checkpoint does",
    "journal_record": "a whole batch with records that cannot be",
    "object_without_name": "an object whose namespace or scope nobody named",
    "object_repeated": "one of several live objects of one identity",
    "extent_beyond": "an object with units beyond the data area",
    "extent_short": "an object with fewer or more units than its size needs",
    "extent_shared": "an object with units that another one has as well",
    "payload_damaged": "the bytes of an object are not those that were stored",
    "payload_unreadable": "the bytes of an object cannot be read",
}
"""Code of a finding -> what it means. docs/card.md lists them; a test compares the two."""

NOTES: Final = {
    "unclean": "the last run did not end in order",
    "superblock_older": "one copy is older: a run ended between its two writes",
    "superblock_foreign": "one copy is older and of another card: a format ended between its two writes, or somebody copied it there",
    "superblock_unwritten": "one copy was never written: a format ended between its two writes",
    "heartbeat_unreadable": "the heartbeat is damaged or of another card; it costs nothing",
    "table_unfinished": "a checkpoint or ledger that was begun and never completed",
    "table_foreign": "a checkpoint or ledger from before the card was formatted",
    "journal_torn": "the last batch was begun and never completed: it was never acknowledged",
    "grown": "the namespace is larger than when it was formatted; used after a new format",
    "unidentified": "the namespace has neither NGUID nor UUID: a copy could not be told from it",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing."""

    code: str
    where: str
    """The structure, region or object."""
    detail: str

    def to_json(self) -> dict[str, str]:
        """Return it as JSON types."""
        return {"code": self.code, "where": self.where, "detail": self.detail}


@dataclass(slots=True)
class Report:
    """What a check found."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    omitted: int = 0
    """Findings beyond FINDINGS_MAX."""
    counts: dict[str, int] = field(default_factory=dict)
    """How much was looked at."""

    @property
    def clean(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def find(self, code: str, where: str, detail: str) -> None:
        """Add damage."""
        assert code in CODES, code
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(code, where, detail))
        else:
            self.omitted += 1

    def note(self, code: str, where: str, detail: str) -> None:
        """Add what is in order all the same."""
        assert code in NOTES, code
        self.notes.append(Finding(code, where, detail))

    def count(self, what: str, more: int = 1) -> None:
        """Count what was looked at."""
        self.counts[what] = self.counts.get(what, 0) + more

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "result": "clean" if self.clean else "findings",
            "findings": [finding.to_json() for finding in self.findings],
            "omitted": self.omitted,
            "notes": [note.to_json() for note in self.notes],
            "counts": self.counts,
        }


def judge_other_copy(report: Report, copy: int, fault: FormatError | None, *, blank: bool) -> None:
    """Judge the copy of the superblock that is not the newest whole one."""
    where = f"superblock copy {copy}"
    if fault is None:
        report.note("superblock_older", where, "the next start writes it anew")
    elif isinstance(fault, ForeignCard):
        report.note("superblock_foreign", where, f"{fault.detail}; the next start writes it anew")
    elif blank:
        report.note("superblock_unwritten", where, "the next start writes it")
    else:
        report.find("superblock_damaged", where, str(fault))


def judge_table_ends(report: Report, where: str, error: FormatError) -> None:
    """Judge a table file whose ends do not make a closed file."""
    match error:
        case Incomplete():
            report.note("table_unfinished", where, str(error))
        case ForeignCard():
            report.note("table_foreign", where, str(error))
        case _:
            report.find("table_damaged", where, str(error))


def judge_tail(report: Report, reason: FormatError, *, torn: bool) -> None:
    """Judge the end of the journal."""
    if torn and isinstance(reason, BadChecksum):
        report.note("journal_torn", "journal", str(reason))


@dataclass(frozen=True, slots=True)
class Rows:
    """Objects and their extents. `owners` says, for each extent, the slot of its object."""

    slots: I64
    needed_au: I64
    """Units that the size of each object takes."""
    owners: I64
    starts_au: I64
    counts_au: I64


def judge_rows(report: Report, rows: Rows, capacity_au: int) -> set[int]:
    """Check that extents lie in the data area, are as long as their objects need, and share nothing.

    Returns:
        The slots with findings.
    """
    bad: set[int] = set()
    ends = rows.starts_au + rows.counts_au
    for index in np.flatnonzero(ends > capacity_au).tolist():
        slot = int(rows.owners[index])
        bad.add(slot)
        report.find(
            "extent_beyond",
            f"object {slot}",
            f"units {rows.starts_au[index]} to {ends[index]} of {capacity_au}",
        )
    have = np.bincount(
        rows.owners, rows.counts_au, int(max(rows.slots.max(initial=0), rows.owners.max(initial=0))) + 1
    ).astype(np.int64)
    for index in np.flatnonzero(have[rows.slots] != rows.needed_au).tolist():
        slot = int(rows.slots[index])
        bad.add(slot)
        report.find(
            "extent_short", f"object {slot}", f"{have[slot]} units, and {rows.needed_au[index]} are needed"
        )
    order = np.argsort(rows.starts_au, kind="stable")
    if not len(order):
        return bad
    ends = ends[order]
    reach = np.maximum.accumulate(ends)
    furthest = np.maximum.accumulate(np.where(ends == reach, np.arange(len(order)), 0))
    starts = rows.starts_au[order]
    for index in np.flatnonzero(starts[1:] < reach[:-1]).tolist():
        slot, other = (int(rows.owners[order[at]]) for at in (index + 1, furthest[index]))
        bad |= {slot, other}
        report.find(
            "extent_shared", f"object {slot}", f"unit {starts[index + 1]} is of object {other} as well"
        )
    return bad
