"""Which variables a script sets before it imports torch: a forked rank has torch imported already.

Such a script's ranks are started anew. Its own text is read, and no module that it imports.
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
    if program.is_module:
        script = Path(*program.name.split("."))
        script = script / "__main__.py" if script.is_dir() else script.with_suffix(".py")
    if script == Path(__file__).parents[3] / "train.py":  # it sets none, and is long
        return program
    names = variables_set_early(script)
    if names:
        say(f"each rank imports torch itself, because {program.name} sets {names[0]} first")
    return replace(program, is_fresh=bool(names))


def variables_set_early(script: Path) -> list[str]:
    """Return the names that a script sets before it imports torch."""
    names: list[str] = []
    try:
        tree = ast.parse(script.read_bytes())
        _note_names(tree, _names_of_environ(tree), names)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        pass  # Python will say it better
    return names


def _note_names(tree: ast.AST, environ: Set[str], names: list[str]) -> None:
    """Note them in about the order in which Python executes the statements."""
    waiting = [tree]
    while waiting:  # without recursion: a long sum is a deep tree
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # It may be called before torch is imported, or after: its own import ends only it.
            known = len(names)
            _note_names(ast.Module(node.body, []), environ, names)
            names[known:] = [name for name in names[known:] if name != _UNKNOWN]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += reversed(node.orelse)
        elif _imports_torch(node):
            return
        else:
            found = _names_set(node, environ)
            names += [name for name in found if name.startswith((*_READ_EARLY, _UNKNOWN))]
            waiting += reversed([*ast.iter_child_nodes(node)])


def _imports_torch(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            modules = [one.name for one in names]
        case ast.ImportFrom(module=str(module), level=0):
            modules = [module]
        case _:
            return False
    return any(module.partition(".")[0] == "torch" for module in modules)


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
