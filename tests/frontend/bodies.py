"""Bodies through the pure core, without a front end around it."""

from __future__ import annotations

from typing import Any

from tests.frontend.harness import (
    ACME,
    BETA,
    SALTER,
)
from xkv_frontend.core.policy import Identity, Policy, UnknownFields
from xkv_frontend.core.rewrite import rewrite
from xkv_frontend.core.routes import ROUTES, RouteName

DROPPING = Policy(unknown_fields=UnknownFields.DROP)
PNG = "data:image/png;base64,AAAA"


def rewritten(
    body: dict[str, Any],
    tenant: str = "acme",
    route: RouteName = RouteName.CHAT,
    policy: Policy | None = None,
) -> Any:
    row = next(row for row in ROUTES if row.name is route)
    identity = Identity(ACME if tenant == "acme" else BETA)
    return rewrite(row, body, identity, policy or Policy(), SALTER, bytes).body
