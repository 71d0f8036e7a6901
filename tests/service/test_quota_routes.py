from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from xkv_gateway.card.store import CardOffline, CardRecovering, JournalFull
from xkv_gateway.core.tenancy import Held
from xkv_rpc import scope_of

if TYPE_CHECKING:
    import httpx

    from tests.service.fake_card import FakeCard

GIB = 1 << 30
SALT = "a-very-secret-salt-9Zk"


def raw(limit: str) -> bytes:
    return b'{"limit_gb": ' + limit.encode() + b"}"


async def test_a_quota_is_set_read_listed_and_removed_with_the_bodies_of_the_contract(
    operator: httpx.AsyncClient, card: FakeCard
) -> None:
    name = f"scope:{scope_of(SALT).hex()}"
    card.held["ns", scope_of(SALT)] = Held(3, GIB // 2)
    path = f"/quota/{SALT}"
    before = {"cache_salt": name, "limit_gb": 0, "current_usage_gb": 0.5, "exists": False}
    assert (await operator.get(path)).json() == before
    answer = await operator.put(path, json={"limit_gb": 5})
    assert (answer.status_code, answer.json()) == (
        200,
        {"cache_salt": name, "limit_gb": 5, "status": "ok"},
    )
    assert card.limits == {scope_of(SALT): 5 * GIB}
    assert (await operator.get(path)).json() == {**before, "limit_gb": 5, "exists": True}
    listed = (await operator.get("/quota")).json()
    assert listed == {"users": {name: {"limit_gb": 5, "current_usage_gb": 0.5}}}
    assert (await operator.get(f"/quota/{name}")).json()["exists"]
    assert (await operator.delete(path)).json() == {"cache_salt": name, "status": "removed"}
    assert (await operator.delete(path)).json() == {"cache_salt": name, "status": "not_found"}
    assert (await operator.get("/quota")).json() == {"users": {}}


async def test_the_list_uses_the_operators_names(operator: httpx.AsyncClient, card: FakeCard) -> None:
    await card.set_tenant("acme", b"\x01" * 16, 3 * GIB)
    await card.set_tenant("named only", b"\x02" * 16, None)
    users = (await operator.get("/quota")).json()["users"]
    assert users == {"acme": {"limit_gb": 3, "current_usage_gb": 0}}


@pytest.mark.parametrize(
    "limit",
    [
        "NaN", "Infinity", "-Infinity", "-1", "-1e-30", "1e300", "1e309", "1e999999999", "1e99999999999999999999",
        "true", "false", '"10"', '""', "null", "[]", "{}", "[5]", "8589934592", "9" * 500, "0x10", "01", "+1", "",
        ".5", "5.", "1_000",
    ],
)  # fmt: skip
async def test_a_limit_that_is_no_number_of_bytes_is_refused_and_changes_nothing(
    operator: httpx.AsyncClient, card: FakeCard, limit: str
) -> None:
    card.limits[scope_of("s")] = 7
    answer = await operator.put("/quota/s", content=raw(limit))
    assert answer.status_code in {400, 422}
    json.loads(answer.content, parse_constant=pytest.fail)
    assert set(answer.json()["error"]) >= {"code", "message"}
    assert card.limits == {scope_of("s"): 7}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"5", b'"x"', b"[]", b'[{"limit_gb": 1}]', b"{}", b'{"limit": 1}', b'{"limit_gb": 1} x',
        b'{"limit_gb": 1, "limit_gb": 2}', b'{"limit_gb": 1, "limit_gb": 1}', b'{"limit_gb": 1, "more": 2}', b"{",
        b'\xff{"limit_gb": 1}', b'\xef\xbb\xbf{"limit_gb": 1}', b'{"limit_gb": {"limit_gb": 1}}',
        b"[" * 2000, b'{"limit_gb": 1, "\xff": 2}',
    ],
)  # fmt: skip
async def test_a_body_that_can_be_read_in_two_ways_is_refused(
    operator: httpx.AsyncClient, card: FakeCard, body: bytes
) -> None:
    answer = await operator.put("/quota/s", content=body)
    assert answer.status_code in {400, 422}
    assert answer.json()["error"]["message"]
    assert not card.limits


async def test_a_large_body_is_refused_without_being_read_whole(
    operator: httpx.AsyncClient, card: FakeCard
) -> None:
    answer = await operator.put("/quota/s", content=raw("1" + " " * 5000))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert not card.limits


@pytest.mark.parametrize(
    ("limit", "limit_bytes", "told"),
    [
        ("0", 0, 0),
        ("0.0", 0, 0),
        ("1e-12", 0, 0),  # less than a byte: rounded down
        ("1e-99999999", 0, 0),
        ("0.1", 107_374_182, 0.1),
        ("10", 10 * GIB, 10),
        ("1e2", 100 * GIB, 100),
        ("3.3", 3_543_348_019, 3.3),
        ("8589934591", (1 << 63) - GIB, 8_589_934_591),
        ("4.656612873077392578125", 5_000_000_000, 4.656612874),
    ],
)
async def test_a_limit_is_whole_bytes_of_two_to_the_thirtieth_and_told_as_it_was_set(
    operator: httpx.AsyncClient, card: FakeCard, limit: str, limit_bytes: int, told: float
) -> None:
    answer = await operator.put("/quota/s", content=raw(limit))
    assert (answer.status_code, answer.json()["limit_gb"]) == (200, told)
    assert card.limits == {scope_of("s"): limit_bytes}
    read = (await operator.get("/quota/s")).json()
    assert (read["limit_gb"], read["exists"]) == (told, True)
    await operator.put("/quota/s", json={"limit_gb": read["limit_gb"]})
    assert card.limits == {scope_of("s"): limit_bytes}


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("_default", b""),
        ("%5Fdefault", b""),
        ("scope:0aFF", b"\x0a\xff"),
        ("scope%3A0aff", b"\x0a\xff"),
        ("%2E", scope_of(".")),
        ("a%0Ab", scope_of("a\nb")),
        ("%2E%2e", scope_of("..")),
        ("%252F", scope_of("%2F")),
        ("a+b", scope_of("a+b")),
        ("a%20b", scope_of("a b")),
        ("%C3%A4", scope_of("ä")),
        ("_Default", scope_of("_Default")),
        ("Scope:00", scope_of("Scope:00")),
        ("a%3Fb", scope_of("a?b")),
    ],
)
async def test_each_path_means_one_scope(
    operator: httpx.AsyncClient, card: FakeCard, path: str, scope: bytes
) -> None:
    assert (await operator.put(f"/quota/{path}", json={"limit_gb": 1})).status_code == 200
    assert list(card.limits) == [scope]
    assert (await operator.get(f"/quota/{path}")).json()["exists"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("", 404),
        ("a/b", 422),
        ("a%2Fb", 422),
        ("/", 422),
        ("a%5Cb", 422),
        ("a@b", 422),
        ("a%00b", 422),
        ("x" * 129, 422),
        ("%FF", 400),
        ("%C3", 400),
        ("%zz", 400),
        ("100%", 400),
        ("scope:", 422),
        ("scope:_default", 422),
        ("scope:abc", 422),
        ("scope:zz", 422),
        ("scope:ab cd", 422),
        ("scope:" + "00" * 33, 422),
        ("scope:%EF%BC%91%EF%BC%91", 422),
    ],
)
async def test_a_path_that_is_no_salt_is_refused_without_being_repeated(
    operator: httpx.AsyncClient, card: FakeCard, path: str, status: int
) -> None:
    for method in ("PUT", "GET", "DELETE"):
        answer = await operator.request(method, f"/quota/{path}", content=raw("1"))
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert not card.limits


@pytest.mark.parametrize(
    ("refusal", "code"),
    [(CardOffline(), "card_offline"), (CardRecovering(), "recovering"), (JournalFull(), "busy")],
)
async def test_a_change_that_the_card_cannot_take_is_503_and_reading_goes_on(
    operator: httpx.AsyncClient, card: FakeCard, refusal: Exception, code: str
) -> None:
    card.limits[scope_of("s")] = GIB
    card.refusal = refusal
    for answer in (
        await operator.put("/quota/s", json={"limit_gb": 1}),
        await operator.delete("/quota/s"),
        await operator.put("/v1/tenants/t", json={"scope": "00", "limit_bytes": 1}),
        await operator.delete("/v1/tenants/t"),
        await operator.delete("/v1/namespaces/ns"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        assert answer.headers["retry-after"] == "1"
    # What is wrong in itself is said all the same.
    assert (await operator.put("/quota/s", content=raw("NaN"))).status_code == 400
    assert (await operator.get("/quota/s")).json()["exists"]


async def test_a_salt_is_in_no_answer_and_no_log(
    operator: httpx.AsyncClient, card: FakeCard, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    texts = []
    for path in (SALT, f"{SALT}/", f"{SALT}%2F", f"{SALT}%FF", f"{SALT}@", f"scope:{SALT}", SALT * 9):
        for method, body in (
            ("PUT", raw("1")),
            ("PUT", raw('"' + SALT + '"')),
            ("GET", b""),
            ("DELETE", b""),
        ):
            answer = await operator.request(method, f"/quota/{path}", content=body)
            texts.append(answer.text + str(answer.headers))
    card.refusal = CardOffline()
    texts.append((await operator.delete(f"/quota/{SALT}")).text)
    texts += [(await operator.get(path)).text for path in ("/quota", "/v1/tenants", "/metrics", "/v1/status")]
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("httpx")]
    assert SALT not in "".join([*texts, *ours])


@pytest.mark.parametrize("query", ["scope=aa", "limit_gb=1", "limit_gb"])
@pytest.mark.parametrize("path", ["/quota/_default", "/v1/tenants/acme", "/v1/namespaces/ns"])
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_a_change_takes_no_query_parameter_that_it_does_not_know(
    operator: httpx.AsyncClient, card: FakeCard, method: str, path: str, query: str
) -> None:
    if method == "DELETE" and path.startswith("/v1/namespaces"):
        query = query.replace("scope", "scopes")
    await card.set_tenant("acme", b"\x01" * 16, GIB)
    card.limits[b""] = GIB
    body = {"ttl_idle_s": 5} if "namespaces" in path else {"limit_gb": 2}
    answer = await operator.request(method, f"{path}?{query}", json=body)
    assert answer.status_code in {400, 422}
    assert "query" in answer.json()["error"]["message"]
    assert card.limits == {b"": GIB, b"\x01" * 16: GIB}
