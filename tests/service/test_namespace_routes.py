from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from xkv_gateway.card.administration import WipeStage
from xkv_gateway.core.tenancy import Held

if TYPE_CHECKING:
    import httpx

    from tests.service.fake_card import FakeCard


def fill(card: FakeCard) -> None:
    card.held["m/1", b"\x01"] = Held(2, 131072)
    card.held["m/1", b"\x02"] = Held(1, 65536)
    card.held["m/10", b"\x01"] = Held(4, 262144)
    card.held["", b""] = Held(1, 65536)


async def test_namespaces_and_their_scopes_are_told(operator: httpx.AsyncClient, card: FakeCard) -> None:
    fill(card)
    card.names[b"\x02"] = "acme"
    listed = (await operator.get("/v1/namespaces")).json()
    assert [entry["name"] for entry in listed["namespaces"]] == ["m/1", "m/10", "_default"]
    assert listed["namespaces"][0] == {
        "name": "m/1", "objects": 3, "charged_bytes": 196608, "scopes": 2, "ttl_idle_s": 0, "ttl_total_s": 0,
    }  # fmt: skip
    for path in ("m/1", "m%2F1"):
        detail = (await operator.get(f"/v1/namespaces/{path}")).json()
        assert (detail["name"], detail["objects"], detail["total"]) == ("m/1", 3, 2)
        assert detail["scopes"][1] == {
            "scope": "02", "tenant": "acme", "objects": 1, "charged_bytes": 65536, "leases": 0,
        }  # fmt: skip
    assert (await operator.get("/v1/namespaces/_default")).json()["objects"] == 1
    for path in ("m", "m/", "m/1/", "", "_default/"):
        assert (await operator.get(f"/v1/namespaces/{path}")).status_code == 404
    assert (await operator.get("/v1/namespaces/" + "x" * 65)).status_code == 422


async def test_lifetimes_are_set_one_by_one_and_told(operator: httpx.AsyncClient, card: FakeCard) -> None:
    fill(card)
    done = await operator.put("/v1/namespaces/m%2F1", json={"ttl_idle_s": 3600})
    assert (done.status_code, done.json()["ttl_idle_s"], done.json()["ttl_total_s"]) == (200, 3600, 0)
    await operator.put("/v1/namespaces/m/1", json={"ttl_total_s": 86400})
    detail = (await operator.get("/v1/namespaces/m/1")).json()
    assert (detail["ttl_idle_s"], detail["ttl_total_s"]) == (3600, 86400)
    await operator.put("/v1/namespaces/_default", json={"ttl_idle_s": 0, "ttl_total_s": 5})
    assert card.ttls == {"m/1": (3600, 86400), "": (0, 5)}


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'{"ttl_idle_s":"1h"}', b'{"ttl_idle_s":1.5}', b'{"ttl_idle_s":-1}', b'{"ttl_idle_s":true}',
     b'{"ttl_idle_s":null}', b'{"ttl_idle_s":1,"ttl_idle_s":2}', b'{"ttl_idle":1}', b'{"ttl_total_s":99999999999}'],
)  # fmt: skip
async def test_a_lifetime_that_cannot_be_changes_nothing(
    operator: httpx.AsyncClient, card: FakeCard, body: bytes
) -> None:
    answer = await operator.put("/v1/namespaces/m", content=body)
    assert answer.status_code in {400, 422}
    assert not card.ttls


async def test_a_wipe_takes_exactly_what_is_named(operator: httpx.AsyncClient, card: FakeCard) -> None:
    fill(card)
    one = await operator.delete("/v1/namespaces/m/1?scope=02")
    assert one.status_code == 200
    report = one.json()
    assert (report["namespace"], report["scope"], report["stage"]) == ("m/1", "scope:02", "done")
    assert (report["objects"], report["erased_bytes"], report["left_bytes"]) == (1, 65536, 0)
    assert report["verification"] == "deallocated, read back as zeroes"
    assert ("m/1", b"\x01") in card.held
    rest = (await operator.delete("/v1/namespaces/m%2F1")).json()
    assert (rest["objects"], rest["scope"]) == (2, None)
    assert set(card.held) == {("m/10", b"\x01"), ("", b"")}
    assert (await operator.delete("/v1/namespaces/_default?scope=_default")).json()["objects"] == 1
    assert (await operator.delete("/v1/namespaces/unknown")).json()["objects"] == 0
    assert set(card.held) == {("m/10", b"\x01")}


@pytest.mark.parametrize(
    "query",
    ["scope=", "scope=zz", "scope=0", "scope=00&scope=00", "scop=00", "scope", "tenant=x", "wait_s=61", "wait_s=-1", "wait_s=x", "scope=%FF"],
)  # fmt: skip
async def test_a_wipe_with_a_query_that_is_not_understood_wipes_nothing(
    operator: httpx.AsyncClient, card: FakeCard, query: str
) -> None:
    fill(card)
    answer = await operator.delete(f"/v1/namespaces/m/1?{query}")
    assert answer.status_code in {400, 422}
    assert len(card.held) == 4


async def test_a_wipe_that_takes_long_is_202_and_tells_where_to_ask(
    operator: httpx.AsyncClient, card: FakeCard
) -> None:
    fill(card)
    card.wipes_end_at_once = False
    answer = await operator.delete("/v1/namespaces/m/1?wait_s=0")
    assert answer.status_code == 202
    where = answer.headers["location"]
    assert answer.json()["stage"] == "durable"
    assert (await operator.get(where)).json() == answer.json()
    card.begun[0].end()
    done = (await operator.get(where)).json()
    assert (done["stage"], done["left_bytes"], done["elapsed_s"]) == ("done", 0, 2.5)
    assert (await operator.get("/v1/wipes")).json() == {"wipes": [done]}
    for path, status in (("999", 404), ("x", 422), ("", 404), ("1/2", 422)):
        assert (await operator.get(f"/v1/wipes/{path}")).status_code == status


async def test_a_wipe_that_the_card_did_not_live_to_see_the_end_of_is_not_reported_as_done(
    operator: httpx.AsyncClient, card: FakeCard
) -> None:
    fill(card)
    card.wipes_end_at_once = False
    first = await operator.delete("/v1/namespaces/m/1?wait_s=0")
    card.begun[0].end(WipeStage.FAILED)
    assert first.status_code == 202
    assert (await operator.get(first.headers["location"])).json()["stage"] == "failed"
