"""Any request that there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from xkv_rpc.messages import (
    Abort,
    Commit,
    Delete,
    Hello,
    Load,
    Lookup,
    LookupMode,
    Ping,
    Release,
    Renew,
    Request,
    Reserve,
    Store,
)

if TYPE_CHECKING:
    from collections.abc import Callable

keys = st.lists(st.binary(min_size=1, max_size=256), max_size=20)
unique_keys = st.lists(st.binary(min_size=1, max_size=256), max_size=20, unique=True)
namespaces = st.text(max_size=16).filter(lambda s: s != "_default")
scopes = st.binary(max_size=32).filter(lambda s: s != b"_default")
tokens = st.binary(min_size=16, max_size=16)
times = st.integers(1, 60_000)


def _lookup(draw: st.DrawFn) -> Request:
    lease_ms = draw(st.integers(0, 60_000))
    mode, extents = draw(st.sampled_from(LookupMode)), bool(lease_ms) and draw(st.booleans())
    return Lookup(draw(namespaces), draw(scopes), draw(keys), mode, lease_ms, extents)


def _load(draw: st.DrawFn) -> Request:
    ns, scope, some = draw(namespaces), draw(scopes), draw(keys)
    if draw(st.booleans()):
        return Load(ns, scope, some, draw(st.none() | tokens))
    return Load(ns, scope, some, None, draw(tokens), [9 * i for i in range(len(some))], [9] * len(some))


def _store(draw: st.DrawFn) -> Request:
    ns, scope, some = draw(namespaces), draw(scopes), draw(unique_keys)
    sizes = draw(st.lists(st.integers(0, 2**20), min_size=len(some), max_size=len(some)))
    if draw(st.booleans()):
        return Store(ns, scope, some, sizes)
    return Store(ns, scope, some, sizes, draw(tokens), [i * 2**20 for i in range(len(some))])


def _reserve(draw: st.DrawFn) -> Request:
    some = draw(unique_keys)
    return Reserve(draw(namespaces), draw(scopes), some, [5] * len(some), draw(times))


_text = st.text(max_size=50)
_sums = st.lists(st.none() | st.integers(0, 2**64 - 1), max_size=20)
_KINDS: list[Callable[[st.DrawFn], Request]] = [
    lambda draw: Hello(draw(_text), draw(st.none() | _text), draw(st.none() | st.just(3))),
    lambda _: Ping(),
    _lookup,
    _load,
    _store,
    lambda draw: Delete(draw(namespaces), draw(scopes), draw(keys)),
    lambda draw: Renew(draw(tokens), draw(times)),
    lambda draw: Release(draw(tokens)),
    _reserve,
    lambda draw: Commit(draw(tokens), draw(_sums)),
    lambda draw: Abort(draw(tokens), draw(st.booleans())),
]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return draw(st.sampled_from(_KINDS))(draw)


def payload_lengths(request: Request) -> list[int]:
    return request.sizes if isinstance(request, Store) and request.region is None else []
