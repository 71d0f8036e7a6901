"""Reads the settings: file, environment, flags, in rising order; each value keeps the name of its source."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from xkv_gateway.config.fields import KEY_TEXT
from xkv_gateway.config.model import Config
from xkv_gateway.config.reasons import reason_of
from xkv_gateway.config.tree import ENV_PREFIX, SETTINGS, TABLES, VARIABLES, KeyPath, Setting
from xkv_gateway.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE_BYTES_MAX: Final = 1 << 20
CONFIG_FILE_VARIABLE: Final = "XKV_CONFIG"
OTHER_VARIABLES: Final = frozenset(
    {
        CONFIG_FILE_VARIABLE,
        *("XKV_SPDK_TGT", "XKV_SPDK_PERF", "XKV_SOAK_MINUTES"),
        *("XKV_FUZZ_ROUNDS", "XKV_VLLM_VENV", "XKV_DEMO_REQUESTS"),
    }
)
"""Variables with our prefix that are not settings: the file's path, and tools of the tests and benchmarks."""
FRONT_END_PREFIX: Final = "XKV_FRONTEND_"
"""What the front end's program and its middleware read may be set in the same shell."""

DEFAULT_SOURCE: Final = "default"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings and, for each key that somebody set, who did."""

    config: Config
    sources: dict[KeyPath, str]

    def source_of(self, path: KeyPath) -> str:
        """Return where the value of the key came from."""
        return self.sources.get(path, DEFAULT_SOURCE)


def load_config(
    *, file: Path | None, environment: Mapping[str, str], flags: Mapping[KeyPath, tuple[str, object]]
) -> Loaded:
    """Return the settings.

    Args:
        file: the TOML file, or None: then the one that XKV_CONFIG names, if it does.
        environment: the process's environment.
        flags: for each key that a flag sets, the flag's name and its value.

    Raises:
        ConfigError: an unreadable file, an unknown key or variable, or a bad value; named, with its source.
    """
    values: dict[KeyPath, object] = {}
    sources: dict[KeyPath, str] = {}
    named = environment.get(CONFIG_FILE_VARIABLE)
    path = file or (Path(named) if named else None)
    if path is not None:
        for key, value in _walk(_read_toml(path), (), f"file {path}"):
            values[key] = _checked(SETTINGS[key], value, f"file {path}", strict=True)
            sources[key] = f"file {path}"
    for variable, text in sorted(environment.items()):
        ours = variable.startswith(ENV_PREFIX) and not variable.startswith(FRONT_END_PREFIX)
        if ours and variable not in OTHER_VARIABLES:
            setting = _variable(variable)
            source = f"environment variable {variable}"
            values[setting.path] = _checked(setting, text, source, strict=False)
            sources[setting.path] = source
    for key, (flag, value) in flags.items():
        values[key] = _checked(SETTINGS[key], value, f"flag {flag}", strict=False)
        sources[key] = f"flag {flag}"
    return Loaded(config=_whole(values, sources), sources=sources)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}: {error.strerror}",
            advice="Check the path, or write a file with: xkv-gateway config sample",
        ) from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"the configuration file {path} is larger than {FILE_BYTES_MAX} bytes")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not UTF-8 (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}") from None


def _walk(table: Mapping[str, Any], path: KeyPath, source: str) -> Iterator[tuple[KeyPath, object]]:
    """Yield every leaf of the file; a key that is not a setting, or a table where a value belongs, ends it."""
    for name, value in table.items():
        key = (*path, name)
        if key in SETTINGS:
            yield key, value
        elif key not in TABLES:
            raise ConfigError(f"unknown key {'.'.join(key)} in {source}{_hint('.'.join(key))}")
        elif isinstance(value, dict):
            yield from _walk(value, key, source)
        else:
            raise ConfigError(f"{name} in {source}: is a table; write [{'.'.join(key)}] and its keys below")


def _hint(key: str) -> str:
    close = difflib.get_close_matches(key, [".".join(path) for path in SETTINGS], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _variable(variable: str) -> Setting:
    setting = VARIABLES.get(variable)
    if setting is None:
        close = difflib.get_close_matches(variable, VARIABLES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"unknown environment variable {variable}{hint}")
    return setting


def _checked(setting: Setting, value: object, source: str, *, strict: bool) -> object:
    try:
        return setting.check(value, strict=strict)
    except ValidationError as error:
        reason = reason_of(error.errors(include_url=False)[0])
        raise ConfigError(f"{setting.key} = {_shown(value)} ({source}): {reason}") from None


def _shown(value: object) -> str:
    text = repr(value)
    if KEY_TEXT.search(text):
        return "(a key)"
    return text if len(text) <= 80 else text[:77] + "..."


def _whole(values: Mapping[KeyPath, object], sources: Mapping[KeyPath, str]) -> Config:
    """Build the settings; what is left to fail are the rules that join two keys."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        table = tree
        for name in key[:-1]:
            table = table.setdefault(name, {})
        table[key[-1]] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        section = tuple(str(part) for part in details["loc"])
        origins = sorted({sources[key] for key in values if key[: len(section)] == section})
        raise ConfigError(f"{reason_of(details)} ({', '.join(origins)})") from None
