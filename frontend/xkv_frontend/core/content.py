"""Messages and their parts: every part has a type that is known here; what a part may hold is written down."""

from __future__ import annotations

from typing import Any, Final

from xkv_frontend.core.context import (
    Context,
    as_list,
    as_object,
    as_text,
    invalid,
    optional_text,
    without_control,
)
from xkv_frontend.core.fields import CHAT_MESSAGE, Kind
from xkv_frontend.core.media import media_part, media_url
from xkv_frontend.core.refusal import Code, Refusal

MESSAGES_MAX: Final = 10_000
PARTS_MAX: Final = 10_000
BLOCK_DEPTH_MAX: Final = 4
"""A result of a tool holds blocks, and those hold no results."""
_NO_MEANING: Final = frozenset({"cache_control", "citations", "annotations", "logprobs", "status"})

TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part that is text -> the member that holds it."""
MEDIA_PARTS: Final = frozenset({"image_url", "audio_url", "video_url", "input_audio"})


def chat_messages(value: Any, context: Context, path: str) -> list[Any]:
    """Return the messages of a chat.

    Raises:
        Refusal: They are not a list of messages whose parts are all known.
    """
    messages = _bounded(as_list(value, path), MESSAGES_MAX, path)
    if not messages:
        raise invalid(path, "must not be empty")
    return [
        _chat_message(as_object(item, f"{path}[{n}]"), context, f"{path}[{n}]")
        for n, item in enumerate(messages)
    ]


def _chat_message(message: dict[str, Any], context: Context, path: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, item in message.items():
        where = f"{path}.{name}"
        match CHAT_MESSAGE.get(name):
            case Kind.TEXT:
                result[name] = optional_text(item, where)
            case Kind.BLOCKS:
                result[name] = item if item is None else content(item, context, where)
            case Kind.TOOLS:
                result[name] = _tool_calls(item, context, where)
            case Kind.DROP:
                continue
            case Kind.REFUSE:
                if item is not None:
                    raise Refusal(Code.REFUSED_FIELD, "this field is not taken here", field=where)
            case _:
                for _ in context.members({name: item}, frozenset(), path):
                    pass
    as_text(result.get("role"), f"{path}.role")
    if result.get("content") is None and not (result["role"] == "assistant" and result.get("tool_calls")):
        raise invalid(f"{path}.content", "must be text or a list of parts")
    return result


def _tool_calls(value: Any, context: Context, path: str) -> list[Any] | None:
    if value is None:
        return None
    result = []
    for n, item in enumerate(_bounded(as_list(value, path), PARTS_MAX, path)):
        where = f"{path}[{n}]"
        call = dict(
            context.members(as_object(item, where), frozenset({"id", "type", "function", "index"}), where)
        )
        function = as_object(call.get("function"), f"{where}.function")
        known = frozenset({"name", "arguments"})
        # Arguments are the text of a JSON document, or the document itself: the model's data either way.
        call["function"] = dict(context.members(function, known, f"{where}.function"))
        as_text(call["function"].get("name"), f"{where}.function.name")
        for name in ("id", "type"):
            if name in call:
                optional_text(call[name], f"{where}.{name}")
        if not isinstance(call.get("index", 0), int):
            raise invalid(f"{where}.index", "must be a number")
        result.append(call)
    return result


def content(value: Any, context: Context, path: str) -> Any:
    """Return the content of a message: text, or parts of known types.

    Raises:
        Refusal: It is something else.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(path, "must be text or a list of parts")
    return [
        _part(as_object(item, f"{path}[{n}]"), context, f"{path}[{n}]")
        for n, item in enumerate(_bounded(value, PARTS_MAX, path))
    ]


def _part(part: dict[str, Any], context: Context, path: str) -> dict[str, Any]:
    kind = part.get("type")
    if isinstance(kind, str):
        if kind in TEXT_PARTS:
            return _text_part(part, kind, context, path)
        if kind in MEDIA_PARTS:
            return media_part(part, kind, context, path)
        if kind == "input_image":
            return _input_image(part, context, path)
    raise invalid(f"{path}.type", "this type of part is not known here")


def _text_part(part: dict[str, Any], kind: str, context: Context, path: str) -> dict[str, Any]:
    holder = TEXT_PARTS[kind]
    result = dict(context.members(part, frozenset({"type", holder}), path, _NO_MEANING))
    as_text(result.get(holder), f"{path}.{holder}")
    return result


def _input_image(part: dict[str, Any], context: Context, path: str) -> dict[str, Any]:
    known = frozenset({"type", "image_url", "detail", "uuid"})
    result = dict(context.members(part, known, path, _NO_MEANING))
    result.pop("uuid", None)
    result["image_url"] = media_url(result.get("image_url"), context, f"{path}.image_url")
    if "detail" in result:
        optional_text(result["detail"], f"{path}.detail")
    return result


def _bounded(items: list[Any], items_max: int, path: str) -> list[Any]:
    if len(items) > items_max:
        raise invalid(path, f"must not have more than {items_max} items")
    return items


ITEMS: Final[dict[str, tuple[str, ...]]] = {
    "message": ("role", "content", "id"),
    "function_call": ("call_id", "name", "arguments", "id"),
    "function_call_output": ("call_id", "output", "id"),
    "reasoning": ("id", "summary", "content"),
}
"""Items of the input of /v1/responses, and their members. `item_reference` and others name what the server keeps."""


def responses_input(value: Any, context: Context, path: str) -> Any:
    """Return the input of /v1/responses: text, or items of known types.

    Raises:
        Refusal: It is something else.
    """
    if isinstance(value, str):
        return value
    items = _bounded(as_list(value, path), MESSAGES_MAX, path)
    return [_item(as_object(item, f"{path}[{n}]"), context, f"{path}[{n}]") for n, item in enumerate(items)]


def _item(item: dict[str, Any], context: Context, path: str) -> dict[str, Any]:
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str) or kind not in ITEMS:
        raise invalid(f"{path}.type", "this type of item is not known here")
    dropped = _NO_MEANING | {"encrypted_content", "phase"}
    result = dict(context.members(item, frozenset({"type", *ITEMS[kind]}), path, dropped))
    for name, member in result.items():
        where = f"{path}.{name}"
        match name:
            case "content" | "output" if kind != "reasoning":
                result[name] = content(member, context, where)
            case "content" | "summary":
                result[name] = without_control(member)
            case _:
                optional_text(member, where)
    return result


BLOCKS: Final[dict[str, tuple[str, ...]]] = {
    "text": ("text",),
    "image": ("source",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "tool_reference": ("tool_name",),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
}
"""Blocks of /v1/messages, and their members."""


def claude_messages(value: Any, context: Context, path: str) -> list[Any]:
    """Return the messages of /v1/messages.

    Raises:
        Refusal: They are not a list of messages whose blocks are all known.
    """
    messages = _bounded(as_list(value, path), MESSAGES_MAX, path)
    if not messages:
        raise invalid(path, "must not be empty")
    result = []
    for n, item in enumerate(messages):
        where = f"{path}[{n}]"
        message = dict(context.members(as_object(item, where), frozenset({"role", "content"}), where))
        as_text(message.get("role"), f"{where}.role")
        message["content"] = claude_blocks(message.get("content"), context, f"{where}.content")
        result.append(message)
    return result


def claude_blocks(value: Any, context: Context, path: str, depth: int = 1) -> Any:
    """Return content of /v1/messages: text, or blocks of known types.

    Raises:
        Refusal: It is something else.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or depth > BLOCK_DEPTH_MAX:
        raise invalid(path, "must be text or a list of blocks")
    return [
        _block(as_object(item, f"{path}[{n}]"), context, f"{path}[{n}]", depth)
        for n, item in enumerate(_bounded(value, PARTS_MAX, path))
    ]


def _block(block: dict[str, Any], context: Context, path: str, depth: int) -> dict[str, Any]:
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in BLOCKS:
        raise invalid(f"{path}.type", "this type of block is not known here")
    result = dict(context.members(block, frozenset({"type", *BLOCKS[kind]}), path, _NO_MEANING))
    for name, member in result.items():
        where = f"{path}.{name}"
        match name:
            case "source":
                result[name] = _source(as_object(member, where), context, where)
            case "content":
                result[name] = claude_blocks(member, context, where, depth + 1)
            case "input":
                as_object(member, where)  # arguments for a tool: the model's data
            case "is_error":
                if not isinstance(member, bool | None):
                    raise invalid(where, "must be true or false")
            case _:
                optional_text(member, where)
    return result


def _source(source: dict[str, Any], context: Context, path: str) -> dict[str, Any]:
    if source.get("type") == "url":
        result = dict(context.members(source, frozenset({"type", "url"}), path))
        result["url"] = media_url(result.get("url"), context, f"{path}.url")
        return result
    if source.get("type") != "base64":
        raise invalid(f"{path}.type", "must be base64 or url")
    result = dict(context.members(source, frozenset({"type", "media_type", "data"}), path))
    return {name: as_text(item, f"{path}.{name}") for name, item in result.items()}
