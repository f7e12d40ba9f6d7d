"""The user's own classes, which a config names as module:Class."""

from __future__ import annotations

import importlib
import importlib.util
import symtable
from pathlib import Path
from typing import Any


def load_class(name: str) -> Any:
    """Return the class that module:Class names."""
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)


def check_name(text: str, *known: str) -> str:
    """Return a known name, or module:Class; raises ValueError if there is no such class.

    The module is not imported, because that would import torch; packages that contain it are. The
    class is looked for in the module's source, if it has one.
    """
    if text in known:
        return text
    module, _, name = text.partition(":")
    if not (module and name):
        raise ValueError(f"{text!r} is neither {' nor '.join(known)} nor module:Class")

    spec = None
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:
        missing = f"{error.name}." if isinstance(error, ModuleNotFoundError) else "/"
        if not f"{module}.".startswith(missing):  # a package that contains it raised this
            cause = f"{type(error).__name__}: {error}"
            raise ValueError(f"the package of {module} cannot be imported ({cause})") from None
    if spec is None:
        raise ValueError(
            f"there is no module {module}; put {module.replace('.', '/')}.py "
            "into this folder, into the config's, or on PYTHONPATH"
        )

    origin = spec.origin or ""
    if origin.endswith(".py"):
        try:
            source = importlib.util.decode_source(Path(origin).read_bytes())
            symbols = symtable.symtable(source, module, "exec").get_symbols()
        except SyntaxError as error:
            raise ValueError(f"{origin}, line {error.lineno}: {error.msg}") from None
        # A class statement counts as an assignment.
        names = [one.get_name() for one in symbols if one.is_assigned() or one.is_imported()]
        if name not in names and "import *" not in source:
            raise ValueError(f"{origin} has no class {name}")
    return text
