from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from xkv_gateway.core.tenancy import Held
from xkv_gateway.service.endpoints import ENDPOINTS

if TYPE_CHECKING:
    import httpx

    from tests.service.fake_card import FakeCard

SCOPE = b"\xab" * 16


async def test_a_tenant_is_named_read_listed_and_removed(operator: httpx.AsyncClient, card: FakeCard) -> None:
    card.held["a", SCOPE] = Held(2, 131072)
    card.held["b", SCOPE] = Held(1, 65536)
    card.held["b", b"nobody"] = Held(5, 327680)
    answer = await operator.put("/v1/tenants/acme", json={"scope": SCOPE.hex(), "limit_bytes": 10**12})
    assert answer.status_code == 200
    tenant = answer.json()
    assert (tenant["name"], tenant["scope"], tenant["limit_bytes"]) == ("acme", SCOPE.hex(), 10**12)
    assert (tenant["objects"], tenant["charged_bytes"]) == (3, 196608)
    assert tenant["counters"]["over_quota"] == 0
    for path in ("acme", f"scope:{SCOPE.hex()}", "%61cme"):
        assert (await operator.get(f"/v1/tenants/{path}")).json() == tenant
    listed = (await operator.get("/v1/tenants")).json()
    assert listed["tenants"] == [tenant]
    assert (listed["total"], listed["next_cursor"], listed["complete"]) == (1, None, True)
    assert (listed["unnamed_objects"], listed["unnamed_charged_bytes"]) == (5, 327680)
    assert (await operator.delete("/v1/tenants/acme")).json() == {"name": "acme", "status": "removed"}
    for method in ("GET", "DELETE"):
        assert (await operator.request(method, "/v1/tenants/acme")).status_code == 404
    # What it held stays, and is told by scope.
    assert (await operator.get(f"/v1/tenants/scope:{SCOPE.hex()}")).json()["objects"] == 3


async def test_a_tenant_may_have_a_name_and_no_quota(operator: httpx.AsyncClient, card: FakeCard) -> None:
    answer = await operator.put("/v1/tenants/free", json={"scope": "_default", "no_limit": True})
    assert (answer.status_code, answer.json()["limit_bytes"], answer.json()["scope"]) == (200, None, "")
    assert card.names == {b"": "free"}
    zero = await operator.put("/v1/tenants/none", json={"scope": "00", "limit_bytes": 0})
    assert zero.json()["limit_bytes"] == 0


@pytest.mark.parametrize(
    "body",
    [
        '{"scope": "00"}',
        '{"limit_bytes": 1}',
        '{"scope": "00", "limit_bytes": null}',
        '{"scope": "00", "limit_bytes": 1.0}',
        '{"scope": "00", "limit_bytes": 1e3}',
        '{"scope": "00", "limit_bytes": -1}',
        '{"scope": "00", "limit_bytes": true}',
        '{"scope": "00", "limit_bytes": "1"}',
        '{"scope": "00", "limit_bytes": 9223372036854775808}',
        '{"scope": "00", "limit_bytes": NaN}',
        '{"scope": "00", "limit_bytes": 1, "no_limit": true}',
        '{"scope": "00", "no_limit": false}',
        '{"scope": "00", "no_limit": 1}',
        '{"scope": "0", "limit_bytes": 1}',
        '{"scope": "scope:00", "limit_bytes": 1}',
        '{"scope": 0, "limit_bytes": 1}',
        '{"scope": null, "limit_bytes": 1}',
        '{"scope": "00", "limit_bytes": 1, "name": "x"}',
        '{"scope": "00", "scope": "01", "limit_bytes": 1}',
    ],
)
async def test_a_tenant_with_an_odd_body_is_refused(
    operator: httpx.AsyncClient, card: FakeCard, body: str
) -> None:
    answer = await operator.put("/v1/tenants/t", content=body)
    assert answer.status_code in {400, 422}
    assert answer.json()["error"]["code"]
    assert not card.limits
    assert not card.names


@pytest.mark.parametrize(
    "path",
    [
        "_default",
        "scope:00",
        "other",
        "%2E%2E",
        "a%2Fb",
        "a/b",
        "x" * 65,
        "a%0Ab",
        "%20a",
        "a%20",
        "%E2%80%AE",
    ],
)
async def test_a_name_that_means_something_else_or_cannot_be_seen_is_refused(
    operator: httpx.AsyncClient, card: FakeCard, path: str
) -> None:
    answer = await operator.put(f"/v1/tenants/{path}", json={"scope": "00", "limit_bytes": 1})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "name")
    assert not card.names


async def test_a_name_that_is_taken_is_409(operator: httpx.AsyncClient, card: FakeCard) -> None:
    for scope, status in (("00", 200), ("00", 200), ("01", 409)):
        answer = await operator.put("/v1/tenants/t", json={"scope": scope, "limit_bytes": 1})
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == "name_taken"
    refused = await operator.put("/v1/tenants/refused by the card", json={"scope": "02", "limit_bytes": 1})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "name")


async def test_long_lists_come_in_pages(operator: httpx.AsyncClient, card: FakeCard) -> None:
    for number in range(25):
        card.limits[bytes([number])] = number
    seen: list[str] = []
    cursor: int | None = 0
    while cursor is not None:
        page = (await operator.get(f"/v1/tenants?cursor={cursor}&count=10")).json()
        assert page["total"] == 25
        seen += [tenant["scope"] for tenant in page["tenants"]]
        cursor = page["next_cursor"]
    assert seen == [bytes([number]).hex() for number in range(25)]
    assert len((await operator.get("/quota")).json()["users"]) == 25


@pytest.mark.parametrize(
    "query",
    ["count=0", "count=1001", "count=-1", "count=x", "count=", "cursor=%EF%BC%91", "cursor=1&cursor=1", "page=1", "x", "cursor=" + "9" * 30],
)  # fmt: skip
async def test_a_query_that_is_not_known_is_refused(operator: httpx.AsyncClient, query: str) -> None:
    for path in ("/v1/tenants", "/v1/namespaces"):
        answer = await operator.get(f"{path}?{query}")
        assert answer.status_code in {400, 422}
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), [(each.method, each.path) for each in ENDPOINTS])
@pytest.mark.parametrize("query", ["no-such=1", "-salt-of-somebody", "%FF", "a&&b"])
async def test_no_route_takes_a_query_that_it_does_not_know_or_repeats_it(
    operator: httpx.AsyncClient, method: str, path: str, query: str
) -> None:
    path = path.replace("{id}", "1").replace("{ns}", "_default").replace("{", "").replace("}", "")
    answer = await operator.request(method, f"{path}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "bad_query"
    assert "salt-of" not in answer.text


async def test_the_operator_confirms_quotas_after_damage(operator: httpx.AsyncClient, card: FakeCard) -> None:
    card.tenants_known = False
    assert (await operator.get("/v1/tenants")).json()["complete"] is False
    assert (await operator.post("/v1/tenants:confirm")).status_code == 200
    assert (await operator.get("/v1/tenants")).json()["complete"] is True
