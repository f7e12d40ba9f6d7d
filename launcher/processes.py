"""Linux process control: keep, find and end the processes of this run, and only those.

A run's processes are found by descent. Every process that starts others declares itself a child
subreaper, so that whatever a rank forks, detaches or orphans stays below it (prctl(2)). If all
the subreapers have died, the rest are found by the run's token, a variable in their environment.
"""

import contextlib
import ctypes
import errno
import functools
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Iterator

from launcher import shared_files
from launcher.outer_run import OUTER_TOKEN
from launcher.own_time import turns
from launcher.proc import read_proc
from launcher.text import warn
from launcher.wire import limits

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc_prctl = ctypes.CDLL(None).prctl  # found now, because a forked process must not look for it
WAKING = signal.SIGCHLD, signal.SIGALRM  # end a wait in await_signal()
# Those that a scheduler or a person may send to all processes of a job, which are not about a stop.
OTHERS = (
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU, signal.SIGPOLL),
    *(signal.SIGPWR, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)),
)
_spared = set[object]()  # pairs: a process id, and when the process started
KILLED = 128 + signal.SIGKILL  # the exit code of a killed process, as a shell shows it
STATE, PARENT, STARTED = 0, 1, 19  # fields of read_stat()


def _prctl(option: int, value: int) -> None:
    """Call prctl. If that fails, warns once: then only the run's token finds processes, later."""
    if _libc_prctl(option, value, 0, 0, 0) != 0:
        _warn_once("prctl", "if a process of the run is killed, the others may end seconds later")


@functools.cache
def _warn_once(call: str, lost: str) -> None:
    warn(f"node agent: warning: this system refuses {call}(2); {lost}")


def claim(name: str, *, is_inherited: bool = False) -> bool:
    """Hold an abstract socket name until this process ends. Returns False if another holds it.

    With `is_inherited`, programs that this process starts or executes hold it too.
    """
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0launch-kit.{name}")
    except OSError as error:
        holder.close()
        return error.errno != errno.EADDRINUSE  # a sandbox refuses such names: nobody has it
    os.set_inheritable(holder.detach(), is_inherited)
    return True


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def leave_session() -> None:
    """Start a session, or at least a group: Ctrl-C on a terminal does not reach this process."""
    try:
        os.setsid()
    except OSError:  # a sandbox
        os.setpgid(0, 0)
        if os.isatty(0):
            _warn_once("setsid", "a script that reads from the terminal is stopped")


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent, with process id `parent`, dies."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before the call
        signal.raise_signal(signum)


def leave_terminal(parent: int, signum: int = signal.SIGKILL) -> None:
    """Start a session that ends with the parent."""
    leave_session()
    die_with_parent(parent, signum)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def read_stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third on, for STATE and the like (proc(5)).

    The list is empty if the process has ended or is not visible. The second field, the name, can
    contain any bytes; it is cut off after 15 bytes, even inside a character.
    """
    return read_proc(pid, "stat").rpartition(b")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended.

    Together with the process id, this identifies a process: the kernel reuses process ids.
    """
    stat = read_stat(pid)
    return int(stat[STARTED]) if len(stat) > STARTED and stat[STATE] not in (b"Z", b"X") else None


def spare_descendants() -> None:
    """Let descendants() omit those of now: `> >(tee log)` makes tee a launcher's child."""
    _spared.update((pid, start_ticks(pid)) for pid in descendants(os.getpid()))


def descendants(root: int) -> list[int]:
    """Return the process ids of all living descendants of `root`, except the spared."""
    children = dict[int, list[int]]()
    zombies = set[int]()
    for pid in _all_pids():
        stat = read_stat(pid)
        if stat and (pid, int(stat[STARTED])) not in _spared:
            children.setdefault(int(stat[PARENT]), []).append(pid)
            # A zombie still links its living children to us until they are reparented.
            if stat[STATE] == b"Z":
                zombies.add(pid)

    found = list[int]()
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return [pid for pid in found if pid not in zombies]


def _all_pids() -> list[int]:
    """Return the ids of all visible processes; none if this one has run out of descriptors.

    In that case the supervisor, which has few open files, ends what is left.
    """
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    return read_stat(pid)[:1] in ([b"T"], [b"t"])


def has_signal(pid: int, mask: str, signum: int) -> bool:
    """Whether a signal is in one of a process's masks (proc(5), /proc/PID/status).

    SigCgt lists the signals that have a handler, SigBlk those that the main thread blocks.
    """
    found = re.search(rf"^{mask}:\s*(\w+)".encode(), read_proc(pid, "status"), re.MULTILINE)
    return bool(found and int(found[1], 16) >> (signum - 1) & 1)


def handles(pid: int, signum: int) -> bool:
    """Whether a process in a group of its own handles or blocks a signal, and so survives it."""
    with contextlib.suppress(ProcessLookupError):  # it has just been reaped
        has_it = any(has_signal(pid, mask, signum) for mask in ("SigCgt", "SigBlk"))
        return has_it and os.getpgid(pid) == pid
    return False


def await_signal(signals: Iterable[int], limit_s: float) -> int | None:
    """Return the first of these signals to arrive in time; None if none does, or if a child ends.

    These signals and WAKING must have been blocked before the first thread started. An alarm ends
    the wait, instead of the timeout of sigtimedwait(): if a process is stopped for longer than
    that, Python returns uninitialized memory (seen with 3.11).
    """
    awaited = {*signals, *WAKING}
    try:
        signal.setitimer(signal.ITIMER_REAL, max(0.001, limit_s))  # 0 would set no alarm
    except OSError:  # a sandbox; the caller waits again
        time.sleep(limits.POLL_S)
        if not signal.sigpending() & awaited:
            return None
    came = signal.sigwaitinfo(awaited).si_signo
    signal.alarm(0)
    return None if came in WAKING else came


def outlive_others() -> None:
    """Keep OTHERS from ending this process; programs that it executes get no such handler."""
    for signum in OTHERS:
        if signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, lambda *_: None)


def send(pids: Iterable[int], signum: int) -> None:
    """Send a signal to each process that still exists and is ours."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def send_to_main_threads(pids: Iterable[int], signum: int) -> None:
    """Signal each main thread. Otherwise, in a stopped process, any thread may take the signal."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc 2.30
    for pid in pids:
        if tgkill is None or tgkill(pid, pid, signum) != 0:
            send([pid], signum)


def reap() -> Iterator[tuple[int, int]]:
    """Yield the process id and wait status of each child that has ended, including adopted ones."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            yield ended


def suspend() -> None:
    """Stop this process and all descendants, as Ctrl-Z does; continue them when it continues."""
    stopped = list[int]()
    for _ in turns(limits.KILL_S):
        running = [pid for pid in descendants(os.getpid()) if not is_stopped(pid)]
        if not running:
            break
        send(running, signal.SIGSTOP)  # repeat: one may have forked before it stopped
        stopped += running
    # With the default action, the kernel does not stop a process that no shell could continue.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.raise_signal(signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    send({*stopped}, signal.SIGCONT)


def end_descendants(*, term_s: float = 0.0) -> list[int]:
    """End every descendant of this process: SIGTERM, then SIGKILL after `term_s` seconds.

    Those that only remove shared memory come last, after the others have ended. Returns the ids of
    the processes that remain a second later: those in uninterruptible sleep, which no signal ends.
    """
    if term_s > 0:
        send(_workers(), signal.SIGTERM)
        for _ in turns(term_s):
            if not _workers():
                break
    for _ in turns(limits.KILL_S):
        if not (alive := _workers()):
            break
        send(alive, signal.SIGKILL)  # repeat: one may have forked before it stopped
    return _end_cleaners()


def _end_cleaners() -> list[int]:
    """End the last descendants, and remove the shared memory that they know. Returns the rest."""
    files = set[str]()
    begin = time.monotonic()
    while alive := descendants(os.getpid()):
        waited_s = time.monotonic() - begin
        if waited_s > limits.KILL_S:
            break

        managers = [pid for pid in alive if shared_files.is_manager(pid)]
        files.update(*map(shared_files.files_of, managers))
        send(managers if waited_s < limits.CLEAN_S else alive, signal.SIGKILL)
        time.sleep(limits.POLL_S)

    shared_files.remove(files)
    return alive


def _workers() -> list[int]:
    """Return all descendants except those that only clean up."""
    return [pid for pid in descendants(os.getpid()) if not shared_files.is_cleaner(pid)]


def kill_others(spared: Iterable[int]) -> None:
    """Send SIGKILL to all descendants of this process except these and their own descendants.

    Those that only clean up are left, too: they may belong to those that are spared.
    """
    kept = {*spared}
    kept.update(*map(descendants, kept))
    send((pid for pid in _workers() if pid not in kept), signal.SIGKILL)


def end_marked(token: str, wait_s: float) -> int:
    """Kill a run's processes left after `wait_s`, remove their shared memory. Returns how many."""
    left, files = _await_marked(token, wait_s)
    if left:
        send([pid for pid in left if not shared_files.is_cleaner(pid)], signal.SIGKILL)
        cleaners, more_files = _await_marked(token, limits.CLEAN_S)
        send(cleaners, signal.SIGKILL)
        shared_files.remove(files | more_files)
    return len(left)


def _await_marked(token: str, wait_s: float) -> tuple[list[int], set[str]]:
    """Wait for the processes of a run to end. Returns the rest, and the shared files they know."""
    deadline = time.monotonic() + wait_s
    files = set[str]()
    while left := _marked(f"LAUNCH_TOKEN={token}", f"{OUTER_TOKEN}={token}"):
        files.update(*map(shared_files.files_of, filter(shared_files.is_manager, left)))
        if time.monotonic() >= deadline:
            break
        time.sleep(10 * limits.POLL_S)
    return left, files


def set_process_name(name: str) -> None:
    """Name this process for users of ps, top, py-spy and nvidia-smi; only 15 bytes are kept."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def ranks_of(run_id: str) -> dict[str, int]:
    """Return the process ids of a run's ranks on this machine, by name, in rank order."""

    def name_of(pid: int) -> str:
        return read_proc(pid, "comm").decode(errors="replace").strip()

    ranks = {}
    for pid in _marked(f"RUN_ID={run_id}"):
        name = name_of(pid)
        stat = read_stat(pid)
        # A data worker has the name of its parent, the rank.
        if re.fullmatch(r"rank\d+", name) and stat and name_of(int(stat[PARENT])) != name:
            ranks[name] = pid
    return dict(sorted(ranks.items(), key=lambda item: int(item[0].removeprefix("rank"))))


def _marked(*variables: str) -> list[int]:
    """Return this user's processes that were started with one of these variables (`NAME=value`)."""
    marks = {*map(os.fsencode, variables)}
    others = {*_all_pids()} - {os.getpid()}
    return [pid for pid in others if marks & {*read_proc(pid, "environ").split(b"\0")}]


def exit_code(status: int) -> int:
    """Return the exit code for a `waitpid` status, as a shell shows it."""
    return shell_code(os.waitstatus_to_exitcode(status))


def shell_code(code: int) -> int:
    """Return an exit code, or a negated signal number, as a shell shows it: 128 + signal."""
    return code if code >= 0 else 128 - code
