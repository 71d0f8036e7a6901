"""The routes of the admin port, in one table: the router and the OpenAPI document are both made from it."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from xkv_gateway.core.tenancy import TTL_S_MAX
from xkv_gateway.service import documents as d
from xkv_gateway.service.status import CardStatus, Status

LIMIT_GB: Final[dict[str, Any]] = {"type": "number", "minimum": 0, "description": "Units of 2^30 bytes."}
LIMIT_BYTES: Final[dict[str, Any]] = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
QUOTA_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"limit_gb": LIMIT_GB},
    "required": ["limit_gb"],
    "additionalProperties": False,
}
TENANT_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "scope": {
            "type": "string",
            "description": "Hexadecimal, at most 32 bytes; empty: the default scope.",
        },
        "limit_bytes": LIMIT_BYTES,
        "no_limit": {"const": True, "description": "Instead of limit_bytes: a name without a quota."},
    },
    "required": ["scope"],
    "additionalProperties": False,
}
TTL_S: Final[dict[str, Any]] = {"type": "integer", "minimum": 0, "maximum": TTL_S_MAX}
NAMESPACE_BODY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "ttl_idle_s": {**TTL_S, "description": "Seconds since the last use; 0: no limit."},
        "ttl_total_s": {**TTL_S, "description": "Seconds since the store; 0: no limit."},
    },
    "minProperties": 1,
    "additionalProperties": False,
}
COUNT_MAX: Final = 1000
WAIT_MAX_S: Final = 60
WAIT_DEFAULT_S: Final = 10


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter."""

    name: str
    description: str
    schema: dict[str, Any]


PAGE: Final = (
    Query("cursor", "`next_cursor` of the page before.", {"type": "integer", "minimum": 0, "default": 0}),
    Query(
        "count",
        "Entries of a page.",
        {"type": "integer", "minimum": 1, "maximum": COUNT_MAX, "default": COUNT_MAX},
    ),
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    """A name in braces is the rest of the path, and may have slashes."""
    handler: str
    """Method of the handlers."""
    summary: str
    answer: type | None
    """None: not JSON of ours."""
    body: dict[str, Any] | None = None
    query: tuple[Query, ...] = ()
    problems: tuple[HTTPStatus, ...] = ()
    statuses: tuple[HTTPStatus, ...] = (HTTPStatus.OK,)


_BAD: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
_GONE: Final = (HTTPStatus.NOT_FOUND,)
_CHANGE: Final = (*_BAD, HTTPStatus.INSUFFICIENT_STORAGE, HTTPStatus.SERVICE_UNAVAILABLE)
_SALT: Final = "/quota/{cache_salt}"
_TENANT: Final = "/v1/tenants/{name}"
_NAMESPACE: Final = "/v1/namespaces/{ns}"

ENDPOINTS: Final = (
    Endpoint("GET", "/healthz", "healthz", "Whether the process answers", d.Health),
    Endpoint(
        "GET",
        "/readyz",
        "readyz",
        "Whether requests are served from the card",
        d.Readiness,
        problems=(HTTPStatus.SERVICE_UNAVAILABLE,),
    ),
    Endpoint("GET", "/v1/status", "status", "Everything at one moment", Status),
    Endpoint("GET", "/v1/card", "card", "The card", CardStatus),
    Endpoint("GET", "/metrics", "metrics", "Prometheus text format", None),
    Endpoint("GET", "/openapi.json", "openapi", "This document", None),
    Endpoint("GET", "/quota", "list_quotas", "All quotas and their use", d.QuotaList),
    Endpoint("GET", _SALT, "get_quota", "One quota and its use", d.QuotaDocument, problems=_BAD),
    Endpoint(
        "PUT",
        _SALT,
        "put_quota",
        "Set a quota; 0: may store nothing",
        d.QuotaSet,
        body=QUOTA_BODY,
        problems=(*_CHANGE, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    ),
    Endpoint("DELETE", _SALT, "delete_quota", "Take a quota away", d.QuotaRemoved, problems=_CHANGE),
    Endpoint(
        "GET", "/v1/tenants", "list_tenants", "Registered tenants", d.TenantList, query=PAGE, problems=_BAD
    ),
    Endpoint(
        "GET",
        _TENANT,
        "get_tenant",
        "One tenant, by name, `scope:HEX` or `_default`",
        d.TenantDocument,
        problems=(*_BAD, *_GONE),
    ),
    Endpoint(
        "PUT",
        _TENANT,
        "put_tenant",
        "Name a scope and set its quota",
        d.TenantDocument,
        body=TENANT_BODY,
        problems=(*_CHANGE, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    ),
    Endpoint(
        "DELETE",
        _TENANT,
        "delete_tenant",
        "Take name and quota away; what it holds stays",
        d.TenantRemoved,
        problems=(*_CHANGE, *_GONE),
    ),
    Endpoint(
        "POST",
        "/v1/tenants:confirm",
        "confirm_tenants",
        "Say that the quotas are complete, after damage took some away",
        d.Health,
        problems=(HTTPStatus.SERVICE_UNAVAILABLE,),
    ),
    Endpoint(
        "GET",
        "/v1/namespaces",
        "list_namespaces",
        "Namespaces that hold something, or have a rule",
        d.NamespaceList,
        query=PAGE,
        problems=_BAD,
    ),
    Endpoint(
        "GET",
        _NAMESPACE,
        "get_namespace",
        "One namespace and its scopes",
        d.NamespaceDetail,
        query=PAGE,
        problems=(*_BAD, *_GONE),
    ),
    Endpoint(
        "PUT",
        _NAMESPACE,
        "put_namespace",
        "Set how long objects of a namespace may live; what is not named stays as it is",
        d.NamespaceDocument,
        body=NAMESPACE_BODY,
        problems=(*_CHANGE, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    ),
    Endpoint(
        "DELETE",
        _NAMESPACE,
        "delete_namespace",
        "Wipe a namespace, or one scope in it: 200 with the report, or 202 with the progress",
        d.WipeDocument,
        query=(
            Query("scope", "Only this scope: hexadecimal or `_default`.", {"type": "string", "minLength": 1}),
            Query(
                "wait_s",
                "How long to wait for the report.",
                {"type": "integer", "minimum": 0, "maximum": WAIT_MAX_S, "default": WAIT_DEFAULT_S},
            ),
        ),
        problems=_CHANGE,
        statuses=(HTTPStatus.OK, HTTPStatus.ACCEPTED),
    ),
    Endpoint("GET", "/v1/wipes", "list_wipes", "Wipes under way, and the last few that ended", d.WipeList),
    Endpoint("GET", "/v1/wipes/{id}", "get_wipe", "One wipe", d.WipeDocument, problems=(*_BAD, *_GONE)),
)
