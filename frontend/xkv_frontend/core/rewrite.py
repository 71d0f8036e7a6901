"""From the body that a client sent to the one that the upstream gets: checked, and salted by us alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from xkv_frontend.core.content import chat_messages, claude_blocks, claude_messages, responses_input
from xkv_frontend.core.context import (
    Context,
    as_list,
    as_object,
    as_text,
    invalid,
    optional_text,
    scalar,
    shown,
    without_control,
)
from xkv_frontend.core.fields import BODIES, HARMLESS, REQUIRED, TEMPLATE_NAMES_REFUSED, Kind
from xkv_frontend.core.names import NameRefusedError, Scope, session_name, user_name
from xkv_frontend.core.policy import Decision, Identity, Narrowing, Policy
from xkv_frontend.core.refusal import Code, Refusal
from xkv_frontend.core.routes import Route, RouteName
from xkv_frontend.core.salt import REQUEST_ENTROPY_BYTES, Salter

TOOLS_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A body for the upstream."""

    body: dict[str, Any]
    decision: Decision
    stream: bool


def rewrite(
    route: Route,
    body: Mapping[str, Any],
    identity: Identity,
    policy: Policy,
    salter: Salter,
    entropy: Callable[[int], bytes],
) -> Rewritten:
    """Return what the upstream gets for `body`.

    Raises:
        Refusal: The body is not allowed.
    """
    asked = _narrowing(body.get("xkv_scope"))
    decision = policy.decide(route, identity, asked, client_store=_client_store(body.get("xkv_store")))
    nonce = entropy(REQUEST_ENTROPY_BYTES) if decision.scope is Scope.REQUEST else b""
    context = Context(
        policy.unknown_fields,
        policy.tenant(identity.tenant).media_hosts,
        lambda uuid: salter.media_uuid(decision.scope, decision.ids, nonce, uuid),
    )
    result = _members(route, body, context)
    if not any(result.get(name) is not None for name in REQUIRED[route.name]):
        names = " or ".join(REQUIRED[route.name])
        raise Refusal(Code.INVALID_FIELD, f"must be there: {names}", field=REQUIRED[route.name][0])
    salt = salter.salt(decision.scope, decision.ids, nonce)
    if salt is not None:
        result["cache_salt"] = salt
    if not decision.store:
        result["kv_transfer_params"] = {"xkv_store": False}
    if route.name is RouteName.RESPONSES:
        result["store"] = False
    return Rewritten(result, decision, stream=result.get("stream") is True)


def _members(route: Route, body: Mapping[str, Any], context: Context) -> dict[str, Any]:
    table = BODIES[route.name]
    result: dict[str, Any] = {}
    for name, value in body.items():
        kind = table.get(name)
        match kind:
            case None:
                for _ in context.members({name: value}, frozenset(), ""):
                    pass
            case Kind.DROP | Kind.NARROW | Kind.STORE:
                continue
            case Kind.REFUSE:
                if value is not None and not any(value is allowed for allowed in HARMLESS.get(name, ())):
                    raise Refusal(Code.REFUSED_FIELD, "this field is not taken here", field=name)
            case Kind.TOOLS if route.name is RouteName.RESPONSES:
                result[name] = _flat_tools(value, context, name)
            case _:
                result[name] = HANDLERS[kind](value, context, name)
    return result


def _narrowing(value: Any) -> Narrowing:
    if value is None:
        return Narrowing()
    members = as_object(value, "xkv_scope")
    unknown = [name for name in members if name not in {"user", "session"}]
    if unknown:
        raise invalid(f"xkv_scope.{unknown[0]}", "xkv_scope takes user and session")
    user, session = (optional_text(members.get(name), f"xkv_scope.{name}") for name in ("user", "session"))
    try:
        return Narrowing(
            None if user is None else user_name(user), None if session is None else session_name(session)
        )
    except NameRefusedError as error:
        raise invalid("xkv_scope", str(error)) from None


def _client_store(value: Any) -> bool:
    if value is None or value is True:
        return True
    if value is False:
        return False
    raise invalid("xkv_store", "must be true or false")


def _flag(value: Any, _: Context, path: str) -> Any:
    if not isinstance(value, bool | None):
        raise invalid(path, "must be true or false")
    return value


def _texts(value: Any, _: Context, path: str) -> Any:
    if isinstance(value, list):
        return [as_text(item, path) for item in value]
    return optional_text(value, path)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any, _: Context, path: str) -> Any:
    if value is not None and not all(map(_is_number, as_list(value, path))):
        raise invalid(path, "must be a list of numbers")
    return value


def _prompt(value: Any, _: Context, path: str) -> Any:
    if isinstance(value, str):
        return value
    for item in as_list(value, path):
        if isinstance(item, list):
            if not all(map(_is_number, item)):
                raise invalid(path, "must be text or token ids")
        elif not isinstance(item, str) and not _is_number(item):
            raise invalid(path, "must be text or token ids")
    return value


def _options(value: Any, _: Context, path: str) -> Any:
    if value is None:
        return None
    for name, item in as_object(value, path).items():
        if name in TEMPLATE_NAMES_REFUSED:
            raise Refusal(Code.REFUSED_FIELD, "this option is not taken here", field=shown(f"{path}.{name}"))
        scalar(item, f"{path}.{name}")
    return without_control(value)


def _tools(value: Any, context: Context, path: str) -> Any:
    """Functions only: other tools would make the server call out for the client."""
    if value is None:
        return None
    result = []
    for n, item in enumerate(_some_tools(value, path)):
        where = f"{path}[{n}]"
        tool = dict(
            context.members(as_object(item, where), frozenset({"type", "function", "defer_loading"}), where)
        )
        if tool.get("type") != "function":
            raise Refusal(
                Code.REFUSED_FIELD, "only tools of the type function are taken", field=f"{where}.type"
            )
        function = as_object(tool.get("function"), f"{where}.function")
        known = frozenset({"name", "description", "parameters", "strict"})
        tool["function"] = dict(context.members(function, known, f"{where}.function"))
        result.append(tool)
    return result


def _flat_tools(value: Any, context: Context, path: str) -> Any:
    if value is None:
        return None
    result = []
    for n, item in enumerate(_some_tools(value, path)):
        where = f"{path}[{n}]"
        known = frozenset({"type", "name", "description", "parameters", "strict"})
        tool = dict(context.members(as_object(item, where), known, where))
        if tool.get("type") != "function":
            raise Refusal(
                Code.REFUSED_FIELD, "only tools of the type function are taken", field=f"{where}.type"
            )
        result.append(tool)
    return result


def _claude_tools(value: Any, context: Context, path: str) -> Any:
    if value is None:
        return None
    result = []
    for n, item in enumerate(_some_tools(value, path)):
        where = f"{path}[{n}]"
        tool = as_object(item, where)
        if tool.get("type", "custom") != "custom":
            raise Refusal(
                Code.REFUSED_FIELD, "only tools of the caller's own are taken", field=f"{where}.type"
            )
        known = frozenset({"name", "description", "input_schema", "strict", "defer_loading"})
        result.append(dict(context.members(tool, known, where, frozenset({"type", "cache_control"}))))
    return result


def _some_tools(value: Any, path: str) -> list[Any]:
    tools = as_list(value, path)
    if len(tools) > TOOLS_MAX:
        raise invalid(path, f"must not have more than {TOOLS_MAX} items")
    return tools


def _system(value: Any, context: Context, path: str) -> Any:
    return None if value is None else claude_blocks(value, context, path)


Handler = Callable[[Any, Context, str], Any]

HANDLERS: Final[Mapping[Kind, Handler]] = {
    Kind.SCALAR: lambda value, _, path: scalar(value, path),
    Kind.FLAG: _flag,
    Kind.TEXT: lambda value, _, path: optional_text(value, path),
    Kind.TEXTS: _texts,
    Kind.NUMBERS: _numbers,
    Kind.DATA: lambda value, _, __: without_control(value),
    Kind.SCHEMA: lambda value, _, __: value,
    Kind.OPTIONS: _options,
    Kind.PROMPT: _prompt,
    Kind.MESSAGES: chat_messages,
    Kind.SYSTEM: _system,
    Kind.RESPONSES_INPUT: responses_input,
    Kind.BLOCKS: claude_messages,
    Kind.TOOLS: _tools,
    Kind.CLAUDE_TOOLS: _claude_tools,
}
"""How each kind of member is checked; kinds that never reach the upstream have no row."""
