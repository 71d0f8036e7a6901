"""What the operator decides: scopes, whether the external cache is used, limits, media; and how a decision follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from xkv_frontend.core.names import Scope, ScopeIds, SessionName, TenantName, UserName, narrower
from xkv_frontend.core.refusal import Code, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xkv_frontend.core.routes import Route, RouteName

BODY_BYTES_MAX_DEFAULT: Final = 32 << 20


class UnknownFields(StrEnum):
    """What happens to a field that no table names."""

    REJECT = "reject"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a request, as the authentication says; never from the body."""

    tenant: TenantName
    user: UserName | None = None
    credential: str = ""
    """Public id of the credential, for the log and for revoking; never the credential itself."""


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What a client asks for in `xkv_scope`."""

    user: UserName | None = None
    session: SessionName | None = None


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """The rules of one tenant."""

    scope: Scope = Scope.TENANT
    store: bool = True
    """False: nothing of this tenant goes to or comes from the external cache."""
    client_store: bool = False
    """Whether the client may say `xkv_store: false` itself."""
    client_narrowing: bool = True
    """Whether the client may say `xkv_scope`."""
    media_hosts: frozenset[str] = frozenset()
    """Hosts from which the server may fetch media over https; `data:` URLs are always allowed."""
    requests_per_s: float | None = None
    burst: int = 20
    """Requests that may come at once where `requests_per_s` is set."""
    concurrency: int = 256
    """Requests in flight at any time."""


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """The rules of one route; they only ever narrow what the tenant's say."""

    scope: Scope | None = None
    store: bool = True
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """What holds for one request."""

    scope: Scope
    ids: ScopeIds
    store: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything the operator decides."""

    default: TenantPolicy = TenantPolicy()
    tenants: Mapping[TenantName, TenantPolicy] = field(default_factory=dict)
    routes: Mapping[RouteName, RoutePolicy] = field(default_factory=dict)
    unknown_fields: UnknownFields = UnknownFields.REJECT
    body_bytes_max: int = BODY_BYTES_MAX_DEFAULT

    def tenant(self, name: TenantName) -> TenantPolicy:
        """Return the rules of a tenant."""
        return self.tenants.get(name, self.default)

    @property
    def routes_off(self) -> frozenset[RouteName]:
        """Routes that the operator has switched off."""
        return frozenset(name for name, route in self.routes.items() if not route.enabled)

    def decide(self, route: Route, identity: Identity, asked: Narrowing, *, client_store: bool) -> Decision:
        """Return what holds: the narrowest of what the tenant's rules, the route's rules and the client say.

        Raises:
            Refusal: The client asks for what it may not, a name that the scope needs is missing, or the route cannot carry
                the decision.
        """
        rules = self.tenant(identity.tenant)
        of_route = self.routes.get(route.name, RoutePolicy())
        if asked != Narrowing() and not rules.client_narrowing:
            raise Refusal(
                Code.FORBIDDEN,
                "this tenant's policy does not let clients narrow the scope",
                field="xkv_scope",
            )
        if not client_store and not rules.client_store:
            raise Refusal(
                Code.FORBIDDEN, "this tenant's policy does not let clients say xkv_store", field="xkv_store"
            )
        if identity.user is not None and asked.user not in (None, identity.user):
            raise Refusal(Code.FORBIDDEN, "this credential belongs to another user", field="xkv_scope.user")
        ids = ScopeIds(identity.tenant, identity.user or asked.user, asked.session)
        scope = narrower(rules.scope, of_route.scope or Scope.NONE)
        if asked.session is not None:
            scope = narrower(scope, Scope.SESSION)
        elif asked.user is not None:
            scope = narrower(scope, Scope.USER)
        _require(scope, ids)
        store = rules.store and of_route.store and client_store
        if not store and not route.carries_store:
            message = "the policy keeps this request out of the external cache, and this route cannot say so to the server"
            raise Refusal(Code.NOT_ENFORCEABLE, message)
        return Decision(scope, ids, store)


def _require(scope: Scope, ids: ScopeIds) -> None:
    if scope is Scope.USER and ids.user is None:
        raise Refusal(
            Code.SCOPE_REQUIRED, "the policy needs a user: name one in xkv_scope.user", field="xkv_scope.user"
        )
    if scope is Scope.SESSION and ids.session is None:
        message = "the policy needs a session: name one in xkv_scope.session"
        raise Refusal(Code.SCOPE_REQUIRED, message, field="xkv_scope.session")
