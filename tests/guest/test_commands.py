"""`xkv-gateway fabric` and cards that are device nodes, in the guest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from .daemon import CONFIG, FLAGS, GATEWAY, connections, replay, serving, status_of
from .soft import HOST, HOST_NQN, settings, soft_card

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import Guest

pytestmark = pytest.mark.guest


@pytest.fixture
def card(guest: Guest) -> Iterator[dict[str, Any]]:
    """A soft card of this machine, configured in the guest."""
    with soft_card("128MiB") as card:
        card["url"] = f"kernel+tcp://{HOST}:{card['port']}/{card['nqn']}?nsid=1"
        guest.put(CONFIG, settings(card["url"]))
        yield card


def fabric(guest: Guest, *words: str) -> Any:
    return json.loads(guest.must(*GATEWAY, "fabric", *words, *FLAGS, "--json"))


def test_a_target_is_discovered_connected_listed_and_disconnected(guest: Guest, card: dict[str, Any]) -> None:
    found = fabric(guest, "discover", f"{HOST}:{card['port']}")
    assert card["nqn"] in {one["nqn"] for one in found}
    outside = guest.run(*GATEWAY, "fabric", "discover", "127.0.0.1:1", *FLAGS)
    assert outside.code == 2, "outside of the storage network"

    first = fabric(guest, "connect")
    try:
        assert (first["connected"], first["size_bytes"], first["host_nqn"]) == ("now", 128 << 20, HOST_NQN)
        again = fabric(guest, "connect", card["url"])
        assert again == {**first, "connected": "before"}
        (listed,) = connections(guest)
        assert listed["nqn"] == card["nqn"]
        assert [(one["name"], one["state"], one["address"]) for one in listed["controllers"]] == [
            (first["controller"], "live", HOST)
        ]
        assert [one["device"] for one in listed["namespaces"]] == [first["device"]]
        told = json.loads(guest.must(*GATEWAY, "fabric", "list", "--nvme-cli", "--json"))
        assert [one["nqn"] for one in told] == [card["nqn"]]
    finally:
        assert fabric(guest, "disconnect") == {"disconnected": first["controller"]}
    assert fabric(guest, "disconnect") == {"disconnected": None}
    assert connections(guest) == []


def test_a_device_that_somebody_else_attached_is_served_and_left_attached(
    guest: Guest, card: dict[str, Any]
) -> None:
    device = fabric(guest, "connect")["device"]
    try:
        guest.must(*GATEWAY, "card", "format", device, *FLAGS)
        with serving(guest, "--card", device):
            replay(guest, 20)
            said = status_of(guest)["card"]
            assert (said["state"], said["url"]) == ("online", device)
            refused = guest.run(*GATEWAY, "fabric", "disconnect", *FLAGS)
            assert (refused.code, "in use" in refused.err) == (6, True), refused.err
        assert [one["nqn"] for one in connections(guest)] == [card["nqn"]]
    finally:
        fabric(guest, "disconnect")
