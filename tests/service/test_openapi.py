from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from tests.service.fake_card import FakeCard, fake_sources
from xkv_gateway.service.admin import AdminRoutes
from xkv_gateway.service.endpoints import ENDPOINTS
from xkv_gateway.service.operator_routes import OperatorRoutes
from xkv_gateway.service.router import build_routes

if TYPE_CHECKING:
    import httpx


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_the_document_names_exactly_the_routes_that_are_served(operator: httpx.AsyncClient) -> None:
    document = (await operator.get("/openapi.json")).json()
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    sources = fake_sources()
    handlers = OperatorRoutes(sources.administration, sources.clock, lambda: None)
    routes = build_routes(AdminRoutes(sources), handlers)
    served = {
        (method, route.path.replace(":rest}", "}"))
        for route in routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert told == served == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}


async def test_each_operation_answers_as_the_document_says(
    operator: httpx.AsyncClient, card: FakeCard
) -> None:
    document = (await operator.get("/openapi.json")).json()
    card.names[b"\x00"] = "t"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            real = re.sub(r"\{\w+\}", "t", path)
            content = (
                b'{"limit_gb": 1}' if path.startswith("/quota") else b'{"scope": "00", "limit_bytes": 1}'
            )
            answer = await operator.request(method, real, content=content if method == "put" else None)
            assert str(answer.status_code) in operation["responses"], (method, path)
            told = operation["responses"][str(answer.status_code)]["content"]
            assert answer.headers["content-type"].partition(";")[0] in told
            schema = told.get("application/json", {}).get("schema", {})
            if "$ref" in schema:
                properties = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]][
                    "properties"
                ]
                assert answer.json().keys() <= properties.keys(), (method, path)


async def test_the_document_refers_to_nothing_that_it_does_not_have(operator: httpx.AsyncClient) -> None:
    document = (await operator.get("/openapi.json")).json()
    names = {reference.rpartition("/")[2] for reference in references(document)}
    assert names <= document["components"]["schemas"].keys()
    assert document["openapi"].startswith("3.1")
    assert len({op["operationId"] for ops in document["paths"].values() for op in ops.values()}) == len(
        ENDPOINTS
    )


async def test_other_methods_are_405_and_say_which_there_are(operator: httpx.AsyncClient) -> None:
    for method, path, allowed in (
        ("POST", "/quota/x", {"GET", "HEAD", "PUT", "DELETE"}),
        ("PUT", "/quota", {"GET", "HEAD"}),
        ("PATCH", "/v1/tenants/x", {"GET", "HEAD", "PUT", "DELETE"}),
        ("OPTIONS", "/v1/namespaces/x", {"GET", "HEAD", "PUT", "DELETE"}),
        ("GET", "/v1/tenants:confirm", {"POST"}),
    ):
        answer = await operator.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == allowed
