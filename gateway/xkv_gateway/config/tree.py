"""Walks over the settings: the one place that knows how the model is nested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

from pydantic import BaseModel, TypeAdapter

from xkv_gateway.config.fields import SIZE
from xkv_gateway.config.model import Config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

KeyPath = tuple[str, ...]
ENV_PREFIX: Final = "XKV_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: where it stands, and what it may be."""

    path: KeyPath
    field: FieldInfo
    section: type[BaseModel]

    @property
    def key(self) -> str:
        """Dotted name, as error messages and `config show` write it."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return ENV_PREFIX + "__".join(self.path).upper()

    @property
    def is_size(self) -> bool:
        """Whether the value is a number of bytes that may carry a unit."""
        annotations = (self.field.annotation, *get_args(self.field.annotation), *self.field.metadata)
        return any(SIZE in (a, *getattr(a, "__metadata__", ())) for a in annotations)

    def check(self, value: object, *, strict: bool) -> object:
        """Return the value as its type. Raises pydantic's ValidationError."""
        annotated: Any = Annotated[(self.field.annotation, self.field)]
        return TypeAdapter(annotated).validate_python(value, strict=strict)


def settings(section: type[BaseModel] = Config, path: KeyPath = ()) -> Iterator[Setting]:
    """Yield every setting below `section`, in the order of the model, plain keys before tables."""
    tables: list[tuple[str, type[BaseModel]]] = []
    for name, field in section.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            tables.append((name, nested))
        else:
            yield Setting((*path, name), field, section)
    for name, nested in tables:
        yield from settings(nested, (*path, name))


SETTINGS: Final = {setting.path: setting for setting in settings()}
TABLES: Final = {path[:depth] for path in SETTINGS for depth in range(len(path))}
VARIABLES: Final = {setting.variable: setting for setting in SETTINGS.values()}
