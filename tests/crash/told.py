"""What the clients of a card were told, and what a card may therefore hold after a crash."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from xkv_gateway.core.types import BeginLoad, Delete, LoadStatus, Lookup, LookupMode

if TYPE_CHECKING:
    from tests.crash.bench import Life

Key = tuple[str, bytes, bytes]
"""Namespace, scope, key."""
Content = bytes | None
"""Payload; None: not there."""
NOTHING: Final = frozenset({None})


class Broken(AssertionError):  # noqa: N818 - a finding
    """A promise was broken."""


@dataclass
class Told:
    """For each key that was ever named, what may be there."""

    may: dict[Key, frozenset[Content]] = field(default_factory=dict)
    evicts: bool = False
    """The card was full: what is not being asked for may go at any time."""

    formatting: bool = False
    """A forced format is under way: all may be there, or nothing."""

    ever: dict[Key, set[Content]] = field(default_factory=dict)
    """All that was ever asked to be there."""
    wiped: set[Key] = field(default_factory=set)
    """Keys that were wiped, and not asked for since."""
    order: dict[Key, tuple[Content, ...]] = field(default_factory=dict)
    """What was asked to be there, one after the other."""

    def copy(self) -> Told:
        ever = {key: set(contents) for key, contents in self.ever.items()}
        return replace(self, may=dict(self.may), ever=ever, wiped=set(self.wiped), order=dict(self.order))

    def asks(self, key: Key, content: Content) -> int:
        """A change was asked for: from now on both may be there. Returns its place in the order of changes of this key."""
        self.may[key] = self.may.get(key, NOTHING) | {content}
        self.ever.setdefault(key, {None}).add(content)
        if content is not None:
            self.wiped.discard(key)
        self.order[key] = (*self.order.get(key, ()), content)
        return len(self.order[key])

    def hears(self, key: Key, content: Content, place: int | None = None) -> None:
        """It is certain: from now on only that, or what was asked for after the change of this place, which was acknowledged."""
        later = () if place is None else self.order[key][place:]
        self.may[key] = frozenset({content, *later})

    def mark(self) -> int:
        """Tells two of them apart."""
        return hash((frozenset(self.may.items()), self.evicts, self.formatting))

    async def judge(self, life: Life) -> None:
        """Compare a card that was opened with what was told. What is there is certain from then on."""
        engine = life.store.engine
        engine.audit()
        usage = engine.usage()
        parts = (usage.free_au, usage.reserved_au, usage.live_au, usage.doomed_au, usage.quarantined_au)
        if sum(parts) != engine._state.limits.capacity_au or min(parts) < 0:
            raise Broken(f"the units do not add up: {usage}")
        if self.formatting and not usage.live_objects:
            self.may = dict.fromkeys(self.may, NOTHING)
        self.formatting = False
        held = 0
        homes: dict[tuple[str, bytes], list[Key]] = {}
        for key in self.may:
            homes.setdefault(key[:2], []).append(key)
        for (namespace, scope), keys in homes.items():
            names = [key for _, _, key in keys]
            for key, (status, payload) in zip(
                keys, await life.load_all(namespace, scope, names), strict=True
            ):
                self._judge_one(key, status, payload)
                held += payload is not None
            self._judge_lookup(life, namespace, scope, names)
        if held != engine.usage().live_objects:
            raise Broken(f"{engine.usage().live_objects} objects, and {held} that anybody stored")

    def _judge_one(self, key: Key, status: LoadStatus, payload: Content) -> None:
        if status not in {LoadStatus.OK, LoadStatus.MISS}:
            raise Broken(f"{key} is {status.value}: its record is there and its bytes are not")
        may = self.may[key] | NOTHING if self.evicts else self.may[key]
        if payload not in may:
            what = "missing" if payload is None else "there again" if may == NOTHING else "of other bytes"
            raise Broken(f"{key} is {what}")
        self.may[key] = frozenset({payload})

    def _judge_lookup(self, life: Life, namespace: str, scope: bytes, names: list[bytes]) -> None:
        outcome = life.store.lookup(Lookup(namespace, scope, names, LookupMode.EACH, 0))
        for name, size_bytes in zip(names, outcome.sizes_bytes, strict=True):
            (content,) = self.may[namespace, scope, name]
            if size_bytes != (None if content is None else len(content)):
                raise Broken(f"a lookup of {name!r} says {size_bytes} bytes")


def load_request(namespace: str, scope: bytes, names: list[bytes]) -> BeginLoad:
    return BeginLoad(namespace, scope, names, None)


def delete_request(namespace: str, scope: bytes, names: list[bytes]) -> Delete:
    return Delete(namespace, scope, names)
