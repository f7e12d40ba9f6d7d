"""The far side of a launcher that reaches nodes over ssh: one process on each node, without torch.

    python scripts/lib/start.py launcher.fanout.far_side [--rdzv-id RUN_ID SCRIPT]
    python scripts/lib/start.py launcher.fanout.far_side --pdsh SOCKET

The first is told on stdin what to do: check the node, start its agent, whose supervisor it becomes,
with its stdin as the control stream. At the end it looks for what is left of the run. RUN_ID and
SCRIPT are for whoever looks at ps. The second starts the supervisor that the first one describes.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time

from distributed.errors import CANNOT_START
from launcher import processes
from launcher.agent.control import Launched, hears, take_stdin
from launcher.agent.supervisor import fork_agent, guard
from launcher.fanout import protocol
from launcher.fanout.protocol import Cut, Exit, Ready, Start, Sweep
from launcher.preflight.check_node import check_node
from launcher.text import mend_streams
from launcher.typed_json import encode, parse
from launcher.wire import limits
from launcher.wire.messages import KILLED, Request


def main(arguments: list[str]) -> int:
    """Serve the launcher, or pdsh; returns the exit code."""
    if arguments[:1] == ["--pdsh"]:
        return start_for_other(arguments[1])
    token = os.environ["LAUNCH_TOKEN"]
    while (request := read_request()) is not None:
        match request:
            case Request():
                answer(token, check_node(request))
            case Sweep():
                answer(token, Exit(0, processes.end_marked(request.token, limits.SWEEP_S)))
            case Start():
                code = offer_start(request, token) if request.socket else run_agent(request, token)
                answer(token, Exit(code, processes.end_marked(token, limits.SWEEP_S)))
                return 0
    return 0


def read_request() -> Request | Start | Sweep | None:
    """Return the launcher's next request, beats aside; None at its end.

    Not a byte more is read: what follows a start is the agent's.
    """
    stream, line = io.FileIO(0, closefd=False), b"\n"
    while line == b"\n":
        if not hears(0) or not (line := stream.readline()).endswith(b"\n"):
            return None
    request: Request | Start | Sweep = protocol.REQUESTS.read(line)
    return request


def answer(token: str, message: object) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone
        os.write(1, f"{token} {protocol.ANSWERS.write(message)}\n".encode())


def start_beats(token: str) -> None:
    def beat() -> None:
        while True:
            with contextlib.suppress(OSError):
                os.write(1, protocol.beat_line(token))
            time.sleep(limits.BEAT_S)

    threading.Thread(target=beat, daemon=True).start()


def run_agent(start: Start, token: str) -> int:
    """Run the node's agent below this process; returns its exit code. The agent never returns."""
    mend_streams()
    os.environ.update(start.variables)
    try:
        os.chdir(start.directory)
    except OSError as error:
        print(f"cannot start the node agent: {error}", file=sys.stderr)
        return CANNOT_START
    agent = fork_agent(start.command[2:], take_stdin(token), Launched())
    start_beats(token)  # a fork has one thread
    return guard(agent)


# --- through pdsh -------------------------------------------------------------------------------


def offer_start(start: Start, token: str) -> int:
    """Have the agent started by pdsh's process, which comes to a socket; returns its exit code.

    Only this user's processes are listened to. The name cannot be known before it is taken: the
    launcher made it up, and pdsh's command names it when every node is ready.
    """
    start_beats(token)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{start.socket}")
        listener.listen()
        answer(token, Ready())
        other = await_other(listener)
    if other is None:
        return CANNOT_START
    with other:
        full = Start(start.command, {**os.environ, **start.variables}, start.directory)
        with contextlib.suppress(OSError):  # it died: seen below
            socket.send_fds(other, [f"{encode(full)}\n".encode()], [0, 1, 2])
        said = other.makefile("rb")
        code = said.readline(80)
        if not code.strip().isdigit():  # its connection, or it itself, has ended
            answer(token, Cut())
            other.settimeout(limits.PDSH_CUT_S)
            with contextlib.suppress(OSError):
                code = said.readline(80)
    return int(code) % 256 if code.strip().isdigit() else KILLED


def await_other(listener: socket.socket) -> socket.socket | None:
    """Return the connection of pdsh's process; None if it does not come."""
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    ready.register(0, select.POLLRDHUP)  # beats are the agent's, and stay unread
    while True:
        events = dict(ready.poll(limits.PDSH_FETCH_S * 1000))
        if 0 in events or not events:
            return None
        other, _ = listener.accept()
        if is_ours(other):
            return other
        other.close()


def is_ours(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user."""
    size = struct.calcsize("3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", peer)
    return bool(user == os.getuid())


def start_for_other(name: str) -> int:
    """Start the agent that the far side describes, on its streams; returns the exit code."""
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(f"\0{name}")
        if not is_ours(other):
            raise SystemExit("the socket is another user's")
        begin, (stdin, stdout, stderr), *_ = socket.recv_fds(other, 1, 3)
        start = parse(Start, begin + other.makefile("rb").readline())
        threading.Thread(target=report_cut, args=(other,), daemon=True).start()
        env = {**start.variables, **Launched("stdin").variable()}
        try:
            code = subprocess.call(
                start.command,
                cwd=start.directory,
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        except OSError as error:
            os.write(stderr, os.fsencode(f"cannot start the node agent: {error}\n"))
            code = CANNOT_START
        code = processes.shell_code(code)
        with contextlib.suppress(OSError):
            other.sendall(b"%d\n" % code)
        return code


def report_cut(other: socket.socket) -> None:
    """Wait for the end of pdsh's connection, and report it."""
    while os.read(0, 4096):
        pass
    with contextlib.suppress(OSError):
        other.sendall(b"cut\n")
