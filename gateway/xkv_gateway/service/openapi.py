"""The OpenAPI document, made from the table of routes and the types of the answers."""

from __future__ import annotations

import re
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter

from xkv_gateway import __version__
from xkv_gateway.service.documents import ErrorDocument
from xkv_gateway.service.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from xkv_gateway.service.endpoints import Endpoint

VERSION: Final = "3.1.0"
TEMPLATE: Final = "#/components/schemas/{model}"
_NAME: Final = re.compile(r"\{(\w+)\}")


@cache
def openapi_document() -> dict[str, Any]:
    """Return the document; the caller only reads it."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": VERSION,
        "info": {"title": "xkv-gateway, admin port", "version": __version__},
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


def _operation(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.handler,
        "summary": endpoint.summary,
        "responses": {str(int(status)): _answer(endpoint, status, schemas) for status in endpoint.statuses},
    }
    error = _reference(ErrorDocument, schemas)
    for status in sorted({HTTPStatus.BAD_REQUEST, *endpoint.problems}):  # a query that is not understood
        operation["responses"][str(int(status))] = _content(status.phrase, error)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _NAME.findall(endpoint.path)
    ]
    parameters += [
        {"name": query.name, "in": "query", "description": query.description, "schema": query.schema}
        for query in endpoint.query
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        content = {"application/json": {"schema": endpoint.body}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _answer(endpoint: Endpoint, status: HTTPStatus, schemas: dict[str, Any]) -> dict[str, Any]:
    if endpoint.answer is not None:
        return _content(status.phrase, _reference(endpoint.answer, schemas))
    if endpoint.path == "/metrics":
        return {"description": status.phrase, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return _content(status.phrase, {"type": "object"})


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _reference(kind: type, schemas: dict[str, Any]) -> dict[str, Any]:
    """Enter the schema of a type, and of what it consists of; return the reference to it."""
    if kind.__name__ not in schemas:
        schema = TypeAdapter(kind).json_schema(ref_template=TEMPLATE, mode="serialization")
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    return {"$ref": TEMPLATE.format(model=kind.__name__)}
