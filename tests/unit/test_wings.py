"""The import rules: scripts -> launcher -> distributed (only torch) <- training, train.py."""

import ast
import re
import sys
from collections.abc import Iterator

import pytest
from agents import MODULES, ROOT

DOORS = {  # keep documented commands working
    *("distributed/run.py", "distributed/selftest.py", "distributed/checkpoint/__main__.py"),
}
LONGEST_DOOR = 10  # lines
MAY_IMPORT: dict[str, set[str]] = {
    "distributed": set(),  # relative imports: when installed, it is inside another package
    "launcher": {"launcher", "distributed"},
    "training": {"training", "distributed"},
    "train.py": {"training", "distributed"},
    "scripts": {"launcher"},
}
OPTIONAL = {"safetensors"}  # for exports in this format
WINGS = {"launcher", "distributed", "training", "train", "scripts"}
NAMES = sorted(str(file.relative_to(ROOT)) for file in MODULES)


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the package of every import except relative ones, including those in functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        yield from {name.partition(".")[0] for name in names}


def guarded(tree: ast.AST) -> Iterator[str]:
    """Yield the packages that may be missing, whose ImportError is caught."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = [ast.unparse(one.type) for one in node.handlers if one.type]
            yield from imported(ast.Module(node.body, [])) if "ImportError" in caught else ()


UNPICKLE = re.compile(r"\w+_object(_list)?|loads?_pickle|unpickle|Unpickler")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_arrives_is_unpickled(name: str) -> None:
    """torch's *_object functions unpickle data from other ranks; torch.load can avoid it."""
    tree = ast.parse((ROOT / name).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        called = ast.unparse(call.func)
        assert not UNPICKLE.fullmatch(called.rpartition(".")[2]), called
        if called == "torch.load":
            assert any(word.arg == "weights_only" for word in call.keywords)
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    names = {alias.name for node in imports for alias in node.names}
    assert not names & {"pickle", "dill", "marshal", "shelve"}


@pytest.mark.parametrize("name", NAMES)
def test_a_module_imports_only_what_its_wing_may(name: str) -> None:
    """A relative import must not leave its wing."""
    tree = ast.parse((ROOT / name).read_text())
    levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert max(levels, default=0) <= name.count("/")
    if name in DOORS:
        assert len((ROOT / name).read_text().splitlines()) <= LONGEST_DOOR
    else:
        assert {*imported(tree)} & WINGS <= MAY_IMPORT[name.partition("/")[0]]


@pytest.mark.parametrize("name", [one for one in NAMES if not one.startswith("train")])
def test_what_runs_on_a_node_needs_torch_alone(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    others = {*imported(tree)} - sys.stdlib_module_names - WINGS - {"torch"}
    assert others <= OPTIONAL & {*guarded(tree)}
    called = {ast.unparse(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)}
    assert not {one.rpartition(".")[2] for one in called} & {"numpy", "from_numpy", "__array__"}


def imports_of(name: str) -> set[str]:
    """Return the files of ours that a file imports, in functions and for types, too.

    `from . import files` imports the package's own __init__.py as well as files.py.
    """
    package = name.split("/")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            origin = [*start, *(node.module.split(".") if node.module else ())]
            modules = [origin, *([*origin, alias.name] for alias in node.names)]
        else:
            continue

        places = {"/".join(module) for module in modules}
        found |= {f"{place}{end}" for place in places for end in (".py", "/__init__.py")}
    return found & {*NAMES} - {name}


IMPORTS = {name: imports_of(name) for name in NAMES}


def test_the_imports_of_a_file_are_found() -> None:
    inner = "distributed/checkpoint"
    assert imports_of("launcher/cli/checkpoint.py") == {f"{inner}/__init__.py", f"{inner}/files.py"}
    assert imports_of("distributed/limits.py") == set()
    assert imports_of("distributed/job.py") == {"distributed/__init__.py", "distributed/limits.py"}


def test_no_files_import_one_another_in_a_circle() -> None:
    left = dict(IMPORTS)
    while free := {name for name, imports in left.items() if not imports & left.keys()}:
        left = {name: imports for name, imports in left.items() if name not in free}
    assert left == {}


def test_packages_of_the_launcher_import_one_another_in_one_direction() -> None:
    pairs = {
        (name.split("/")[1], other.split("/")[1])
        for name, imports in IMPORTS.items()
        for other in imports
        if name.startswith("launcher/") and other.startswith("launcher/")
    }
    packages = {pair for pair in pairs if not any(one.endswith(".py") for one in pair)}
    assert [pair for pair in packages if pair[0] != pair[1] and pair[::-1] in packages] == []


# Entry points, code in a rank that reads its own variables, and lookups for other code.
READ_ENVIRON = {
    *("scripts/lib/start.py", "launcher/agent/supervisor.py"),
    *("launcher/command.py", "launcher/agent/rank/program.py", "launcher/text.py"),
    *("distributed/environment.py", "distributed/rendezvous.py", "distributed/stop_signals.py"),
    *("distributed/heartbeat.py", "distributed/lock.py"),
    *("distributed/checkpoint/exchange.py", "distributed/checkpoint/snapshots.py"),
    *("training/arguments.py", "training/model.py", "training/plot.py"),
}
ENVIRON = re.compile(r"\bos\.(environ|getenv|putenv)|from os import")


def test_all_but_the_doors_are_given_the_environment() -> None:
    texts = {name: (ROOT / name).read_text() for name in NAMES}
    assert {name for name, text in texts.items() if ENVIRON.search(text)} == READ_ENVIRON
