"""What `xkv-gateway card` says about a card: as data, as rows for people, in one sentence."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from xkv_gateway.card.sight import Kind
from xkv_gateway.sizes import format_size

if TYPE_CHECKING:
    from xkv_gateway.card.superblock import Superblock
    from xkv_gateway.daemon.offline import Look

KINDS: Final = {
    Kind.OURS: "a card of xkv-gateway",
    Kind.BLANK: "blank: it was never formatted, or was zeroed",
    Kind.DAMAGED: "a card of xkv-gateway, of which no superblock can be used",
    Kind.UNKNOWN: "a card of another version of xkv-gateway",
    Kind.STRANGER: "somebody else's data",
}


def facts_of(url: str, seen: Look) -> dict[str, Any]:
    """Return everything as JSON types. Never the digest secret."""
    sight, identity = seen.sight, seen.identity
    return {
        "url": url,
        "kind": sight.kind.value,
        "namespace": {
            "nqn": identity.nqn,
            "nsid": identity.nsid,
            "nguid": identity.nguid.hex(),
            "uuid": str(uuid.UUID(bytes=identity.uuid)),
            "size_bytes": sight.facts.size_bytes,
            "block_bytes": sight.facts.block_bytes,
        },
        "marks": list(sight.marks),
        "error": None if sight.error is None else {"code": sight.error.code, "detail": str(sight.error)},
        "card": None if sight.superblock is None else _card(seen, sight.superblock),
    }


def _card(seen: Look, superblock: Superblock) -> dict[str, Any]:
    layout = superblock.layout
    matched = seen.sight.matched
    return {
        "uuid": str(uuid.UUID(bytes=superblock.stamp.card_uuid)),
        "label": superblock.label,
        "epoch": superblock.stamp.epoch,
        "clean": seen.sight.clean,
        "lives": seen.lives,
        "formatted_at": _time(superblock.format_time_ns),
        "opened_at": _time(superblock.open_time_ns),
        "owner": {
            "name": superblock.owner,
            "host_nqn": superblock.owner_host_nqn,
            "process": superblock.owner_pid,
        },
        "au_bytes": layout.au_bytes,
        "capacity_bytes": layout.capacity_au * layout.au_bytes,
        "objects_max": layout.max_objects,
        "objects": seen.objects,
        "objects_exact": seen.sight.clean,
        "formatted_on": {
            "nguid": superblock.nguid.hex(),
            "uuid": str(uuid.UUID(bytes=superblock.namespace_uuid)),
            "size_bytes": layout.size_bytes,
            "block_bytes": layout.block_bytes,
        },
        "grown_bytes": 0 if matched is None else matched.grown_bytes,
        "identified": matched is None or matched.identified,
    }


def _time(wall_ns: int) -> str | None:
    """Return a wall-clock time as text; None where it is not known, or no time that a calendar has."""
    if not 0 < wall_ns < 1 << 62:
        return None
    return datetime.fromtimestamp(wall_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def sentence(seen: Look) -> str:
    """Return what is on the card, for a refusal or a question."""
    superblock = seen.sight.superblock
    if superblock is None:
        found = ", ".join(seen.sight.marks)
        error = "" if seen.sight.error is None else f" ({seen.sight.error})"
        return (
            f"it bears somebody else's data: {found}" if found else f"it is {KINDS[seen.sight.kind]}{error}"
        )
    label = f" {superblock.label!r}" if superblock.label else ""
    whose = owner_of(superblock)
    opened = _time(superblock.open_time_ns)
    used = f", last opened {opened} by {whose}" if opened else ", never used"
    return (
        f"it is the card{label} {uuid.UUID(bytes=superblock.stamp.card_uuid)}, formatted"
        f" {_time(superblock.format_time_ns) or 'at an unknown time'}{used}, with {objects_of(seen)}"
    )


def owner_of(superblock: Superblock) -> str:
    """Return who opened the card last."""
    if not superblock.owner and not superblock.owner_host_nqn:
        return "nobody yet"
    return f"{superblock.owner or 'an unknown host'} ({superblock.owner_host_nqn or 'no host NQN'})"


def objects_of(seen: Look) -> str:
    """Return how many objects the card holds, as far as a look can tell."""
    return f"{seen.objects} objects" if seen.sight.clean else f"{seen.objects} objects in its last checkpoint"


def rows_of(facts: dict[str, Any], seen: Look) -> list[tuple[str, str]]:
    """Return the rows of `card info`."""
    namespace, card = facts["namespace"], facts["card"]
    rows = [
        ("found", ", ".join(facts["marks"]) or KINDS[seen.sight.kind]),
        ("namespace", f"{namespace['nqn']}, nsid {namespace['nsid']}"),
        ("ids", f"NGUID {namespace['nguid']}, UUID {namespace['uuid']}"),
        ("size", f"{format_size(namespace['size_bytes'])} in blocks of {namespace['block_bytes']} B"),
    ]
    if facts["error"] is not None:
        rows.append(("refused", f"{facts['error']['code']}: {facts['error']['detail']}"))
    if card is None or seen.sight.superblock is None:
        return rows
    ended = "a gateway has it and lives" if card["lives"] else "the last run did not end in order"
    if card["clean"]:
        ended = "never used"
    rows += [
        ("card", f"{card['uuid']}{', ' + repr(card['label']) if card['label'] else ''}"),
        ("formatted", card["formatted_at"] or "at an unknown time"),
        ("last opened", f"{card['opened_at'] or 'never'}, epoch {card['epoch']}"),
        ("owner", owner_of(seen.sight.superblock)),
        ("state", "the last run ended in order" if card["clean"] and card["opened_at"] else ended),
        ("room", f"{format_size(card['capacity_bytes'])} in units of {format_size(card['au_bytes'])}"),
        ("objects", f"{objects_of(seen)}, at most {card['objects_max']}"),
    ]
    if card["grown_bytes"]:
        rows.append(("grown", f"by {format_size(card['grown_bytes'])}, used after a new format"))
    if not card["identified"]:
        rows.append(("identity", "no NGUID and no UUID: a copy could not be told from it"))
    return rows
