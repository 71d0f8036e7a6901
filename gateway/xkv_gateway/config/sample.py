"""The annotated sample file and the table of effective values, both written from the model."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from xkv_gateway.config.model import Config, show_value
from xkv_gateway.config.tree import SETTINGS, KeyPath, Setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel

    from xkv_gateway.config.load import Loaded

WIDTH: Final = 100
HEAD: Final = """\
xkv-gateway's settings. Each line shows the default; a key without one is commented out.
Every key is also an environment variable (control.port is XKV_CONTROL__PORT) and some are flags;
the file counts least, then the environment, then flags. Sizes: 65536, 64KiB, 16GiB, 5GB."""


def sample_text() -> str:
    """Return a file that names every key, with its default where it has one."""
    lines = [*_comment(HEAD)]
    table: KeyPath = ()
    for setting in SETTINGS.values():
        if setting.path[:-1] != table:
            table = setting.path[:-1]
            lines += ["", f"# {(setting.section.__doc__ or '').strip()}", f"[{'.'.join(table)}]"]
        else:
            lines.append("")
        lines += _comment(setting.field.description or "")
        lines.append(_assignment(setting))
    return "\n".join(lines) + "\n"


def _comment(text: str) -> Iterator[str]:
    for paragraph in text.splitlines():
        yield from textwrap.wrap(paragraph, WIDTH, initial_indent="# ", subsequent_indent="# ")


def _assignment(setting: Setting) -> str:
    default = setting.field.default
    if default is not None:
        return f"{setting.path[-1]} = {show_value(default, size=setting.is_size)}"
    example = (setting.field.examples or [""])[0]
    return f"# {setting.path[-1]} = {show_value(example, size=False)}"


def effective_values(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return key, value as TOML ("" where nothing is set) and source of every setting."""
    return [
        (setting.key, _effective(setting, loaded.config), loaded.source_of(path))
        for path, setting in SETTINGS.items()
    ]


def _effective(setting: Setting, config: Config) -> str:
    section: BaseModel = config
    for name in setting.path[:-1]:
        section = getattr(section, name)
    value = getattr(section, setting.path[-1])
    return "" if value is None else show_value(value, size=setting.is_size)
