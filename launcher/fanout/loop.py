"""Child programs, signals and time in one event loop.

loop = Loop(environ, most_children=1)
child = Child(loop, ["ssh", "node1", "uptime"], on_output)
while child.code is None:
    signals = loop.wait(1.0)
"""

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from functools import cache, partial

from distributed.errors import Refused
from distributed.stop_signals import QUERY, handled_signals, stop_signals
from launcher import descriptors, processes
from launcher.text import Environ
from launcher.wire import limits

Show = Callable[[bytes, bool], None]  # gets output (empty at the end), and whether it is stderr
_CHUNK = 65536
# ssh options that the user's ~/.ssh/config must not override. The keep-alives end ssh only after an
# hour, because the launcher must be the first to notice a silent node.
FIXED = (
    "BatchMode=yes",
    "RemoteCommand=none",
    "RequestTTY=no",
    f"ServerAliveInterval={limits.SILENCE_S:.0f}",
    "ServerAliveCountMax=60",
)
SINCE_8_7 = ("StdinNull=no", "ForkAfterAuthentication=no", "SessionType=default")


class Loop:
    """Waits for children, signals and time together. Create it once, in the main thread."""

    def __init__(self, environ: Environ, most_children: int) -> None:
        """Raise the limit on open files, and handle stop signals, SIGQUIT and SIGCHLD from now on.

        Raises Refused if the hard limit is too low for `most_children`.
        """
        self.environ = environ  # the children's
        needed = 4 * most_children + 64  # open files
        limit = descriptors.raise_limit(2 * needed)  # a lost node gets a second connection
        if 0 <= limit < needed:  # negative: there is none
            cause = f"{most_children} nodes need {needed} open files, and the limit is {limit}"
            raise Refused("low-nofile", f"{cause}; raise the hard limit (ulimit -Hn) here")

        self.selector = selectors.DefaultSelector()
        self.children = list[Child]()
        self._signals = list[signal.Signals]()

        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for signum in (*handled_signals(), QUERY, signal.SIGCHLD):
            signal.signal(signum, lambda *_: None)  # its number arrives at `_wake`
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled_signals())
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # from a terminal after `stty tostop`
        self.selector.register(self._wake, selectors.EVENT_READ, self._on_signal)

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Wait for events for up to `seconds`, and handle those that have come.

        Returns the signals that arrived, except SIGCHLD. May return early without any.
        """
        for key, _ in self.selector.select(seconds):
            if self.selector.get_map().get(key.fd) is key:  # no earlier event has closed it
                key.data()
        came = self._signals
        self._signals = []
        return came

    def _on_signal(self) -> None:
        """Keep the signals that have arrived for wait(), and record which children have ended."""
        numbers = self._wake.recv(4096)
        known = {*stop_signals(), QUERY}
        self._signals += [signal.Signals(number) for number in numbers if number in known]
        for child in self.children:
            child.reap()

    def close(self) -> None:
        """End the remaining children, without waiting. Signals no longer arrive in wait()."""
        signal.set_wakeup_fd(-1)  # a later signal would be written to a closed socket
        for child in self.children:
            child.close_input()
            child.terminate()


@cache
def fixed_options() -> Sequence[str]:
    """Return the fixed options that this machine's ssh knows. Asks ssh for its version, once."""
    with contextlib.suppress(OSError):
        result = subprocess.run(["ssh", "-V"], stdin=subprocess.DEVNULL, capture_output=True)
        version = re.search(rb"OpenSSH_(\d+)\.(\d+)", result.stderr)
        if version and (int(version[1]), int(version[2])) >= (8, 7):
            return (*FIXED, *SINCE_8_7)
    return FIXED


def ssh_command(node: str, environ: Environ, connect_s: int, log: str) -> list[str]:
    """Return the ssh command. SSH_OPTS comes first: ssh uses the first value of each option.

    A connection that the user has opened (ControlMaster) is used: with a second factor, no other
    can be made. ssh writes its own messages to the file `log`.
    """
    options = [*fixed_options(), f"ConnectTimeout={connect_s}"]
    options += ["ControlMaster=no", "ClearAllForwardings=yes"]
    ours = [word for option in options for word in ("-o", option)]
    given = given_options(environ)
    return ["ssh", *given, "-T", "-x", "-a", *ours, "-E", log, "--", node, "exec bash -s"]


def given_options(environ: Environ) -> list[str]:
    """Return the user's own options for ssh."""
    return environ.get("SSH_OPTS", "").split()


class Child:
    """One program, whose output goes to a function.

    It runs in a new session, because PBS signals every process in a job's session, and ssh would
    die before the ranks could save.
    """

    def __init__(
        self,
        loop: Loop,
        command: Sequence[str],
        on_output: Show,
        *,
        last_signal: int = signal.SIGKILL,
    ) -> None:
        """Start the program. From then on, Loop.wait() calls `on_output`. Raises OSError.

        It gets `last_signal` when this process ends, even if that is stopped.
        """
        self.code: int | None = None  # its exit code, once it has ended; -N: killed by signal N
        self._loop = loop
        self._on_output = on_output

        stdin, self._stdin = os.pipe()
        out, stdout = os.pipe()
        err, stderr = os.pipe()
        self._process = subprocess.Popen(
            command,
            env=loop.environ,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=partial(processes.leave_terminal, os.getpid(), last_signal),
        )
        for fd in stdin, stdout, stderr:
            os.close(fd)

        self._unsent = bytearray()
        self._open = [out, err]
        self._stderr = err
        for fd in (self._stdin, *self._open):
            os.set_blocking(fd, False)
        for fd in self._open:
            loop.selector.register(fd, selectors.EVENT_READ, partial(self._read, fd))
        loop.children.append(self)

    def send(self, data: bytes) -> None:
        """Write to the program's stdin, as soon as possible; do nothing if stdin is closed."""
        if self._stdin >= 0:
            self._unsent += data
            self._write()

    def close_input(self) -> None:
        """Close the program's stdin now, and drop unsent data."""
        if self._stdin >= 0:
            self._want_write(is_wanted=False)
            os.close(self._stdin)
            self._stdin = -1

    def terminate(self, signum: int = signal.SIGTERM) -> None:
        """End the program, or send it another signal; a stopped one first has to continue."""
        if self.code is None:
            self._process.send_signal(signum)
            self.wake()

    def wake(self) -> None:
        """Continue the program if someone has stopped it."""
        if self.code is None and processes.is_stopped(self._process.pid):
            self._process.send_signal(signal.SIGCONT)

    def reap(self) -> None:
        """If the program has just ended, pass on its last output, then record its exit code."""
        code = self._process.poll()
        if self.code is not None or code is None:
            return
        for fd in list(self._open):
            while self._read(fd):
                pass
            if fd in self._open:  # one of the program's children keeps it open
                self._end(fd)
        self.close_input()
        self.code = code

    def _write(self) -> None:
        """Write what fits now. The loop calls this again until nothing is left."""
        try:
            del self._unsent[: os.write(self._stdin, self._unsent[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:  # the program has closed its stdin
            self.close_input()
            return
        self._want_write(is_wanted=bool(self._unsent))

    def _want_write(self, *, is_wanted: bool) -> None:
        """Have the loop call _write() as soon as stdin can be written to, or no longer."""
        is_registered = self._stdin in self._loop.selector.get_map()
        if is_wanted and not is_registered:
            self._loop.selector.register(self._stdin, selectors.EVENT_WRITE, self._write)
        elif is_registered and not is_wanted:
            self._loop.selector.unregister(self._stdin)

    def _read(self, fd: int) -> bool:
        """Read once, and pass it on. Returns False if there is nothing yet, or at the end."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._on_output(data, fd == self._stderr)
        else:
            self._end(fd)
        return bool(data)

    def _end(self, fd: int) -> None:
        """Close one of the program's two outputs, and report its end."""
        self._loop.selector.unregister(fd)
        self._open.remove(fd)
        os.close(fd)
        self._on_output(b"", fd == self._stderr)
