"""What a recovery would find, if the power failed now. Nothing is changed: the run goes on as if nothing had happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.medium import Image, read_image

if TYPE_CHECKING:
    import random

    from tests.sim.gateway import Gateway
    from tests.sim.oracle import Oracle
    from tests.sim.replay import Entry, Replay
    from tests.sim.values import Identity


def power_failure_now(gateway: Gateway, oracle: Oracle, rng: random.Random) -> Image:
    """Draw what would survive, and have the oracle judge it. Returns the image of the medium."""
    image = gateway.device.medium.draw_survivor(rng)
    records = gateway.journal.draw_survivor(rng)
    judge(gateway, oracle, image, records)
    return image


def judge(gateway: Gateway, oracle: Oracle, image: Image, records: Replay) -> None:
    """Read every object that the records name from the image."""
    found: dict[Identity, bytes] = {}
    names = {(i.namespace, i.scope, oracle.digest_of(i)): i for i in oracle.known()}
    for digest, entry in records.live.items():
        identity = names.get((entry.namespace, entry.scope, digest))
        if identity is None:
            oracle.blame(f"after a crash there would be an object of {entry.namespace!r} that nobody stored")
            continue
        payload = _payload(gateway, image, entry)
        if gateway.checksum_of(payload) != entry.checksum and not gateway.device.medium.damaged:
            oracle.blame(f"after a crash {identity} would have wrong bytes under its record (R2, R3)")
            continue
        if not gateway.device.medium.damaged:
            found[identity] = payload
    if not gateway.device.medium.damaged:
        oracle.check_recovered(found)


def _payload(gateway: Gateway, image: Image, entry: Entry) -> bytes:
    area = gateway.area
    whole = b"".join(
        read_image(image, area.start_bytes + start * area.au_bytes, count * area.au_bytes)
        for start, count in entry.extents
    )
    return whole[: entry.size_bytes]
