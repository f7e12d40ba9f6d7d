"""A config as written in its YAML file, before its settings are checked."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

from distributed.environment import printable
from distributed.errors import REFUSED, Leave

try:
    import yaml
except ModuleNotFoundError:
    cause = f"{sys.executable} lacks PyYAML; run {sys.executable} -m pip install PyYAML"
    print(f"{Path(sys.argv[0]).name}: {cause} [env-missing]", file=sys.stderr)
    raise Leave(REFUSED, "env-missing", cause) from None

Tree = dict[str, Any]


class SettingsError(ValueError):
    """The config, or the data it names, is invalid: where, why and what to do, in one line."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number and a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; raises MarkedYAMLError, with the place, for a duplicate key."""
        seen = list[Any]()  # a key may have no hash
        for key, _ in node.value:
            if key.value in seen:
                problem = f"{key.value} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def with_ending(name: str) -> str:
    """Return the name of a config's file; the name may lack the ending."""
    return name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"


def read_file(path: Path) -> Tree:
    """Return what a config contains.

    Raises SettingsError if it is missing, no YAML file of `key: value` lines, or too large.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file; {_describe_folder(path)}") from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date such as 2024-13-45
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        cause = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SettingsError(f"{path}{where}: not YAML: {cause}") from None

    if not isinstance(tree, dict):
        raise SettingsError(f"{path}: should contain `key: value` lines")
    if _is_too_large(tree):
        raise SettingsError(f"{path}: has over 10000 values; check its aliases (*name)")
    return tree


def _describe_folder(path: Path) -> str:
    """Return, for a message, a similar name or all configs in the folder of a missing config."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"

    names = sorted(file.name for file in path.parent.glob("*.y*ml"))
    for name in names:
        if Path(name).stem in (path.stem, path.name):
            return f"did you mean {name}?"
    return f"{path.parent} holds {', '.join(names) or 'no .yaml files'}"


def line_of(file: str, key: str) -> str:
    """Return the line of a key in a file, as `:18`; "" if the file or the key is not there."""
    with contextlib.suppress(OSError, StopIteration):
        node: Any = yaml.compose(Path(file).read_bytes(), Loader)
        for name in key.split("."):
            found, node = next(pair for pair in node.value if pair[0].value == name)
        return f":{found.start_mark.line + 1}"
    return ""


def _is_too_large(tree: Tree) -> bool:
    """Return whether a tree, with aliases expanded, has over 10,000 values or contains itself."""
    pending: list[Any] = [tree]
    for _ in range(10_000):
        value = pending.pop() if pending else None
        inner = [*value.values()] if isinstance(value, dict) else value
        pending += inner if isinstance(inner, list) else []
    return bool(pending)
