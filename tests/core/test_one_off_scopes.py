"""Scopes that come once and never again: nothing of them stays."""

from __future__ import annotations

from tests.core.helpers import World

SCOPES = 150


def test_scopes_that_are_asked_for_or_stored_once_leave_nothing_behind() -> None:
    world = World()
    names = world.engine._state.names
    for number in range(SCOPES):
        scope = b"once-%d" % number
        assert world.held([b"k"], scope=scope) == [False]
        world.store([b"k"], scope=scope)
        assert world.held([b"k"], scope=scope) == [True]
    # What is held decides, not what has been: a unit for each of the newest scopes.
    assert len(names.scopes) <= world.limits.capacity_au
    assert len(names.homes) <= 2 * world.limits.capacity_au
    assert len(names.space_of_home) <= 64
    world.engine.wipe("n", None, world.now_ns)
    world.persist()
    world.engine.audit()
    assert (len(names.scopes), len(names.namespaces)) == (0, 0)
    assert not any(names.homes)
