"""Which variables a script sets before it imports torch: a forked rank has torch imported already.

Such a script's ranks are started anew. Only its text is read, and that of its own modules.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

from launcher.agent.output.stream import say
from launcher.agent.rank.program import Program

# What torch and the libraries below it read when they are imported, or once in a process.
_READ_EARLY = (
    *("CUDA_", "GOMP_", "HIP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_", "ROCR_", "TORCH"),
    "TRITON_",
)
_UNKNOWN = "variables"  # a name that the text does not tell


def choose(program: Program, choice: str | None) -> Program:
    """Return the program with its ranks started anew or forked: as FRESH says, else as its text.

    One that is neither 0 nor 1 may be another program's.
    """
    if choice not in (None, "", "0", "1"):
        say(f"warning: FRESH is {choice!r}; it can be 0 1; ignored")
        choice = None
    if choice or program.is_command:
        return replace(program, is_fresh=choice == "1")
    script = Path(program.name)
    if script == Path(__file__).parents[3] / "train.py":  # it sets none, and is long
        return program
    files, folder = [script], script.parent
    if program.is_module:
        folder = Path()
        files = _files_of(folder, [*program.name.split("."), "__main__"])
    names = variables_set_early(files, folder)
    if names:
        say(f"each rank imports torch anew, for {program.name} sets {names[0]} first")
    return replace(program, is_fresh=bool(names))


def variables_set_early(files: Sequence[Path], folder: Path) -> list[str]:
    """Return the names that a script's files set, one after the other, before importing torch.

    Its own modules are in the folder. Those that it imports before torch are read, too.
    """
    reader = _Reader(folder)
    any(reader.has_torch(file) for file in files)  # up to the first that imports it
    return reader.names


class _Reader:
    """Reads files in about the order in which Python executes them."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self._folder = folder
        self._seen: dict[Path, bool] = {}  # whether a file imports torch

    def has_torch(self, file: Path) -> bool:
        """Note the names that a file sets before it imports torch; returns whether it does."""
        if file not in self._seen:
            self._seen[file] = False  # so far: two may import each other
            try:
                tree = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                return True  # Python will say it better
            self._seen[file] = self._imports_torch(tree, file, _names_of_environ(tree))
        return self._seen[file]

    def _imports_torch(self, tree: ast.AST, file: Path, environ: Set[str]) -> bool:
        waiting = [tree]
        while waiting:  # without recursion: a long sum is a deep tree
            node = waiting.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # It may be called before torch is imported, or after: its own import ends only it.
                known = len(self.names)
                self._imports_torch(ast.Module(node.body, []), file, environ)
                self.names[known:] = [name for name in self.names[known:] if name != _UNKNOWN]
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                waiting += reversed(node.orelse)
            elif any(self._loads_torch(*one) for one in _imported(node, file, self._folder)):
                return True
            else:
                names = _names_set(node, environ)
                self.names += [name for name in names if name.startswith((*_READ_EARLY, _UNKNOWN))]
                waiting += reversed([*ast.iter_child_nodes(node)])
        return False

    def _loads_torch(self, folder: Path | None, parts: Sequence[str]) -> bool:
        if folder is None:
            return parts[0] == "torch" or self._loads_torch(self._folder, parts)
        return any(self.has_torch(file) for file in _files_of(folder, parts))


def _files_of(folder: Path, parts: Sequence[str]) -> list[Path]:
    """Return the files that Python runs to import a module: its packages' first."""
    found = []
    for count in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:count])
        files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
        found += [file for file in files if file.is_file()][:1]
    return found


def _imported(node: ast.AST, file: Path, folder: Path) -> list[tuple[Path | None, list[str]]]:
    """Return what a statement imports: where it is (None: on Python's path), and its name."""
    match node:
        case ast.Import(names=names):
            return [(None, one.name.split(".")) for one in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            parts = module.split(".") if module else []
            above = file.absolute().parents
            base = above[min(level, len(above)) - 1] if level else None
            return [(base, [*parts, one.name]) for one in names]
    return []


def _names_of_environ(tree: ast.AST) -> set[str]:
    """Return the names by which a file calls os.environ."""
    found = {"environ"}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="os", names=names):
                found |= {one.asname for one in names if one.name == "environ" and one.asname}
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_environ(value, found):
                found.add(name)
    return found


def _names_set(node: ast.AST, environ: Set[str]) -> list[str]:
    """Return the environment variables that a statement or a call sets."""
    keys: Sequence[ast.expr | None] = []
    match node:
        case ast.Subscript(value=value, slice=key, ctx=ast.Store()) if _is_environ(value, environ):
            keys = [key]
        case ast.AugAssign(target=target, value=value) if _is_environ(target, environ):
            keys = _keys_of(value)
        case ast.Call(func=ast.Attribute(value=value, attr=method), args=given, keywords=words):
            is_environ = _is_environ(value, environ)
            if method == "putenv" or (method == "setdefault" and is_environ):
                keys = given[:1]
            elif method == "update" and is_environ:
                keys = [key for one in given for key in _keys_of(one)]
                keys += [ast.Constant(word.arg) if word.arg else None for word in words]
    values = (key.value if isinstance(key, ast.Constant) else None for key in keys)
    return [value if isinstance(value, str) else _UNKNOWN for value in values]


def _keys_of(value: ast.expr) -> Sequence[ast.expr | None]:
    return value.keys if isinstance(value, ast.Dict) else [None]


def _is_environ(node: ast.expr, names: Set[str]) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) in names
