"""Become a rank: what a process forked from the node agent does to look freshly started.

To a user's script, the fork looks like `python -u script.py`: `__main__` is the script, and
arguments, path, streams, signals and random seeds are those of a new process. The only difference
is that torch is already imported. torch's own start_processes() also forks, but its child is a
multiprocessing worker (no stdin, a fixed start method, not the main process), and some scripts
refuse to run in one.
"""

import builtins
import contextlib
import faulthandler
import functools
import gc
import importlib.machinery
import io
import json
import logging
import os
import random
import runpy
import signal
import sys
import time
import traceback
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distributed.errors import STOPPED
from distributed.stop_signals import QUERY, handled_signals
from launcher import processes
from launcher.agent.output.stream import say
from launcher.agent.rank import ending
from launcher.agent.rank.flight_recorder import answer_requests
from launcher.agent.rank.optimizer_steps import count_steps
from launcher.agent.torch_internals import (
    RECORDER_SIZE,
    group_backends,
    is_lost_by_fork,
    reports_leaks,
)
from launcher.text import Environ, warn

_MOST_DETAILS = 3
_LONGEST_DETAIL = 300  # characters
_ROOT = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True)
class Program:
    """What each rank runs: torchrun's SCRIPT, `-m MODULE` or, with `--no-python`, any command."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool
    is_command: bool
    is_fresh: bool = False  # each rank imports torch itself

    @property
    def can_fork(self) -> bool:
        """Whether a fork can run it; some programs need a new process."""
        if self.is_command or self.is_fresh:
            return False
        return self.is_module or (os.path.isfile(self.name) and not zipfile.is_zipfile(self.name))

    def command(self) -> list[str]:
        """Return the command line that starts it in a new process, as torchrun would."""
        if self.is_command:
            return [self.name, *self.arguments]
        option = ["-m"] if self.is_module else []
        return [sys.executable, "-u", *option, self.name, *self.arguments]


def run_and_exit(
    program: Program, variables: Environ, *, stdout: int, stderr: int, parent: int
) -> NoReturn:
    """In the child of a fork, become a rank, run the program, and exit with its exit code.

    This raises SystemExit through all callers, so that the interpreter exits as it does for any
    script: it joins threads and runs exit handlers. A program that needs a new process replaces
    this one.

    Args:
        variables: environment variables to add to those inherited.
        stdout, stderr: file descriptors to print to.
        parent: the node agent's process id; the rank dies with it.
    """
    _restore_signals()
    # Also keeps Ctrl-C from the rank, and shows the agent that signals are reset.
    processes.leave_terminal(parent)
    for fd, number in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)

    os.environ.update(variables)
    is_too_late = program.can_fork and is_lost_by_fork()  # CUDA does not survive a fork
    if is_too_late and variables["LOCAL_RANK"] == "0":
        say("CUDA is already in use, so each rank imports torch itself")
    if is_too_late or not program.can_fork:
        sys.exit(_execute_command(program.command()))

    if "OMP_NUM_THREADS" in variables:  # OpenMP read this when torch was imported
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    _renew_streams()
    _renew_seeds()
    logging.getLogger().handlers.clear()  # torchrun's would disable basicConfig (torch < 2.6)

    error_file = Path(variables["TORCHELASTIC_ERROR_FILE"])
    count_steps(variables["HEARTBEAT_FILE"], error_file)
    if os.environ.get(RECORDER_SIZE, "0") not in ("", "0"):  # torch records collectives
        answer_requests(error_file)

    _hide_the_agent(program)
    kept = _keep_backends()
    set_state = functools.partial(
        ending.set_state, variables["HEARTBEAT_FILE"], int(variables["LOCAL_WORLD_SIZE"])
    )
    code = _execute(program, error_file, set_state)

    kept.clear()
    if reports_leaks():
        gc.unfreeze()  # nanobind would report what is frozen as leaks
    time.sleep(0.001)  # yields the GIL: torch's threads release their objects and do not abort
    sys.exit(code)


def _restore_signals() -> None:
    """Give signals the handlers of a new Python process, and unblock all."""
    signal.set_wakeup_fd(-1)
    for signum in (*handled_signals(), QUERY, signal.SIGCHLD, *processes.OTHERS):
        is_interrupt = signum == signal.SIGINT
        signal.signal(signum, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _execute_command(command: list[str]) -> int:
    """Replace this process with the command. Returns an exit code only if that fails."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        warn(f"{command[0]}: {error.strerror}")
        return 127 if isinstance(error, FileNotFoundError) else 126


def _renew_streams() -> None:
    """Reopen stdout and stderr, whose descriptors have changed, unbuffered as in `python -u`."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        raw = io.FileIO(fd, "wb", closefd=False)
        new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)
        new.mode = "w"  # type: ignore[misc]  # as Python's own
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _renew_seeds() -> None:
    """Reseed the random number generators: forked ranks would all draw the same numbers."""
    torch.seed()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _hide_the_agent(program: Program) -> None:
    """Give the user's script its own sys.path and sys.argv, and hide this project's packages.

    They are removed from sys.modules, because the script may import another `distributed`.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] in ("distributed", "launcher"):
            del sys.modules[name]
    is_safe_path = getattr(sys.flags, "safe_path", False)  # -P, Python 3.11
    if not is_safe_path or sys.path[0] == _ROOT:  # the agent's own entry
        del sys.path[0]
    if not is_safe_path:
        script_folder = os.path.dirname(os.path.realpath(program.name))
        sys.path.insert(0, os.getcwd() if program.is_module else script_folder)
    sys.argv = [program.name, *program.arguments]


def _keep_backends() -> list[Any]:
    """Keep the backends of the process groups that the script destroys, in the list returned.

    Replaces destroy_process_group() by one that first puts the backends of all groups in the list,
    in place of those of the call before, which have had time to release their last tensors: a
    script may make and destroy many groups.
    If they were not kept, the last reference would often be that of a DistributedDataParallel or,
    before torch 2.8, of the group, which drop it with the GIL held. The backend then joins gloo's
    thread, which may need the GIL for the last tensor that it reduced: a deadlock.
    """
    destroy = dist.destroy_process_group
    kept = list[Any]()

    @functools.wraps(destroy)
    def keep_and_destroy(group: dist.ProcessGroup | None = None) -> None:
        kept[:] = group_backends()
        destroy(group)

    dist.destroy_process_group = distributed_c10d.destroy_process_group = keep_and_destroy
    return kept


def _execute(program: Program, error_file: Path, set_state: Callable[[int], None]) -> int:
    """Run the program as `__main__`. Returns the exit code that Python would give it.

    If an error has ended it, writes the error file and, for an exception, prints the traceback.
    `set_state` tells the agent that it has ended, and whether it may still save.
    """
    with contextlib.suppress(OSError):  # a sandbox: no stack after a crash
        faulthandler.enable()
    try:
        if program.is_module:
            sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
            runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]
        else:
            _run_script(program.name)
    except SystemExit as leave:
        if hasattr(leave, "prepare"):  # the helper's finish()
            leave.prepare()
        code = _end_as_python(leave)
        if code != 0:
            _write_error_file(leave, code, error_file)
            set_state(ending.MAY_SAVE if code == STOPPED else ending.ENDED)
        return code
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        _write_error_file(error, code, error_file)
        set_state(ending.MAY_SAVE)
        code = _show_error(error, code)
        set_state(ending.ENDED)
        return code
    return 0


def _run_script(path: str) -> None:
    """Run a script as `python path` does: as `__main__`, with its own globals."""
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
    # Kept until exit: its classes must be picklable, even in spawned workers.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    with io.open_code(main.__file__) as source:
        code = compile(source.read(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _end_as_python(leave: SystemExit) -> int:
    """Print the message of a SystemExit, if it has one in place of a code. Returns the exit code.

    Python itself does the same: it prints the message to stderr, and exits with code 1.
    """
    if leave.code is None or isinstance(leave.code, int):
        return (leave.code or 0) & 0xFF
    warn(str(leave.code))
    return 1


def _write_error_file(error: BaseException, code: int, file: Path) -> None:
    """Write the error file, in torch's format; torch itself writes it only for exceptions."""
    text = _text_of(error)
    fault = getattr(error, "fault", "")
    has_left = isinstance(error, SystemExit)
    is_own_exit = has_left and fault  # distributed.errors.Leave, which may be imported twice
    stack = "" if is_own_exit else traceback.format_exc()

    message = {
        "message": text if is_own_exit else f"{type(error).__name__}: {text}",
        "errorCode": code,
        "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))},
        "fault": fault,  # this field and the next ones are ours; torch ignores them
        "time": time.time(),  # a file server's clock may differ from this one
        "notes": "; ".join(map(str, getattr(error, "__notes__", []))),
        "details": [] if has_left else _details_of(error),
        "has_left": has_left and not fault,
        # Data can raise others: ElementTree's ParseError is a SyntaxError, too.
        "cannot_import": type(error) in (ImportError, SyntaxError, IndentationError),
    }

    with contextlib.suppress(OSError):  # a full disk; stderr has the error too
        file.write_text(json.dumps({"message": message}), encoding="utf-8")


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its __str__ raised {type(second).__name__})"


def _details_of(error: BaseException) -> list[str]:
    """Return a line for each error of a group, and one for the error that caused this one."""
    lines = [f"{type(each).__name__}: {_text_of(each)}" for each in _errors_of_group(error)]
    if (source := error.__cause__) is not None:
        lines.append(f"caused by {type(source).__name__}: {_text_of(source)}")
    return [line.partition("\n")[0][:_LONGEST_DETAIL] for line in lines[:_MOST_DETAILS]]


def _errors_of_group(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of an ExceptionGroup (Python 3.11, or its backport), also of inner ones."""
    members = getattr(error, "exceptions", ())
    if not isinstance(members, tuple):  # the attribute of another class
        return
    for member in members:
        if hasattr(member, "exceptions"):
            yield from _errors_of_group(member)
        elif isinstance(member, BaseException):
            yield member


def _show_error(error: BaseException, code: int) -> int:
    """Print the traceback through the script's own hook, without our frames above it.

    Returns the exit code, or the one that the hook has chosen.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next

    try:
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    except SystemExit as leave:
        return _end_as_python(leave)
    except BaseException as second:  # as Python does
        warn("Error in sys.excepthook:")
        sys.__excepthook__(type(second), second, second.__traceback__)
        warn("\nOriginal exception was:")
        sys.__excepthook__(type(error), error, frames)
    return code
