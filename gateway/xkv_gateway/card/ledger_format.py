"""Tenants and wipes as rows of tables: what a ledger holds, and a checkpoint of tenants. Pure.

Rows are judged one by one: one that no gateway writes is left out and counted, never guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from xkv_gateway.card.tables import (
    LABEL_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    SCOPE_BYTES_MAX,
    TenantKind,
    pack_names,
    tenant_kind,
    ttl_limits,
    ttl_value,
    unpack_names,
)
from xkv_gateway.core.tenancy import LIMIT_BYTES_MAX, TTL_S_MAX, TenantRow, TtlRow
from xkv_gateway.core.types import NO_LSN, Lsn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xkv_gateway.card.tables import Columns

_STATEMENTS: Final = frozenset({TenantKind.OTHERS_LOST, TenantKind.COMPLETE})


class RowStage(IntEnum):
    """How far a wipe was when its row was written. Fixed by the format."""

    DURABLE = 1
    """Invisible, and its record is durable."""
    ERASED = 2
    """Its space was deallocated, and read back as zeroes."""


@dataclass(frozen=True, slots=True)
class WipeRow:
    """A wipe that must not be forgotten."""

    lsn: int
    """Of its record."""
    namespace: str
    scope: bytes | None
    """None: all scopes."""
    stage: RowStage


@dataclass(slots=True)
class TenantTable:
    """Tenants as they were read, from one place or from several: of two rows for one scope the newer one counts."""

    rows: dict[bytes, TenantRow] = field(default_factory=dict)
    known: bool = True
    """Whether these are certainly all, as far as anybody has said anything about it."""
    known_lsn: Lsn = NO_LSN
    ttls: dict[str, TtlRow] = field(default_factory=dict)
    """How long objects may live, by namespace."""
    refused: int = 0
    """Rows that no gateway writes."""

    def add(self, columns: Columns) -> None:
        """Add rows of `quotas`."""
        scopes = unpack_names(columns["scope"], columns["scope_bytes"])
        labels = unpack_names(columns["label"], columns["label_bytes"])
        for lsn, limit_bytes, label, scope, label_bytes, scope_bytes, kind in zip(
            columns["lsn"].tolist(),
            columns["limit_bytes"].tolist(),
            labels,
            scopes,
            columns["label_bytes"].tolist(),
            columns["scope_bytes"].tolist(),
            columns["kind"].tolist(),
            strict=True,
        ):
            possible = label_bytes <= LABEL_BYTES_MAX and scope_bytes <= SCOPE_BYTES_MAX
            if not (possible and self._add_one(Lsn(lsn), limit_bytes, label, scope, kind)):
                self.refused += 1

    def _add_one(self, lsn: Lsn, limit_bytes: int, label: bytes, scope: bytes, kind: int) -> bool:
        if kind in _STATEMENTS:
            if lsn >= self.known_lsn:
                self.known, self.known_lsn = kind == TenantKind.COMPLETE, lsn
            return not (scope or label or limit_bytes)
        try:
            name = label.decode()
        except UnicodeDecodeError:
            return False
        if kind == TenantKind.TTL:
            return not scope and self._add_ttl(TtlRow(name, *ttl_limits(limit_bytes), lsn))
        if limit_bytes > LIMIT_BYTES_MAX or kind not in set(TenantKind):
            return False
        row = TenantRow(scope, limit_bytes if kind == TenantKind.LIMITED else None, name or None, lsn)
        if tenant_kind(row.limit_bytes, row.name) != kind:
            return False
        before = self.rows.get(scope)
        if before is None or before.lsn < lsn:
            self.rows[scope] = row
        return True

    def _add_ttl(self, row: TtlRow) -> bool:
        if max(row.idle_s, row.total_s) > TTL_S_MAX:
            return False
        before = self.ttls.get(row.namespace)
        if before is None or before.lsn < row.lsn:
            self.ttls[row.namespace] = row
        return True


def tenant_columns(
    rows: Iterable[TenantRow], ttls: Sequence[TtlRow], *, known: bool, known_lsn: int
) -> Columns:
    """Return rows of `quotas`; what is known of all tenants is one of them, where anybody has ever said so."""
    rows = list(rows)
    kinds: list[int] = [tenant_kind(row.limit_bytes, row.name) for row in rows]
    if known_lsn:
        rows.append(TenantRow(b"", None, None, Lsn(known_lsn)))
        kinds.append(TenantKind.COMPLETE if known else TenantKind.OTHERS_LOST)
    for ttl in ttls:
        rows.append(TenantRow(b"", ttl_value(ttl.idle_s, ttl.total_s), ttl.namespace, ttl.lsn))
        kinds.append(TenantKind.TTL)
    labels, label_bytes = pack_names([(row.name or "").encode() for row in rows], LABEL_BYTES_MAX)
    scopes, scope_bytes = pack_names([row.scope for row in rows], SCOPE_BYTES_MAX)
    return {
        "lsn": np.array([row.lsn for row in rows], np.uint64),
        "limit_bytes": np.array([row.limit_bytes or 0 for row in rows], np.uint64),
        "label": labels,
        "scope": scopes,
        "label_bytes": label_bytes,
        "scope_bytes": scope_bytes,
        "kind": np.array(kinds, np.uint8),
    }


def wipe_columns(rows: Iterable[WipeRow]) -> Columns:
    """Return rows of `wipes`."""
    rows = list(rows)
    namespaces, namespace_bytes = pack_names([row.namespace.encode() for row in rows], NAMESPACE_BYTES_MAX)
    scopes, scope_bytes = pack_names([row.scope or b"" for row in rows], SCOPE_BYTES_MAX)
    return {
        "lsn": np.array([row.lsn for row in rows], np.uint64),
        "namespace": namespaces,
        "scope": scopes,
        "namespace_bytes": namespace_bytes,
        "scope_bytes": scope_bytes,
        "whole_namespace": np.array([row.scope is None for row in rows], np.uint8),
        "stage": np.array([row.stage for row in rows], np.uint8),
    }


def wipes_of(columns: Columns) -> tuple[list[WipeRow], int]:
    """Return the wipes of rows of `wipes`, and how many rows no gateway writes."""
    namespaces = unpack_names(columns["namespace"], columns["namespace_bytes"])
    scopes = unpack_names(columns["scope"], columns["scope_bytes"])
    wipes: list[WipeRow] = []
    refused = 0
    for i, (namespace, scope) in enumerate(zip(namespaces, scopes, strict=True)):
        whole, stage = int(columns["whole_namespace"][i]), int(columns["stage"][i])
        possible = (
            int(columns["namespace_bytes"][i]) <= NAMESPACE_BYTES_MAX
            and int(columns["scope_bytes"][i]) <= SCOPE_BYTES_MAX
            and whole in {0, 1}
            and not (whole and scope)
            and stage in set(RowStage)
        )
        try:
            name = namespace.decode()
        except UnicodeDecodeError:
            possible = False
        if possible:
            wipes.append(WipeRow(int(columns["lsn"][i]), name, None if whole else scope, RowStage(stage)))
        else:
            refused += 1
    return wipes, refused
