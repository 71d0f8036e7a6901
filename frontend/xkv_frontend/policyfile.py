"""The policy file: TOML, checked to the last key, turned into the policy."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xkv_frontend.core.names import NameRefusedError, Scope, TenantName, tenant_name
from xkv_frontend.core.policy import (
    BODY_BYTES_MAX_DEFAULT,
    Policy,
    RoutePolicy,
    TenantPolicy,
    UnknownFields,
)
from xkv_frontend.core.routes import RouteName
from xkv_frontend.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

POLICY_BYTES_MAX: Final = 16 << 20
_HOST: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Tenant(_Strict):
    scope: Scope | None = Field(default=None, strict=False)
    store: bool | None = None
    client_store: bool | None = None
    client_narrowing: bool | None = None
    media_hosts: list[str] | None = None
    requests_per_s: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    burst: int | None = Field(default=None, ge=1, le=1_000_000)
    concurrency: int | None = Field(default=None, ge=1, le=100_000)

    def policy(self, base: TenantPolicy) -> TenantPolicy:
        """Return these rules; what is not said is as in `base`."""
        said = {name: value for name, value in self if value is not None}
        if "media_hosts" in said:
            hosts = frozenset(host.lower() for host in said["media_hosts"])
            if not all(map(_HOST.fullmatch, hosts)):
                raise ConfigError("policy file: media_hosts are host names, without scheme, port or path")
            said["media_hosts"] = hosts
        merged = {name: getattr(base, name) for name in TenantPolicy.__slots__} | said
        return TenantPolicy(**merged)


class _Route(_Strict):
    scope: Scope | None = Field(default=None, strict=False)
    store: bool = True
    enabled: bool = True


class _File(_Strict):
    unknown_fields: UnknownFields = Field(default=UnknownFields.REJECT, strict=False)
    body_bytes_max: int = Field(default=BODY_BYTES_MAX_DEFAULT, ge=1024, le=1 << 30)
    default: _Tenant = _Tenant()
    tenants: dict[str, _Tenant] = {}
    routes: dict[str, _Route] = {}


def parse_policy(text: str) -> Policy:
    """Return the policy that a file spells.

    Raises:
        ConfigError: It is not TOML, or a key or value is not known; the message names the key.
    """
    try:
        file = _File.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"policy file: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"policy file: {where}: {first['msg']}") from None
    default = file.default.policy(TenantPolicy())
    tenants: dict[TenantName, TenantPolicy] = {}
    routes: dict[RouteName, RoutePolicy] = {}
    for name, tenant in file.tenants.items():
        try:
            tenants[tenant_name(name)] = tenant.policy(default)
        except NameRefusedError as error:
            raise ConfigError(f"policy file: tenants.{name}: {error}") from None
    for name, route in file.routes.items():
        if name not in set(RouteName):
            raise ConfigError(f"policy file: routes.{name}: there are {', '.join(RouteName)}")
        routes[RouteName(name)] = RoutePolicy(route.scope, route.store, route.enabled)
    return Policy(default, tenants, routes, file.unknown_fields, file.body_bytes_max)


def load_policy(path: Path | None) -> Policy:
    """Return the policy of a file, or the default one.

    Raises:
        ConfigError: The file cannot be read or is wrong.
    """
    if path is None:
        return Policy()
    try:
        with path.open("rb") as file:
            raw = file.read(POLICY_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"the policy file {path}: {error.strerror}") from None
    if len(raw) > POLICY_BYTES_MAX:
        raise ConfigError(f"the policy file {path}: larger than {POLICY_BYTES_MAX} bytes")
    try:
        return parse_policy(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"the policy file {path}: not UTF-8") from None
