"""A home that is listed more than once in the order over all homes."""

from __future__ import annotations

import itertools

from xkv_gateway.core.engine import Engine
from xkv_gateway.core.tenancy import EvictionRules
from xkv_gateway.core.types import BeginStore, EngineLimits, Lookup, LookupMode, WritePlan

UNIT = 4096
NOW_NS = 1_000_000_000


def _engine(capacity_au: int) -> Engine:
    numbers = itertools.count()
    limits = EngineLimits(
        capacity_au=capacity_au,
        au_bytes=UNIT,
        max_objects=64,
        object_bytes_max=UNIT * capacity_au,
        lease_ttl_max_ns=10_000_000_000,
        leases_per_scope_max=8,
        leased_bytes_per_scope_max=1 << 30,
        eviction=EvictionRules(trigger_watermark=2.0),
    )
    return Engine(limits, digest_secret=bytes(32), entropy=lambda n: next(numbers).to_bytes(n, "big"))


def _settle(engine: Engine) -> None:
    while engine.take_records():
        engine.persisted(engine.last_lsn, NOW_NS)
    engine.audit()


def _store(engine: Engine, key: bytes) -> None:
    """Store one unit, evicting the oldest where that is needed."""
    for _ in range(2):
        (entry,) = engine.begin_store(BeginStore("", b"", [key], [UNIT]), NOW_NS).entries
        if isinstance(entry, WritePlan):
            engine.commit_store([entry], [0], NOW_NS)
            _settle(engine)
            return
        assert entry is None
        _settle(engine)
    raise AssertionError("no room after an eviction")


def _held(engine: Engine, keys: bytes) -> bytes:
    each = [bytes([key]) for key in keys]
    sizes = engine.lookup(Lookup("", b"", each, LookupMode.EACH, 0), NOW_NS).sizes_bytes
    return b"".join(key for key, size in zip(each, sizes, strict=True) if size is not None)


def test_eviction_ends_when_a_home_falls_back_to_an_earlier_place_in_the_order() -> None:
    engine = _engine(3)
    for key in (b"a", b"b", b"c"):
        _store(engine, key)
    lease = engine.lookup(Lookup("", b"", [b"a"], LookupMode.EACH, 5_000_000_000), NOW_NS).lease
    assert lease is not None
    for key in (b"d", b"e", b"f"):  # "f" meets the leased "a" first, and passes it
        _store(engine, key)
    engine.release(lease, NOW_NS)
    for key in (b"g", b"h", b"i"):
        _store(engine, key)
    assert _held(engine, b"abcdefghi") == b"ghi"
