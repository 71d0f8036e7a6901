"""What an operator sees and changes over HTTP: quotas, tenants, namespaces and wipes.

A salt in a path becomes a scope before anything else is done with it; nothing here keeps, logs or answers it.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import JSONResponse

from xkv_gateway.card.administration import WipeStage
from xkv_gateway.service import documents as d
from xkv_gateway.service.bodies import (
    BODY_BYTES_MAX,
    GB_BYTES,
    gb_from_limit,
    limit_bytes_of,
    limit_from_gb,
    parse_body,
    scope_from_hex,
    seconds_of,
    too_large,
)
from xkv_gateway.service.endpoints import COUNT_MAX, WAIT_DEFAULT_S, WAIT_MAX_S
from xkv_gateway.service.names import (
    namespace_in_path,
    path_tail,
    registered_scope,
    scope_in_path,
    scope_name,
    tenant_name,
)
from xkv_gateway.service.problems import bad_field, not_found
from xkv_rpc.messages import DEFAULT_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from xkv_gateway.card.administration import Administration
    from xkv_gateway.core.tenancy import TenantInfo

TTL_FIELDS: Final = ("ttl_idle_s", "ttl_total_s")
CURSOR_DIGITS_MAX: Final = 18


class OperatorRoutes:
    """The handlers.

    Args:
        administration: the card's.
        clock: monotonic ns.
        renamed: called when a tenant got or lost its name.
    """

    def __init__(
        self, administration: Administration, clock: Callable[[], int], renamed: Callable[[], None]
    ) -> None:
        self._card = administration
        self._clock = clock
        self._renamed = renamed

    # --- quotas, with LMCache's bodies ------------------------------------------------------------------------

    async def list_quotas(self, _: Request) -> Response:
        """All registered quotas."""
        users: dict[str, Any] = {}
        cursor: int | None = 0
        while cursor is not None:
            page = self._card.tenants(cursor)
            for info in page.items:
                if info.limit_bytes is not None:
                    users[info.name or scope_name(info.scope)] = {
                        "limit_gb": gb_from_limit(info.limit_bytes),
                        "current_usage_gb": info.held.charged_bytes / GB_BYTES,
                    }
            cursor = page.next_cursor
            await asyncio.sleep(0)
        return JSONResponse({"users": users})

    async def get_quota(self, request: Request) -> Response:
        """One quota."""
        scope = scope_in_path(_tail(request, 1))
        info = self._card.tenant(scope)
        return _answer(
            d.QuotaDocument(
                cache_salt=scope_name(scope),
                limit_gb=gb_from_limit(info.limit_bytes or 0),
                current_usage_gb=info.held.charged_bytes / GB_BYTES,
                exists=info.limit_bytes is not None,
            )
        )

    async def put_quota(self, request: Request) -> Response:
        """Set a quota."""
        scope = scope_in_path(_tail(request, 1))
        limit_bytes = limit_from_gb(parse_body(await _body(request), ("limit_gb",))["limit_gb"])
        await self._card.set_limit(scope, limit_bytes)
        return _answer(d.QuotaSet(scope_name(scope), gb_from_limit(limit_bytes)))

    async def delete_quota(self, request: Request) -> Response:
        """Take a quota away."""
        scope = scope_in_path(_tail(request, 1))
        removed = await self._card.clear_limit(scope)
        return _answer(d.QuotaRemoved(scope_name(scope), "removed" if removed else "not_found"))

    # --- tenants ----------------------------------------------------------------------------------------------

    async def list_tenants(self, request: Request) -> Response:
        """A page of the registered tenants."""
        page = self._card.tenants(*_page(request))
        rules = self._card.rules
        unnamed_objects, unnamed_bytes = self._card.usage_of_unnamed()
        return _answer(
            d.TenantList(
                tenants=[d.TenantDocument.of(info) for info in page.items],
                total=page.total,
                next_cursor=page.next_cursor,
                complete=self._card.tenants_known,
                policy=rules.policy.value,
                enforcement=rules.enforcement.value,
                unnamed_objects=unnamed_objects,
                unnamed_charged_bytes=unnamed_bytes,
            )
        )

    async def get_tenant(self, request: Request) -> Response:
        """One tenant."""
        return _answer(d.TenantDocument.of(self._tenant(_tail(request, 2))))

    def _tenant(self, text: str) -> TenantInfo:
        scope = b"" if text == DEFAULT_NAME else registered_scope(text)
        info = self._card.tenant_named(text) if scope is None else self._card.tenant(scope)
        if info is None:
            raise not_found("no tenant has that name")
        return info

    async def put_tenant(self, request: Request) -> Response:
        """Name a scope and set its quota."""
        name = tenant_name(_tail(request, 2))
        body = parse_body(await _body(request), ("scope",), ("limit_bytes", "no_limit"))
        scope = scope_from_hex(body["scope"])
        limit_bytes = None
        if "no_limit" not in body:
            if "limit_bytes" not in body:
                raise bad_field("limit_bytes", "is missing")
            limit_bytes = limit_bytes_of(body["limit_bytes"])
        elif body["no_limit"] is not True or "limit_bytes" in body:
            raise bad_field("no_limit", "must be true, and stand instead of limit_bytes")
        info = await self._card.set_tenant(name, scope, limit_bytes)
        self._renamed()
        return _answer(d.TenantDocument.of(info))

    async def delete_tenant(self, request: Request) -> Response:
        """Take name and quota away."""
        name = tenant_name(_tail(request, 2))
        if not await self._card.remove_tenant(name):
            raise not_found("no tenant has that name")
        self._renamed()
        return _answer(d.TenantRemoved(name))

    async def confirm_tenants(self, _: Request) -> Response:
        """Take the operator's word that the quotas are complete."""
        await self._card.confirm_tenants()
        return _answer(d.Health())

    # --- namespaces -------------------------------------------------------------------------------------------

    async def list_namespaces(self, request: Request) -> Response:
        """A page of the namespaces."""
        page = self._card.namespaces(*_page(request))
        documents = [d.NamespaceDocument.of(info) for info in page.items]
        return _answer(d.NamespaceList(documents, page.total, page.next_cursor))

    async def get_namespace(self, request: Request) -> Response:
        """One namespace and a page of its scopes."""
        name = namespace_in_path(_tail(request, 2))
        info = self._card.namespace(name)
        if info is None:
            raise not_found("nothing is held in that namespace, and it has no rule")
        page = self._card.scopes_of(name, *_page(request))
        whole = d.NamespaceDocument.of(info)
        scopes = [d.ScopeDocument.of(scope) for scope in page.items]
        return _answer(
            d.NamespaceDetail(
                whole.name,
                whole.objects,
                whole.charged_bytes,
                scopes,
                page.total,
                page.next_cursor,
                whole.ttl_idle_s,
                whole.ttl_total_s,
            )
        )

    async def put_namespace(self, request: Request) -> Response:
        """Set how long objects may live."""
        name = namespace_in_path(_tail(request, 2))
        body = parse_body(await _body(request), (), TTL_FIELDS)
        if not body:
            raise bad_field(TTL_FIELDS[0], f"and {TTL_FIELDS[1]} are both missing")
        idle_s, total_s = (seconds_of(body[field], field) if field in body else None for field in TTL_FIELDS)
        return _answer(d.NamespaceDocument.of(await self._card.set_ttl(name, idle_s, total_s)))

    async def delete_namespace(self, request: Request) -> Response:
        """Wipe: 200 with the report if it is done in time, else 202 with the progress and where to ask for more."""
        namespace = namespace_in_path(_tail(request, 2))
        query = request.state.query
        if query.get("scope") == "":
            raise bad_field("scope", f"the default scope is written {DEFAULT_NAME}")
        scope = scope_from_hex(query["scope"]) if "scope" in query else None
        wait_s = _integer(query, "wait_s", 0, WAIT_MAX_S, WAIT_DEFAULT_S)
        wipe = self._card.wipe(namespace, scope)
        await wipe.durable()
        try:
            async with asyncio.timeout(wait_s):
                progress = await wipe.run()
        except TimeoutError:
            progress = wipe.progress
        status = HTTPStatus.OK if progress.stage is WipeStage.DONE else HTTPStatus.ACCEPTED
        response = _answer(d.WipeDocument.of(progress, self._clock()), status)
        response.headers["location"] = f"/v1/wipes/{progress.ident}"
        return response

    async def list_wipes(self, _: Request) -> Response:
        """All wipes that are known."""
        now_ns = self._clock()
        return _answer(d.WipeList([d.WipeDocument.of(wipe, now_ns) for wipe in self._card.wipes()]))

    async def get_wipe(self, request: Request) -> Response:
        """One wipe."""
        ident = _integer({"id": _tail(request, 2)}, "id", 0, (1 << 64) - 1, 0)
        for progress in self._card.wipes():
            if progress.ident == ident:
                return _answer(d.WipeDocument.of(progress, self._clock()))
        raise not_found("no wipe has that id, or it ended long ago")


def _answer(document: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return JSONResponse(d.as_json(document), status_code=status)


def _tail(request: Request, segments: int) -> str:
    return path_tail(request.scope["raw_path"], segments)


async def _body(request: Request) -> bytes:
    """Return the body, if it is small enough."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_BYTES_MAX:
            raise too_large()
    return bytes(raw)


def _integer(query: dict[str, str], name: str, least: int, most: int, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    digits = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not digits or not least <= int(text) <= most:
        raise bad_field(name, f"must be an integer from {least} to {most}")
    return int(text)


def _page(request: Request) -> tuple[int, int]:
    query = request.state.query
    cursor = _integer(query, "cursor", 0, 10**CURSOR_DIGITS_MAX - 1, 0)
    return cursor, _integer(query, "count", 1, COUNT_MAX, COUNT_MAX)
