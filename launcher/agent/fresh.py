"""Which variables a script sets before it imports torch: a forked rank has torch imported already.

Such a script's ranks are started anew. Only its text is read, and that of its own modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from launcher.agent.output import say
from launcher.agent.rank import Program

# What torch and the libraries below it read when they are imported, or once in a process.
_READ_EARLY = (
    *("CUDA_", "GOMP_", "HIP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_", "ROCR_", "TORCH"),
    "TRITON_",
)


def choose(program: Program, choice: str | None) -> Program:
    """Return the program with its ranks started anew or forked: as FRESH says, else as its text.

    Raises:
        ValueError: FRESH is neither 0 nor 1.
    """
    if choice not in (None, "", "0", "1"):
        raise ValueError(f"FRESH is {choice!r}; give 1 for ranks that import torch anew, or 0")
    if choice or program.is_command:
        return replace(program, is_fresh=choice == "1")
    script, folder = Path(program.name), Path(program.name).parent
    if program.is_module:
        script, folder = Path(*program.name.split(".")).with_suffix(".py"), Path()
    names = variables_set_early(script, folder)
    if names:
        say(f"each rank imports torch anew, for {program.name} sets {names[0]} first")
    return replace(program, is_fresh=bool(names))


def variables_set_early(script: Path, folder: Path) -> list[str]:
    """Return the names that the script sets before its first import of torch.

    Args:
        folder: where its own modules are. Those that it imports before torch are read, too.
    """
    return _Reader(folder).read(script)[0]


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[Path] = set()

    def read(self, file: Path) -> tuple[list[str], bool]:
        """Return the names set in a file before torch is imported, and whether it is."""
        self._seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):  # Python will say it better
            return [], True
        found: list[str] = []
        for node in _in_order(tree):
            for name in _imported(node):
                if name.partition(".")[0] == "torch":
                    return found, True
                module = self._own_module(name)
                if module is not None and module not in self._seen:
                    names, has_torch = self.read(module)
                    found += names
                    if has_torch:
                        return found, True
            found += [name for name in _names_set(node) if name.startswith(_READ_EARLY)]
        return found, False

    def _own_module(self, name: str) -> Path | None:
        path = self._folder.joinpath(*name.split("."))
        files = (path.with_suffix(".py"), path / "__init__.py")
        return next((file for file in files if file.is_file()), None)


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes in the order of the text, which is about the order of execution."""
    waiting = [tree]
    while waiting:  # without recursion: a long sum is a deep tree
        node = waiting.pop()
        yield node
        waiting += reversed([*ast.iter_child_nodes(node)])


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
    return []


def _names_set(node: ast.AST) -> list[str]:
    """Return the environment variables that a statement or a call sets, as far as it names them."""
    keys: list[ast.expr | None] = []
    match node:
        case ast.Subscript(value=value, slice=key, ctx=ast.Store()) if _is_environ(value):
            keys = [key]
        case ast.AugAssign(target=target, value=ast.Dict(keys=given)) if _is_environ(target):
            keys = given
        case ast.Call(func=ast.Attribute(value=value, attr="setdefault"), args=[key, *_]) if (
            _is_environ(value)
        ):
            keys = [key]
        case ast.Call(func=ast.Attribute(attr="putenv"), args=[key, *_]):
            keys = [key]
        case ast.Call(func=ast.Attribute(value=value, attr="update")) if _is_environ(value):
            keys = [key for one in node.args if isinstance(one, ast.Dict) for key in one.keys]
            return _constants(keys) + [one.arg for one in node.keywords if one.arg]
    return _constants(keys)


def _is_environ(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _constants(keys: list[ast.expr | None]) -> list[str]:
    values = (key.value for key in keys if isinstance(key, ast.Constant))
    return [value for value in values if isinstance(value, str)]
