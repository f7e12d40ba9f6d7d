"""finish() ends a script as sys.exit does: what it has open is whole."""

import sys
import textwrap
from pathlib import Path

import pytest
from agents import run_program
from test_torch_helper import own_environment

# Each writes a file in the working directory and leaves it open.
SCRIPTS = {
    "text": 'f = open("out", "w"); f.write("x\\n")',
    "bytes": 'f = open("out", "wb"); f.write(b"x")',
    "csv": 'import csv; f = open("out", "w"); csv.writer(f).writerow([1, 2])',
    "gzip": 'import gzip; f = gzip.GzipFile("out", "wb", mtime=0); f.write(b"x" * 99)',
    "gzip of text": """
        import gzip, io
        f = io.TextIOWrapper(gzip.GzipFile("out", "wb", mtime=0))
        f.write("x" * 99)
    """,
    "bz2": 'import bz2; f = bz2.open("out", "wt"); f.write("x" * 99)',
    "lzma": 'import lzma; f = lzma.open("out", "wt"); f.write("x" * 99)',
    "zip": 'import zipfile; f = zipfile.ZipFile("out", "w"); f.writestr(zipfile.ZipInfo("a"), "x")',
    "tar": """
        import io, tarfile
        f = tarfile.open("out", "w")
        f.addfile(tarfile.TarInfo("a"), io.BytesIO())
    """,
    "sqlite": """
        import sqlite3
        f = sqlite3.connect("out")
        f.execute("create table a (b)")
        f.execute("insert into a values (1)")
        f.commit()
        f.execute("insert into a values (2)")
    """,
    "logging": """
        import logging.handlers
        last = logging.handlers.MemoryHandler(99, target=logging.FileHandler("out"))
        logging.getLogger().addHandler(last)
        logging.warning("last words")
    """,
    "mmap": """
        import mmap
        with open("out", "wb+") as f:
            f.truncate(9)
            mapped = mmap.mmap(f.fileno(), 9)
        mapped[:3] = b"abc"
    """,
    "shelve": """
        import dbm.dumb, shelve  # the files of other databases hold an id of their own
        f = shelve.Shelf(dbm.dumb.open("out"), writeback=True)
        f["a"] = []
        f["a"].append(1)
    """,
    "memmap": """
        import numpy
        f = numpy.memmap("out", "int8", "w+", shape=(3,))
        f[:] = 7
    """,
    "atexit": 'import atexit; atexit.register(open("out", "w").write, "x")',
    "destructor": """
        import os
        class Last:
            to = os.open("out", os.O_CREAT | os.O_WRONLY)
            def __del__(self):
                os.write(self.to, b"x")
        last = Last()
    """,
    "cycle": """
        import os
        class Last:
            to = os.open("out", os.O_CREAT | os.O_WRONLY)
            def __init__(self):
                self.own = self
            def __del__(self):
                os.write(self.to, b"x")
        Last()
    """,
    "finalize": """
        import weakref
        class Last: pass
        last = Last()
        weakref.finalize(last, open("out", "w").write, "x")
    """,
    "module": """
        import sys
        with open("mine.py", "w") as f:
            f.write("class Last:\\n def __del__(self): self.to.write('x')")
        sys.dont_write_bytecode = True
        sys.path.insert(0, ".")
        import mine
        mine.last = mine.Last()
        mine.last.to = open("out", "w")
    """,
    "file in a cycle": """
        class Last:
            def __init__(self):
                self.own, self.file = self, open("out", "w")
                self.file.write("x")
            def __del__(self):
                self.file.write("y")
        last = Last()
    """,
    "installed module": 'import colorsys; colorsys.f = open("out", "w"); colorsys.f.write("x")',
    "temporary": """
        import tempfile
        folder = tempfile.TemporaryDirectory(dir=".", prefix="left")
        file = tempfile.NamedTemporaryFile(dir=".", prefix="left")
    """,
    "a destructor that deletes a variable": """
        class Last:
            def __init__(self):
                self.file = open("out", "w")
            def __del__(self):
                self.file.write("x")
        class Pool:
            def __del__(self):
                global cache
                del cache
        last, cache = Last(), {}
        globals()["last"], globals()["cache"], globals()["pool"] = last, cache, Pool()
    """,
    "daemon": """
        import threading, time
        def run():
            while True:
                time.sleep(1e-4)
        threading.Thread(target=run, daemon=True).start()
        f = open("out", "w"); f.write("x")
    """,
}
# Where the script calls finish(): in its last line, or in a function that has the file.
PLACES = {
    "module": "{script}\n{end}",
    "function": "def main():\n{inner}\n    {end}\nmain()",
    "with": "import contextlib\n"
    "@contextlib.contextmanager\n"
    "def closing():\n"
    "    yield\n"
    '    open("closed", "w").write("not reached")\n'
    "try:\n"
    "    with closing():\n"
    "        {end}\n"
    "finally:\n"
    '    open("finally", "w").write("x")',
}


def files_after(folder: Path, script: str, end: str) -> tuple[int, dict[str, bytes]]:
    """Run a script that ends so; returns its exit code, and the files that it leaves."""
    folder.mkdir()
    code = f"from distributed.exit import *\nimport sys\n{script.replace('{end}', end)}"
    done = run_program([sys.executable, "-c", code], folder, **own_environment())
    assert done.stderr == "", done.stderr
    return done.returncode, {
        one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()
    }


def check_both(folder: Path, script: str) -> dict[str, bytes]:
    """Check that finish() loses nothing that sys.exit() keeps; returns the files."""
    code, expected = files_after(folder / "exit", script, "sys.exit(7)")
    own_code, files = files_after(folder / "finish", script, "finish(7)")
    assert code == own_code == 7
    kept = {name: content for name, content in expected.items() if content}
    assert files.keys() == expected.keys() and files.items() >= kept.items()
    return files


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("place", ["module", "function"])
def test_what_a_script_has_open_is_whole(tmp_path: Path, name: str, place: str) -> None:
    script = textwrap.dedent(SCRIPTS[name]).strip()
    inner = textwrap.indent(script, "    ")
    whole = PLACES[place].replace("{script}", script).replace("{inner}", inner)
    files = check_both(tmp_path, whole)
    assert [one for one in files if one.startswith("left")] == []
    assert name == "temporary" or any(files.values())


def test_what_with_and_finally_close_is_closed(tmp_path: Path) -> None:
    assert check_both(tmp_path, PLACES["with"]) == {"finally": b"x"}


def ends_like_sys_exit(folder: Path, script: str) -> tuple[int, str]:
    """Check that a script ends with finish() as with sys.exit(); returns its code and output."""
    ends = []
    for end in ("sys.exit", "finish"):
        code = "import sys, threading, time\nfrom distributed.exit import *\n"
        code += textwrap.dedent(script).replace("{end}", end)
        done = run_program([sys.executable, "-c", code], folder, **own_environment())
        ends.append((done.returncode, done.stdout))
    assert ends[0] == ends[1]
    return ends[1]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("try: {end}(3)\nexcept Exception: print('caught')", (3, "")),
        ("try: {end}(0)\nexcept BaseException: print('caught')\n1 / 0", (1, "caught\n")),
        ("try: {end}(0)\nexcept SystemExit as end: print(end.code)\nsys.exit(5)", (5, "0\n")),
        ("try: {end}(4)\nexcept SystemExit as end: sys.exit(end.code + 1)", (5, "")),
        ("try: {end}(4)\nexcept SystemExit as end: print(end.code)\nprint('end')", (0, "4\nend\n")),
    ],
)
def test_a_script_may_catch_the_end(tmp_path: Path, script: str, expected: tuple[int, str]) -> None:
    """torch's @record, for example, catches an exit with code 0, and the script continues."""
    assert ends_like_sys_exit(tmp_path, script) == expected


def test_another_thread_can_end_the_script(tmp_path: Path) -> None:
    script = "open('out', 'w').write('x')\nthreading.Thread(target=finish, args=(3,)).start()\n"
    script = f"import threading, time\nfrom distributed.exit import *\n{script}time.sleep(600)"
    done = run_program([sys.executable, "-c", script], tmp_path, **own_environment())
    assert (done.returncode, done.stderr) == (3, "")
    assert (tmp_path / "out").read_text() == "x"


def test_an_import_during_the_exit_does_not_cut_files(tmp_path: Path) -> None:
    """A daemon thread may import while the script's modules are looked for."""
    script = """
        import types
        from distributed import exit
        is_own = exit._is_own
        def import_more(module):
            sys.modules[f"more{len(sys.modules)}"] = types.ModuleType("more")
            return is_own(module)
        exit._is_own = import_more
        class Last:
            def __init__(self):
                self.file = open("out", "w")
            def __del__(self):
                self.file.write("x")
        last = Last()
        finish(0)
    """
    code = f"import sys\nfrom distributed.exit import *\n{textwrap.dedent(script)}"
    done = run_program([sys.executable, "-c", code], tmp_path, **own_environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "x"


@pytest.mark.parametrize("error", ["KeyError", "KeyboardInterrupt"])
def test_an_error_while_objects_are_deleted_is_shown_and_files_are_closed(
    tmp_path: Path, error: str
) -> None:
    script = f"""
        from distributed import exit
        def fail():
            global to
            to = open("out", "w")  # opened after the others were flushed
            to.write("x")
            raise {error}("at the exit")
        exit._delete_objects = fail
        finish(3)
    """
    code = f"import sys\nfrom distributed.exit import *\n{textwrap.dedent(script)}"
    done = run_program([sys.executable, "-c", code], tmp_path, **own_environment())
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith(error)
    assert (tmp_path / "out").read_text() == "x"
