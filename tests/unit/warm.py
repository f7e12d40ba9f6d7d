"""Start agents and train.py as forks of a process that has imported torch.

The import takes 3 s of CPU time, which is most of the cost of a launch on one machine, and the same
each time. A fork runs the same file with its own arguments, environment, folder and streams, as a
child of the process that requested it, as if it had been executed; /proc shows its own environment.
A program that needs another Python, Python's own variables or a terminal cannot be forked, so it is
executed as usual. tests/scripts and tests/cluster execute everything.
"""

import atexit
import ctypes
import gc
import importlib
import importlib.util
import inspect
import io
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (str(ROOT / "scripts/lib/agent.py"), str(ROOT / "train.py"))
EARLY = ("LC_", "LANG", "LD_", "OMP_", "MKL_", "KMP_", "TORCH")  # read before the first line
THREADS = "OMP_NUM_THREADS"  # can be set in torch later, as the agent does for its ranks
# Also imported by train.py in each rank, if they are installed.
LIBRARIES = (
    *("yaml", "matplotlib.backends.backend_agg", "torch.distributed.fsdp"),
    *("tensorboard.compat.proto.event_pb2", "tensorboard.summary.writer.event_file_writer"),
)
MOST = 1 << 16  # bytes per order
ROOM = "ROOM_FOR_VARIABLES"  # a variable so large that any order's variables fit in its place
CLONE_PARENT = 0x8000  # from linux/sched.h
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # its number, from asm/unistd.h


class Popen(subprocess.Popen[Any]):
    """Like subprocess.Popen, but a program in PROGRAMS is forked."""

    def _execute_child(self, *given: Any) -> None:
        call = EXECUTE_CHILD.bind(self, *given).arguments
        order = write_order(call)
        if order is None:
            EXECUTE(self, *given)
            return
        channel = forker(early(call["env"]))
        socket.send_fds(channel, [order], streams(call))
        self.pid = int(channel.recv(16))
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in names))  # type: ignore[attr-defined]


EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]
EXECUTE_CHILD = inspect.signature(EXECUTE)


def write_order(call: Mapping[str, Any]) -> bytes | None:
    """Return what a fork must become, or None if the program must be executed."""
    args, environ = call["args"], os.environ if call["env"] is None else call["env"]
    words = [str(word) for word in args] if isinstance(args, list) else []
    if CLONE is None or words[:2] not in [[sys.executable, program] for program in PROGRAMS]:
        return None
    is_special = call["preexec_fn"] or call["pass_fds"] or any(map(os.isatty, streams(call)))
    for_python = {name for name in environ if name.startswith("PYTHON")} - {"PYTHON", "PYTHONPATH"}
    if is_special or for_python:
        return None
    if (umask := call["umask"]) < 0:
        os.umask(umask := os.umask(0))
    folder = os.path.abspath(call["cwd"] or ".")
    own = [umask, bool(call["start_new_session"]), sorted(ignored())]
    order = json.dumps([words[1:], dict(environ), folder, *own]).encode()
    return order if len(order) < MOST else None


def streams(call: Mapping[str, Any]) -> list[int]:
    """Return the descriptors for the program's stdin, stdout and stderr."""
    given = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    return [number if fd == -1 else fd for number, fd in enumerate(given)]


def ignored() -> set[int]:
    """Return the signals that this process ignores, as would the programs it starts."""
    found = {int(one) for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN}
    return found - {signal.SIGPIPE, signal.SIGXFSZ}  # Python itself ignores these


def early(environ: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables that take effect before a fork."""
    environ = os.environ if environ is None else environ
    found = {name: value for name, value in environ.items() if name.startswith(EARLY)}
    if number_of_threads(found):
        del found[THREADS]
    return found


def number_of_threads(environ: Mapping[str, str]) -> int:
    """Return the number of threads to set after torch's import; 0: none, or not a number."""
    number = environ.get(THREADS, "")
    return int(number) if number.isdecimal() else 0


FORKERS: dict[str, tuple[subprocess.Popen[Any], socket.socket]] = {}


@atexit.register
def end_forkers() -> None:
    for process, channel in FORKERS.values():
        channel.close()
        process.wait()


def forker(variables: Mapping[str, str]) -> socket.socket:
    """Return the socket of the process that forks under these variables."""
    key = json.dumps(variables, sort_keys=True)
    if key not in FORKERS:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            plain = {"PATH": os.environ["PATH"], "OPENBLAS_NUM_THREADS": "1"}  # no threads
            plain[ROOM] = "x" * MOST
            process = Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**plain, **variables},
                pass_fds=[theirs.fileno()],
            )
        FORKERS[key] = process, ours
    return FORKERS[key][1]


def import_installed(names: Iterable[str]) -> None:
    """Import these modules, except those of packages that are not installed."""
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)


def fork_for(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Fork for every order; returns only in the forks, with the order and its streams."""
    while True:
        order, fds, _, _ = socket.recv_fds(channel, MOST, 3)
        if not order:
            os._exit(0)
        pid = fork_sibling()
        if pid == 0:
            return order, fds
        channel.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def fork_sibling() -> int:
    """Like os.fork(), but the child's parent is this process's parent."""
    assert CLONE is not None and len(os.listdir("/proc/self/task")) == 1
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return int(pid)


def become(order: bytes, fds: list[int]) -> Path:
    """Apply an order to this process; returns the program to run."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = reopened(sys.stdin, "rb")  # the old ones belong to the files that were open before
    sys.stdout = reopened(sys.stdout, "wb")
    sys.stderr = reopened(sys.stderr, "wb")
    words, environ, folder, umask, is_session, to_ignore = json.loads(order)
    os.environ.clear()
    show(environ)
    os.environ.update(environ)
    os.chdir(folder)
    os.umask(umask)
    if is_session:
        os.setsid()
    for signum in ignored().symmetric_difference(to_ignore):
        signal.signal(signum, signal.SIG_IGN if signum in to_ignore else signal.SIG_DFL)
    if number := number_of_threads(environ):
        torch.set_num_threads(number)
        # Otherwise a rank's first threads recreate torch's pool at the same time, which fails.
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, number))
    sys.argv = words
    given = environ.get("PYTHONPATH")
    sys.path[0:1] = [str(Path(words[0]).parent), *(given.split(os.pathsep) if given else [])]
    return Path(words[0])


def show(environ: Mapping[str, str]) -> None:
    """Make /proc/PID/environ show the environment, by which a run's processes are found."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[47:49])  # env_start and env_end of proc(5)
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    assert len(text) < end - start
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def reopened(stream: TextIO, mode: str) -> io.TextIOWrapper:
    """Return a stream of the same kind for the file that is open at its descriptor now."""
    file = os.fdopen(stream.fileno(), mode, closefd=False)
    lines = stream is sys.stderr
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=lines)


def end_without_torch(left: SystemExit) -> NoReturn:
    """End like a program that has not imported torch, whose teardown may print warnings."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(left.code if isinstance(left.code, int) else left.code is not None)


if __name__ == "__main__":
    gc.disable()
    sys.path.insert(1, str(ROOT))
    import launcher.agent.agent  # noqa: F401  # imports all of torch that the ranks share

    import_installed(LIBRARIES)
    import torch

    for name in [one for one in sys.modules if one.split(".")[0] in ("launcher", "distributed")]:
        del sys.modules[name]
    sys.path.remove(str(ROOT))
    gc.freeze()
    gc.enable()
    own = socket.socket(fileno=int(sys.argv[1]))
    program = become(*fork_for(own))
    own.close()
    names = {"__name__": "__main__", "__file__": str(program)}
    me = os.getpid()
    try:
        exec(compile(program.read_bytes(), program, "exec"), names)
    except SystemExit as left:
        if os.getpid() == me and program.name == "agent.py":
            end_without_torch(left)
        raise
