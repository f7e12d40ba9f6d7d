"""A user's own task: the config keys that it reads, and the methods and data it must have."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
from collections.abc import Iterator
from typing import Any, NoReturn

from training.config_file import SettingsError, Tree

_log = logging.getLogger(__name__)


class Asked(Tree):
    """A section whose keys are the task's own; it records which keys are read."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(
            (key, Asked(value) if isinstance(value, dict) else value) for key, value in tree.items()
        )
        self.asked = set[str]()


def _recording(name: str, *, is_for_one_key: bool) -> Any:
    """Return dict's method of this name; it records its first argument, or all keys, as read."""

    def method(self: Asked, *arguments: Any) -> Any:
        self.asked.update(map(str, arguments[:1]) if is_for_one_key else dict.keys(self))
        return getattr(dict, name)(self, *arguments)

    return method


for _name in "__contains__", "__getitem__", "get":
    setattr(Asked, _name, _recording(_name, is_for_one_key=True))
for _name in "__iter__", "__or__", "copy", "items", "keys", "values":  # `**` uses the first
    setattr(Asked, _name, _recording(_name, is_for_one_key=False))


def refuse_misspelt(model: Any, task: str) -> None:
    """Raise SettingsError for a key of `model:` that the task has read under a similar name.

    Does nothing for the built-in task, whose keys were checked when the config was read.
    """
    for key, near in _unread(model, "model."):
        if near:
            raise SettingsError(f"{key} is not used by {task}; did you mean {near}?")


def warn_unread(model: Any, task: str) -> None:
    """Warn about `model:` keys that the task has not read; call it after everything is created.

    Does nothing for the built-in task.
    """
    for key, _ in _unread(model, "model."):
        _log.warning(f"warning: {key} is not used by {task}; correct or omit it")


def _unread(section: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield each key that was never read, with a similar key that was read but is missing.

    Yields nothing for a section that does not record what is read.
    """
    if not isinstance(section, Asked):
        return
    for key in dict.keys(section):
        if key in section.asked:
            yield from _unread(dict.__getitem__(section, key), f"{prefix}{key}.")
        else:
            near = difflib.get_close_matches(key, section.asked - {*dict.keys(section)}, 1)
            yield f"{prefix}{key}", f"{prefix}{near[0]}" if near else ""


# --- the task's methods -------------------------------------------------------------------------


def make_task(kind: Any, base: Any, name: str, settings: Any) -> Any:
    """Create a task and check that it has what `base` has; raises SettingsError otherwise.

    `kind` is the task's class, `name` its name in the config, and `base` is training.tasks.Task.
    """
    if not callable(kind):
        _refuse(None, f"{name} is not a class; set task to a Task subclass")
    # As in Task: Python 3.10 replaces the __init__ of a Protocol.
    _check_call(kind, lambda self, settings: None, kind.__init__, f"{name}.__init__")
    task = kind(settings)

    for method, plain in vars(base).items():
        if not method.startswith("_") and inspect.isfunction(plain):
            _check_method(task, base, method, name)
    needed = ["validation"]
    if task.loader == base.loader.__get__(task):  # the default, which reads self.train
        needed.append("train")
    for data in needed:
        if not hasattr(task, data):
            _refuse(kind.__init__, f"{name} has no {data}; set self.{data} in __init__")
    return task


def _check_method(task: Any, base: Any, method: str, name: str) -> None:
    """Raise SettingsError if a task lacks a method of `base`, or its method takes other arguments.

    A task must override `model` and `loss`, for which `base` has no default.
    """
    if not hasattr(task, method):
        _refuse(None, f"{name} has no {method}; make it a subclass of training.tasks.Task")
    given = getattr(task, method)
    plain = getattr(base, method)
    if method in ("model", "loss") and given == plain.__get__(task):  # inherited
        own = {one: getattr(task, one) for one in dir(task) if not hasattr(base, one)}
        place = task.__init__
        cure = "write one"
        for near in difflib.get_close_matches(method, own, 1):
            place = own[near]
            cure = f"did you mean {near}?"
        _refuse(place, f"{name} has no method {method}; {cure}")
    _check_call(given, plain, given, f"{name}.{method}")


def _check_call(called: Any, plain: Any, place: Any, name: str) -> None:
    """Raise SettingsError if `called`, defined at `place`, does not accept `plain`'s arguments."""
    _, *takes = inspect.signature(plain).parameters.values()
    by_name = [one.name for one in takes if one.kind == one.KEYWORD_ONLY]
    in_order = [one.name for one in takes if one.name not in by_name]
    try:
        inspect.signature(called).bind(*in_order, **dict.fromkeys(by_name))
    except TypeError as error:
        names = ["self", *in_order]
        if by_name:
            names += ["*", *by_name]
        _refuse(place, f"{name}: {error}; it should accept ({', '.join(names)})")


def _refuse(place: Any, cause: str) -> NoReturn:
    """Raise SettingsError; it begins with the file and line of `place`, a function or None."""
    raise SettingsError(f"task: {where(place)}{cause}")


def where(function: Any) -> str:
    """Return a function's file and line, for the beginning of a message."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{os.path.relpath(code.co_filename)}:{code.co_firstlineno}: " if code else ""
