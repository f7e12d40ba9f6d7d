"""Read what another process sent as JSON into a dataclass, and refuse any other shape."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def read(kind: type[T], value: object) -> T:
    """Return `value`, an object as `json` parses it, as an instance of the dataclass `kind`.

    Fields may be bool, int, float, str, sequences and mappings of these, dataclasses, and each of
    them or None. A field with a default may be missing. An int passes for a float.

    Raises:
        ValueError: a field is missing, unknown or of another type; the message names it.
    """
    return typing.cast(T, _read(kind, value, kind.__name__))


def _read(kind: Any, value: object, name: str) -> object:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, name)
    if origin in (typing.Union, types.UnionType):  # X | None
        wanted = next(one for one in inner if one is not types.NoneType)
        return None if value is None else _read(wanted, value, name)
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        items = [_read(inner[0], item, f"{name}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _read(inner[1], item, f"{name}[{key!r}]") for key, item in value.items()}
    if kind is float and type(value) in (int, float):
        return _finite(value, name)
    if type(value) is kind:  # a bool is no int here
        return value
    raise ValueError(f"{name}: {value!r:.100} is not {getattr(kind, '__name__', kind)}")


def _finite(value: Any, name: str) -> float:
    try:
        if math.isfinite(number := float(value)):
            return number
    except OverflowError:
        pass
    raise ValueError(f"{name}: {value!r:.100} is not a finite number")


def _read_dataclass(kind: Any, value: object, name: str) -> object:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {value!r:.100} is not an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := value.keys() - fields.keys():
        raise ValueError(f"{name}: unknown field {min(unknown)!r:.100}")
    for field in fields.values():
        is_optional = not (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if field.name not in value and not is_optional:
            raise ValueError(f"{name}.{field.name} is missing")
    read_fields = {key: _read(hints[key], item, f"{name}.{key}") for key, item in value.items()}
    return kind(**read_fields)
