from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.frontend.bodies import rewritten
from tests.frontend.harness import (
    ACME,
    HELLO,
    KEY_A,
    KEY_ALICE,
    KEY_B,
    SALTER,
    Running,
    salt_of,
)
from xkv_frontend.core.names import Scope, ScopeIds, SessionName, UserName
from xkv_frontend.core.policy import Identity, Policy, RoutePolicy, TenantPolicy
from xkv_frontend.core.refusal import Refusal
from xkv_frontend.core.rewrite import rewrite
from xkv_frontend.core.routes import ROUTES, RouteName

if TYPE_CHECKING:
    from tests.frontend.fake_vllm import FakeVllm


def salt_with(
    policy: Policy, body: dict[str, Any], user: str | None = None, route: RouteName = RouteName.CHAT
) -> str | None:
    row = next(row for row in ROUTES if row.name is route)
    identity = Identity(ACME, UserName(user) if user else None)
    result: str | None = rewrite(row, body, identity, policy, SALTER, bytes).body.get("cache_salt")
    return result


def salt_for(scope: Scope, user: str | None = None, session: str | None = None) -> str | None:
    ids = ScopeIds(ACME, UserName(user) if user else None, SessionName(session) if session else None)
    return SALTER.salt(scope, ids, bytes(16) if scope is Scope.REQUEST else b"")


def of_scope(scope: Scope, **more: Any) -> Policy:
    return Policy(tenants={ACME: TenantPolicy(scope=scope, **more)})


def test_the_policy_says_who_shares() -> None:
    both = {"xkv_scope": {"user": "u", "session": "s"}}
    assert salt_with(of_scope(Scope.NONE), HELLO) is None
    assert salt_with(of_scope(Scope.TENANT), HELLO) == salt_of("acme")
    assert salt_with(of_scope(Scope.USER), HELLO, "u") == salt_for(Scope.USER, "u")
    assert salt_with(of_scope(Scope.USER), {**HELLO, "xkv_scope": {"user": "u"}}) == salt_for(Scope.USER, "u")
    assert salt_with(of_scope(Scope.SESSION), {**HELLO, **both}) == salt_for(Scope.SESSION, "u", "s")
    assert salt_with(of_scope(Scope.REQUEST), {**HELLO, **both}) == salt_for(Scope.REQUEST)


def test_a_client_narrows_and_never_widens() -> None:
    session = {**HELLO, "xkv_scope": {"session": "s"}}
    assert salt_with(of_scope(Scope.NONE), session) == salt_for(Scope.SESSION, None, "s")
    assert salt_with(of_scope(Scope.TENANT), session) == salt_for(Scope.SESSION, None, "s")
    assert salt_with(of_scope(Scope.TENANT), session, "u") == salt_for(Scope.SESSION, "u", "s")
    assert salt_with(of_scope(Scope.REQUEST), session) == salt_for(Scope.REQUEST)
    assert salt_with(of_scope(Scope.TENANT), {**HELLO, "xkv_scope": {}}) == salt_of("acme")
    with pytest.raises(Refusal) as caught:
        salt_with(of_scope(Scope.TENANT, client_narrowing=False), session)
    assert caught.value.status == 403


def test_a_user_cannot_claim_to_be_another() -> None:
    assert salt_with(of_scope(Scope.USER), {**HELLO, "xkv_scope": {"user": "u"}}, "u") == salt_for(
        Scope.USER, "u"
    )
    with pytest.raises(Refusal) as caught:
        salt_with(of_scope(Scope.USER), {**HELLO, "xkv_scope": {"user": "v"}}, "u")
    assert caught.value.status == 403


@pytest.mark.parametrize("scope", [Scope.USER, Scope.SESSION])
def test_a_scope_without_its_name_is_refused_and_not_widened(scope: Scope) -> None:
    with pytest.raises(Refusal) as caught:
        salt_with(of_scope(scope), HELLO)
    assert caught.value.status == 400


def test_a_route_only_narrows() -> None:
    routes = {
        RouteName.CHAT: RoutePolicy(scope=Scope.REQUEST),
        RouteName.COMPLETIONS: RoutePolicy(scope=Scope.NONE),
    }
    policy = Policy(TenantPolicy(scope=Scope.TENANT), routes=routes)
    assert salt_with(policy, HELLO) == salt_for(Scope.REQUEST)
    assert salt_with(policy, {"prompt": "x"}, route=RouteName.COMPLETIONS) == salt_of("acme")


def test_staying_off_the_card_is_the_policys_and_the_clients_only_where_allowed() -> None:
    off = Policy(TenantPolicy(store=False))
    assert rewritten(HELLO, policy=off)["kv_transfer_params"] == {"xkv_store": False}
    assert "kv_transfer_params" not in rewritten(HELLO)
    assert rewritten({**HELLO, "xkv_store": True}, policy=off)["kv_transfer_params"] == {"xkv_store": False}
    with pytest.raises(Refusal) as caught:
        rewritten({**HELLO, "xkv_store": False})
    assert caught.value.status == 403
    allowed = Policy(TenantPolicy(client_store=True))
    assert rewritten({**HELLO, "xkv_store": False}, policy=allowed)["kv_transfer_params"] == {
        "xkv_store": False
    }
    by_route = Policy(routes={RouteName.CHAT: RoutePolicy(store=False)})
    assert rewritten(HELLO, policy=by_route)["kv_transfer_params"] == {"xkv_store": False}
    with pytest.raises(Refusal) as caught:
        rewritten({"input": "x"}, route=RouteName.RESPONSES, policy=off)
    assert caught.value.status == 501, "a route that cannot carry it is closed, not left open"


async def test_a_key_with_a_user_and_one_without_share_the_tenant(front: Running, fake: FakeVllm) -> None:
    for key in (KEY_A, KEY_ALICE, KEY_B):
        await front.post(HELLO, key=key)
    salts = [request.json["cache_salt"] for request in fake.requests]
    assert salts == [salt_of("acme"), salt_of("acme"), salt_of("beta")]
