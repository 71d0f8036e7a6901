"""Settings of both shapes, and how the parts of a front end are made of them."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xkv_frontend.accesslog import AccessLog
from xkv_frontend.auth import (
    Authenticator,
    HookAuthenticator,
    KeysFileAuthenticator,
    TrustedHeaderAuthenticator,
    load_hook,
)
from xkv_frontend.clock import entropy, monotonic_ns, wall_ns
from xkv_frontend.core.names import NameRefusedError, Scope
from xkv_frontend.core.routes import VERSION_MIN, Version, parse_version
from xkv_frontend.core.salt import Salter
from xkv_frontend.errors import ConfigError
from xkv_frontend.files import load_secret
from xkv_frontend.front import Parts
from xkv_frontend.metrics import Metrics
from xkv_frontend.policyfile import load_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

PREFIX: Final = "XKV_FRONTEND_"
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """What decides who callers are and what they may."""

    deployment: str
    secret_file: Path | None = None
    keys_file: Path | None = None
    auth_hook: str | None = None
    trusted_header: str | None = None
    trusted_user_header: str | None = None
    trusted_peers: tuple[str, ...] = ()
    policy_file: Path | None = None
    vllm_version: Version | None = None
    access_log: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> FrontSettings:
        """Return the settings in variables that are named like the options of `serve`.

        Raises:
            ConfigError: The deployment is missing, or a value is wrong.
        """
        found = {
            name.removeprefix(PREFIX).lower(): value
            for name, value in environment.items()
            if name.startswith(PREFIX)
        }
        known = {"deployment", "secret_file", "keys_file", "auth_hook", "trusted_header", "trusted_user_header",
                 "trusted_peers", "policy_file", "vllm_version"}  # fmt: skip
        if unknown := sorted(found.keys() - known):
            raise ConfigError(f"{PREFIX}{unknown[0].upper()} is not known here")
        if not found.get("deployment"):
            raise ConfigError(f"{PREFIX}DEPLOYMENT must name the deployment")
        files = {
            name: Path(found[name]) for name in ("secret_file", "keys_file", "policy_file") if found.get(name)
        }
        return cls(
            deployment=found["deployment"],
            secret_file=files.get("secret_file"),
            keys_file=files.get("keys_file"),
            policy_file=files.get("policy_file"),
            auth_hook=found.get("auth_hook"),
            trusted_header=found.get("trusted_header"),
            trusted_user_header=found.get("trusted_user_header"),
            trusted_peers=tuple(found.get("trusted_peers", "").split()),
            vllm_version=stated_version(found.get("vllm_version")),
        )


def stated_version(text: str | None) -> Version | None:
    """Return the version of vLLM that the operator states.

    Raises:
        ConfigError: Not a version, or one that does not honour salts.
    """
    if text is None:
        return None
    version = parse_version(text)
    if version is None:
        raise ConfigError(f"{text!r} is not a version of vLLM")
    if version < VERSION_MIN:
        raise ConfigError(
            f"vLLM {text} is too old: salts are honoured from {VERSION_MIN[0]}.{VERSION_MIN[1]} on"
        )
    return version


def build_authenticator(settings: FrontSettings) -> Authenticator:
    """Return the one way of authentication that the settings name.

    Raises:
        ConfigError: None or several are named, or what is named cannot be used.
    """
    named = [settings.keys_file, settings.auth_hook, settings.trusted_header]
    if sum(way is not None for way in named) != 1:
        raise ConfigError(
            "exactly one way of authentication is needed",
            advice="--keys-file, --auth-hook or --trusted-header.",
        )
    if settings.keys_file is not None:
        return KeysFileAuthenticator(settings.keys_file, monotonic_ns)
    if settings.auth_hook is not None:
        return HookAuthenticator(load_hook(settings.auth_hook))
    assert settings.trusted_header is not None
    if not settings.trusted_peers:
        raise ConfigError("--trusted-header needs the addresses of those who may set it: --trusted-peer")
    for header in (settings.trusted_header, settings.trusted_user_header):
        if header is not None and not _HEADER_NAME.fullmatch(header):
            raise ConfigError("--trusted-header and --trusted-user-header are names of headers")
    return TrustedHeaderAuthenticator(
        settings.trusted_header, frozenset(settings.trusted_peers), settings.trusted_user_header
    )


def build_salter(settings: FrontSettings, environment: Mapping[str, str]) -> Salter:
    """Return the salter.

    Raises:
        ConfigError: No usable secret, or the deployment's name is not allowed.
    """
    secret = load_secret(settings.secret_file, dict(environment))
    if secret.published:
        log.warning("the secret is the one of the documented test vector: anybody can compute all salts")
    try:
        return Salter(secret, settings.deployment)
    except NameRefusedError as error:
        raise ConfigError(f"--deployment: {error}") from None


def build_parts(settings: FrontSettings, environment: Mapping[str, str]) -> Parts:
    """Return the parts of a front end.

    Raises:
        ConfigError: A setting or a file is wrong.
    """
    policy = load_policy(settings.policy_file)
    shared = sorted(name for name, rules in policy.tenants.items() if rules.scope is Scope.NONE)
    if policy.default.scope is Scope.NONE or shared:
        who = (
            "every tenant without a rule of its own"
            if policy.default.scope is Scope.NONE
            else ", ".join(shared[:10])
        )
        log.warning("scope none: %s: their requests share one cache with all others of scope none", who)
    return Parts(
        policy=policy,
        salter=build_salter(settings, environment),
        authenticator=build_authenticator(settings),
        metrics=Metrics(),
        access_log=AccessLog(_write_line if settings.access_log else None, wall_ns),
        clock=monotonic_ns,
        entropy=entropy,
    )


def _write_line(line: str) -> None:
    sys.stderr.write(line + "\n")
