"""Exit a rank as Python does, but without tearing down torch."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from . import limits
from .heartbeat import beat

_PACKAGE = __name__.partition(".")[0]
_FILES = io.TextIOWrapper, io.BufferedRandom, io.BufferedWriter, io.FileIO
_NEEDED = types.ModuleType, types.FunctionType, type  # by destructors
before_finish: list[Callable[[int], None]] = []  # what finish calls first, with the exit code


def finish(code: int = 0) -> NoReturn:
    """Exit this process quickly. All ranks should call this last, instead of sys.exit.

    Waits for a `save` in progress (on all ranks if the code is 0 or STOPPED), and raises
    CheckpointError if it fails. Then it raises SystemExit, so that everything ends as after
    sys.exit: `with` and `finally`, threads and exit handlers, and the script's objects, which may
    close files. If threads and handlers take longer than 30 s, it prints a line on stderr and exits
    without waiting for them. Only torch is not torn down, which would take 0.6 s.

    In an exit handler, or in a thread other than the main one, it ends the process itself; in such
    a thread, without waiting for the script's threads. From Python 3.12 on, an exit handler can
    start no thread: after 30 s, it then prints the stacks instead of the line, and exits with 1.
    """
    atexit.unregister(finish)  # finish may itself be an exit handler
    for prepare in before_finish:
        prepare(code)

    main = threading.main_thread()
    is_main = threading.current_thread() is main
    if is_main and main.is_alive():  # not in an exit handler
        raise _Finish(code)

    _limit_time(code)
    # Another thread cannot wait for all threads, which then still use the script's objects.
    _end_process(code, threading._shutdown if is_main else None)  # type: ignore[attr-defined]


class _Finish(SystemExit):
    """Ends the process once nothing can catch it any more."""

    @property
    def code(self) -> int:  # type: ignore[override]
        """The exit code. If Python itself asks for it, nothing has caught this: call `prepare`."""
        try:
            sys._getframe(1)
        except ValueError:  # no Python function has asked for the code
            self.prepare()
        return self.args[0]  # type: ignore[no-any-return]

    def prepare(self) -> None:
        """Let Python's shutdown end the process with this code, in EXIT_S seconds at most.

        The node agent calls this when a script ends.
        """
        code: int = self.args[0]
        _limit_time(code)
        # What Python calls first when it exits, before the exit handlers.
        threading._shutdown = partial(_end_process, code, threading._shutdown)  # type: ignore[attr-defined]


_Finish.__name__ = SystemExit.__name__  # for a failure block, it is what sys.exit raises


def _limit_time(code: int) -> None:
    """From now on, give this process EXIT_S seconds to exit by itself."""
    try:
        threading.Thread(target=_exit_late, args=(code,), daemon=True).start()
    except RuntimeError:  # in an exit handler, from Python 3.12 on; this exits with 1
        faulthandler.dump_traceback_later(limits.EXIT_S, exit=True)


def _exit_late(code: int) -> None:
    """Report progress to the node agent for EXIT_S seconds; then print a line and exit."""
    end = time.monotonic() + limits.EXIT_S
    while time.monotonic() < end:
        time.sleep(0.5)
        beat()
    text = f"threads or exit handlers are still running after {limits.EXIT_S:g} s; exiting anyway"
    os.write(2, f"process {os.getpid()}: {text}\n".encode())  # another thread may hold sys.stderr
    os._exit(code)


def _end_process(code: int, join_threads: Callable[[], None] | None) -> NoReturn:
    """Do in order what Python does, up to where it would delete torch's modules.

    Without `join_threads`, the script's threads continue, so the objects that they use are kept. An
    error while objects are deleted is printed, and the files are still closed.
    """
    try:
        _call_each("flush", [sys.stdout, sys.stderr])  # what follows may take too long
        if join_threads:
            join_threads()
        atexit._run_exitfuncs()
        files = _open_files()  # kept: Python may close a file before an object that writes to it
        _call_each("flush", files)
        try:
            if join_threads:
                _delete_objects()
        except BaseException:  # also a Ctrl-C: the files must be closed
            traceback.print_exc()
        _call_each("close", _open_files())
    finally:
        os._exit(code)


def _delete_objects() -> None:
    """Delete what the variables of the script's modules hold, newest first.

    Modules, functions and classes go last, because destructors may need them.
    """
    threading.excepthook = lambda _: None  # daemon threads may still use the variables
    # Other threads may import a module meanwhile, and destructors may delete variables.
    for kept in (_NEEDED, ()):
        for variables in reversed([vars(one) for one in [*sys.modules.values()] if _is_own(one)]):
            for name in reversed([*variables]):
                # Names such as __builtins__: functions that destructors call need them.
                if not name.startswith("__") and not issubclass(type(variables.get(name)), kept):
                    variables[name] = None
        gc.collect()  # objects in cycles


def _is_own(module: Any) -> bool:
    """Return whether a module is the user's, and neither installed nor a part of Python or of ours.

    An installed one closes what it has open in an exit handler.
    """
    if type(module) is not types.ModuleType:  # another type may import something when it is read
        return False
    name = module.__name__.partition(".")[0]
    file = str(vars(module).get("__file__"))  # "None", without os.sep, if it is built in
    is_other = name in sys.stdlib_module_names or name in ("torch", _PACKAGE)
    return name == "__main__" or (not is_other and os.sep in file and "-packages/" not in file)


def _open_files() -> list[Any]:
    """Return every file object, open or closed, whatever refers to it.

    Text files come before the buffers that they write to, and buffers before the files below them.
    """
    files = [one for one in gc.get_objects() if type(one) in _FILES]
    return sorted(files, key=lambda one: _FILES.index(type(one)))


def _call_each(method: str, files: list[Any]) -> None:
    """Call a method of each file, such as "flush"; ignore errors."""
    for file in files:
        with contextlib.suppress(Exception):  # it is closed, or its disk is full
            getattr(file, method)()
