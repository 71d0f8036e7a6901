from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.harness import ACME, SALTER, SECRET
from xkv_frontend.core.names import (
    NameRefusedError,
    Scope,
    ScopeIds,
    SessionName,
    TenantName,
    UserName,
    deployment_name,
    narrower,
    session_name,
    tenant_name,
    user_name,
)
from xkv_frontend.core.salt import Salter, Secret, SecretRefusedError, scope_tag

VECTOR = "-e-E44q1cFy6AnPDukBHaNvoPQh1m_w-Z9dC7NIn2E4"
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True).map(TenantName)
IDS = st.from_regex(r"[^|\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,8}", fullmatch=True)


def test_the_documented_vector_gives_the_documented_salt_and_scope() -> None:
    salt = SALTER.salt(Scope.TENANT, ScopeIds(ACME))
    assert salt == VECTOR
    assert scope_tag(VECTOR) == "32a2f15b58e32fc0fc691c82a6fbb54f"


@settings(derandomize=True, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([Scope.TENANT, Scope.USER, Scope.SESSION]), NAMES, IDS, IDS, st.booleans()),
        min_size=2,
        max_size=12,
    )
)
def test_different_scopes_never_share_a_salt(asked: list[tuple[Scope, TenantName, str, str, bool]]) -> None:
    found: dict[str, tuple[object, ...]] = {}
    for scope, tenant, user, session, anonymous in asked:
        named = scope is Scope.USER or not anonymous
        ids = ScopeIds(tenant, UserName(user) if named else None, SessionName(session))
        relevant = {
            Scope.TENANT: (scope, tenant),
            Scope.USER: (scope, tenant, user),
            Scope.SESSION: (scope, tenant, ids.user, session),
        }[scope]
        salt = SALTER.salt(scope, ids)
        assert salt is not None
        assert found.setdefault(salt, relevant) == relevant


def test_a_request_scope_is_new_each_time_and_none_has_no_salt() -> None:
    ids = ScopeIds(ACME)
    assert SALTER.salt(Scope.NONE, ids) is None
    assert SALTER.salt(Scope.REQUEST, ids, bytes(16)) != SALTER.salt(Scope.REQUEST, ids, bytes(15) + b"\1")


def test_deployment_and_secret_change_every_salt_and_a_restart_changes_none() -> None:
    ids = ScopeIds(ACME)
    salts = {
        Salter(Secret(SECRET), "prod").salt(Scope.TENANT, ids),
        Salter(Secret(SECRET), "test").salt(Scope.TENANT, ids),
        Salter(Secret(SECRET[::-1]), "prod").salt(Scope.TENANT, ids),
    }
    assert len(salts) == 3
    assert VECTOR in salts


@pytest.mark.parametrize(
    "name", ["", "a|b", ".", "..", "_default", "a/b", "%2F", "a b", "ä", "a" * 65, "a\n", "-a"]
)
def test_names_that_could_be_taken_for_others_are_refused(name: str) -> None:
    for check in (tenant_name, deployment_name):
        with pytest.raises(NameRefusedError):
            check(name)


@pytest.mark.parametrize("name", ["", "a|b", "a\0", "a\n", "\ud800", "a" * 129])
def test_users_and_sessions_have_no_separator_and_no_control_characters(name: str) -> None:
    for check in (user_name, session_name):
        with pytest.raises(NameRefusedError):
            check(name)
    assert user_name("ann@example.org, ä") == "ann@example.org, ä"


@pytest.mark.parametrize("key", [b"", bytes(31), SECRET[:31], bytes(32), b"ab" * 32, b"changeme" * 4 + b"c"])
def test_short_secrets_and_placeholders_are_refused(key: bytes) -> None:
    if key == b"changeme" * 4 + b"c":
        key = b"change" * 8
    with pytest.raises(SecretRefusedError) as caught:
        Secret(key)
    assert not key or repr(key)[2:-1] not in str(caught.value)


def test_a_secret_is_in_no_text_and_not_pickled() -> None:
    secret = Secret(SECRET)
    assert SECRET.hex() not in repr(secret) + str(secret) + f"{secret!r}"
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_a_file_holds_hexadecimal_or_the_bytes() -> None:
    same = Secret(SECRET).digest(b"x")
    assert Secret.from_file_content(SECRET.hex().encode() + b"\n").digest(b"x") == same
    assert Secret.from_file_content(SECRET).digest(b"x") == same
    text = b"correct horse battery staple and more"
    assert Secret.from_file_content(text + b"\n").digest(b"x") == Secret(text).digest(b"x")
    with pytest.raises(SecretRefusedError):
        Secret.from_file_content(SECRET[:20].hex().encode())


def test_media_names_stay_inside_a_scope() -> None:
    def name(scope: Scope, tenant: str, uuid: str) -> str:
        return SALTER.media_uuid(scope, ScopeIds(TenantName(tenant), UserName("u")), b"", uuid)

    assert name(Scope.TENANT, "a", "x") == name(Scope.TENANT, "a", "x")
    names = {
        name(Scope.TENANT, "a", "x"),
        name(Scope.TENANT, "b", "x"),
        name(Scope.TENANT, "a", "y"),
        name(Scope.USER, "a", "x"),
    }
    assert len(names) == 4
    assert name(Scope.NONE, "a", "x") == name(Scope.TENANT, "a", "x")


def test_of_two_scopes_the_narrower_wins() -> None:
    order = list(Scope)
    for first in order:
        for second in order:
            assert narrower(first, second) is order[max(order.index(first), order.index(second))]
