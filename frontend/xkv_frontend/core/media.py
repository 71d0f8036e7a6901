"""Media in messages: where they may come from, and under which name they are cached.

A client's `uuid` would be a key of the server's media cache for everybody: who names another's picture gets it, who names
first decides what others see. So it is replaced by one that only exists inside the scope.
"""

from __future__ import annotations

import re
from typing import Any, Final

from xkv_frontend.core.context import Context, as_object, as_text, invalid, optional_text
from xkv_frontend.core.refusal import Code, Refusal

URL_MEDIA: Final = frozenset({"image_url", "audio_url", "video_url"})
UUID_CHARACTERS_MAX: Final = 512
_DATA_URL: Final = re.compile(r"data:[A-Za-z0-9!#$&^_.+/;=-]{0,128},")
_HTTPS_URL: Final = re.compile(
    r"https://([A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)(?:/[\x21-\x5b\x5d-\x7e]*)?"
)


def media_url(value: Any, context: Context, path: str) -> str:
    """Return a URL that the server may load: `data:`, or https from an allowed host without a port or user.

    Raises:
        Refusal: `media_refused`, or it is not a string.
    """
    url = as_text(value, path)
    if _DATA_URL.match(url):
        return url
    found = _HTTPS_URL.fullmatch(url)
    if found and found[1].lower() in context.media_hosts:
        return url
    raise Refusal(
        Code.MEDIA_REFUSED, "media must be a data: URL, or come over https from an allowed host", field=path
    )


def _located(value: Any, context: Context, path: str) -> Any:
    """`{"url", "detail"}`, or the URL alone."""
    if isinstance(value, str):
        return media_url(value, context, path)
    found = dict(context.members(as_object(value, path), frozenset({"url", "detail"}), path))
    if "url" not in found:
        raise invalid(path, "must have a url")
    found["url"] = media_url(found["url"], context, f"{path}.url")
    if "detail" in found:
        found["detail"] = optional_text(found["detail"], f"{path}.detail")
    return found


def _sound(value: Any, context: Context, path: str) -> Any:
    found = dict(context.members(as_object(value, path), frozenset({"data", "format"}), path))
    return {name: as_text(item, f"{path}.{name}") for name, item in found.items()}


def media_part(part: dict[str, Any], kind: str, context: Context, path: str) -> dict[str, Any]:
    """Return a part of a message with media, its uuid made the scope's own.

    A part with a uuid alone (its media were sent before) is allowed: it can only find what the same scope has sent.

    Raises:
        Refusal: A member is not allowed, or there is neither media nor a uuid.
    """
    result: dict[str, Any] = {"type": kind}
    load = _located if kind in URL_MEDIA else _sound
    for name, item in context.members(
        part, frozenset({"type", kind, "uuid"}), path, frozenset({"cache_control"})
    ):
        if name == kind and item is not None:
            result[name] = load(item, context, f"{path}.{name}")
    uuid = part.get("uuid")
    if uuid is not None:
        if not isinstance(uuid, str) or not 0 < len(uuid) <= UUID_CHARACTERS_MAX:
            raise invalid(f"{path}.uuid", f"must be a string of 1 to {UUID_CHARACTERS_MAX} characters")
        result["uuid"] = context.media_uuid(uuid)
    if kind not in result:
        if uuid is None:
            raise invalid(path, f"must have {kind}")
        result[kind] = None
    return result
