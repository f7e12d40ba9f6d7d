"""Sections of settings: dataclasses whose annotations tell which values a config may hold.

    @dataclass(frozen=True, kw_only=True)
    class Train(Section):
        max_steps: Annotated[int, within(gt=0)] | None = None

A setting is a section, or an int, float, bool, str, Literal, list[str], Tree or Any, possibly None.
Annotated adds checks: functions that return the value to use, or raise a ValueError.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from training.config_file import SettingsError, Tree

TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
BOUNDS = {
    "gt": "greater than",
    "ge": "greater than or equal to",
    "lt": "less than",
    "le": "less than or equal to",
}


class InvalidSetting(SettingsError):
    """One setting is invalid; `key` is its full key, such as train.max_steps."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of settings, which are immutable. Its module must not postpone annotations."""

    given: ClassVar[frozenset[str]] = frozenset()  # the settings that the config contains

    def as_tree(self) -> Tree:
        """Return all settings as a file can hold them: dicts, lists, text and numbers."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


S = TypeVar("S", bound=Section)


def _plain(value: Any) -> Any:
    """Return a value as a file can hold it: types that it cannot hold become lists or text."""
    if isinstance(value, Section):
        return value.as_tree()
    if isinstance(value, dict):
        # dict's own method: a task's section would record that all its keys are read.
        return {str(name): _plain(inner) for name, inner in dict.items(value)}
    if isinstance(value, list | tuple | set):
        return [_plain(inner) for inner in value]
    is_plain = isinstance(value, bool | int | float | str | None)
    return value if is_plain else str(value)  # such as a date


# --- reading ------------------------------------------------------------------------------------


def read(kind: type[S], tree: object, prefix: str = "", known: Sequence[str] = ()) -> S:
    """Return the section that a tree describes; raises InvalidSetting.

    `prefix` begins the section's keys, such as "train."; `known` holds the keys to suggest for an
    unknown one, by default the section's own. `given` of the result has the keys in the tree.
    """
    known = known or [key for key, _ in keys_of(kind, prefix)]
    if not isinstance(tree, dict):
        raise InvalidSetting(prefix[:-1], f"should be a section of settings, not {_shown(tree)}")

    types = {field.name: field.type for field in fields(kind)}
    values = {
        name: _check_value(annotation, tree[name], f"{prefix}{name}", known)
        for name, annotation in types.items()
        if name in tree
    }

    for name in tree:
        if name not in types:
            raise InvalidSetting(f"{prefix}{name}", _describe_unknown(name, types, prefix, known))
    for field in fields(kind):
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if is_needed and field.name not in tree:
            raise InvalidSetting(f"{prefix}{field.name}", "is missing")

    try:
        section = kind(**values)
    except ValueError as error:  # settings that contradict each other
        raise InvalidSetting(prefix[:-1], str(error)) from None
    object.__setattr__(section, "given", frozenset(values))  # sections are frozen
    return section


def _check_value(kind: Any, value: Any, key: str, known: Sequence[str]) -> Any:
    """Return the value of a setting, as its annotation's checks give it; raises InvalidSetting."""
    if get_origin(kind) in (Union, UnionType):  # with None, which comes last
        if value is None:
            return None
        kind = get_args(kind)[0]
    if _is_section(kind):
        return read(kind, value, f"{key}.", known)

    kind, *checks = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if get_origin(kind) is list and isinstance(value, str):
        value = [value]  # a lone name
    try:
        _check_type(kind, value)
        for check in checks:
            value = check(value)
    except ValueError as error:
        raise InvalidSetting(key, str(error)) from None
    return float(value) if kind is float else value


def _check_type(kind: Any, value: Any) -> None:
    """Raise ValueError if a value is not of the annotated type."""
    form = get_origin(kind)
    if form is Literal:
        is_right = value in get_args(kind)
        expected = " or ".join(map(repr, get_args(kind)))
    elif form in (list, dict):
        is_right = isinstance(value, form) and all(isinstance(one, str) for one in value)
        expected = "a list of names" if form is list else "a section whose keys are text"
    elif kind is Any:
        return
    else:
        accepted = (float, int) if kind is float else (kind,)
        is_right = type(value) in accepted  # to isinstance(), true is an integer
        expected = f"a valid {TYPES[kind]}"
    if not is_right:
        _refuse(expected, value)


def within(**bounds: float) -> Callable[[float], float]:
    """Return a check of a number's bounds: gt, ge, lt and le, as in the module operator.

    A float needs two of them, which also keep out inf and nan.
    """

    def check(value: float) -> float:
        for name, bound in bounds.items():
            if not getattr(operator, name)(value, bound):
                _refuse(f"{BOUNDS[name]} {bound}", value)
        return value

    return check


def _refuse(expected: str, value: object) -> NoReturn:
    """Raise the ValueError for a value that is not what was expected."""
    raise ValueError(f"should be {expected}, not {_shown(value)}")


def _shown(value: object) -> str:
    """Return a value as messages show it."""
    return "empty" if value is None else repr(value)


def _is_section(kind: Any) -> bool:
    """Return whether an annotation is a Section."""
    return isinstance(kind, type) and issubclass(kind, Section)


# --- unknown keys -------------------------------------------------------------------------------


def keys_of(kind: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full key of each setting, and its annotation."""
    for field in fields(kind):
        if _is_section(field.type):
            yield from keys_of(cast(type[Section], field.type), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field.type


def _describe_unknown(name: Any, names: Iterable[str], prefix: str, known: Sequence[str]) -> str:
    """Return the message for an unknown key; `names` are those of its section."""
    if not isinstance(name, str):
        return f"Keys should be strings, not {name!r}"
    near = nearest(name, [f"{prefix}{one}" for one in names], known)
    return f"unknown key; {f'did you mean {near}?' if near else 'known keys: ' + ', '.join(names)}"


def nearest(name: str, own: Sequence[str], known: Sequence[str]) -> str:
    """Return the full key that the user may have meant by a name; "" if there is none.

    That is, in this order: a key that the name abbreviates, one whose last part it resembles, one
    with whose last part it ends. `own` are the keys of the section in which the name stands; they
    come before `known`, those of all sections, and shorter keys before longer ones.
    """
    keys = sorted(own, key=len) + sorted(known, key=len)
    last = {key.rpartition(".")[2]: key for key in reversed(keys)}
    letters = re.sub("[._-]", "", name.lower())
    found = [key for key in keys if is_short_for(letters, re.split("[._]", key))]
    found += (last[one] for one in difflib.get_close_matches(name, last, 1))
    found += (last[one] for one in last if name.endswith(one))
    return found[0] if found else ""


def is_short_for(letters: str, words: Sequence[str]) -> bool:
    """Return whether letters consist of beginnings of the words, in order: lr for learning rate.

    Words may be skipped.
    """
    if not letters or not words:
        return not letters
    sizes = range(len(words[0]) + 1)
    starts = (size for size in sizes if letters.startswith(words[0][:size]))
    return any(is_short_for(letters[size:], words[1:]) for size in starts)
