"""The far side of a launcher that reaches nodes: one process on each node, without torch.

    python scripts/lib/start.py launcher.fanout.far_side [--step] [--rdzv-id RUN_ID SCRIPT]
    python scripts/lib/start.py launcher.fanout.far_side --pdsh SOCKET

The first form gets requests on stdin: it checks the node, and starts the agent, whose supervisor it
becomes, with its stdin as the control stream. At the end, it kills leftover processes of the run.
With --step, srun started it, otherwise ssh. RUN_ID and SCRIPT are for readers of ps. pdsh starts
the second form: when the second form connects, the first starts the agent; when pdsh's connection
ends, the agent ends too.
"""

import contextlib
import math
import os
import select
import signal
import socket
import struct
import threading
import time
from dataclasses import replace

from distributed.errors import CANNOT_START
from distributed.stop_signals import NOTICES
from launcher import processes
from launcher.agent.control import end_run_after, move_control_off_stdin
from launcher.agent.supervisor import fork_agent, guard
from launcher.descriptors import wait_for_input
from launcher.preflight.check_node import check_node
from launcher.processes import KILLED
from launcher.text import OwnEnviron, mend_streams, warn
from launcher.wire import limits
from launcher.wire.launcher_link import read_request, send_message
from launcher.wire.messages import Cut, Exit, Hello, Ready, Request, Start, Sweep


def main(arguments: list[str], environ: OwnEnviron) -> int:
    """Serve the launcher until it is gone or silent, or until the agent has ended; or serve pdsh.

    Returns the exit code: the agent's, 0 without one. Changes `environ` as the request to start
    says.
    """
    processes.outlive_others()
    if arguments[:1] == ["--pdsh"]:
        return await_agent(arguments[1])

    is_step = arguments[:1] == ["--step"]
    if is_step:
        signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)  # pending until the agent can handle them
        if "LAUNCH_TOKEN" not in environ:
            raise SystemExit("srun forwarded no variables; add ALL to its --export (SRUN_OPTS)")
        environ["LAUNCH_TOKEN"] += f".{environ['SLURM_NODEID']}"
        send_message(environ["LAUNCH_TOKEN"], Hello(""))

    token = environ["LAUNCH_TOKEN"]
    silence_s = math.inf if is_step else limits.SILENCE_S
    while (request := read_request(0, silence_s)) is not None:
        match request:
            case Request():
                if is_step:  # all nodes get the same request
                    request = replace(request, node_rank=int(environ["SLURM_NODEID"]))
                send_message(token, check_node(request, environ))
            case Sweep():
                send_message(token, Exit(0, processes.end_marked(request.token, limits.SWEEP_S)))
            case Start():
                return serve_run(request, environ, is_step=is_step)
    return 0


def serve_run(start: Start, environ: OwnEnviron, *, is_step: bool) -> int:
    """Run the node's agent, once pdsh has connected if it is to. Sends the launcher its exit code.

    Returns that code. Ends what is left of the run on this node. Changes `environ`, the folder and
    stdin.
    """
    token = environ["LAUNCH_TOKEN"]
    pdsh = await_pdsh(start.socket, token) if start.socket else None
    lacks_pdsh = start.socket and pdsh is None
    code = CANNOT_START if lacks_pdsh else run_agent(start, environ, pdsh, is_step=is_step)
    send_message(token, Exit(code, processes.end_marked(token, limits.SWEEP_S)))
    if pdsh is not None:  # its process exits with the agent's code
        with contextlib.suppress(OSError):  # it is gone
            os.write(pdsh, bytes([code]))
    return code


def run_agent(start: Start, environ: OwnEnviron, pdsh: int | None, *, is_step: bool) -> int:
    """Run the node's agent in a child process, and send heartbeats until it ends.

    Returns its exit code; CANNOT_START if its folder does not exist. The child never returns. If
    the connection `pdsh` ends first, ends the run. Changes `environ`, the folder and stdin.
    """
    mend_streams()
    token = environ["LAUNCH_TOKEN"]
    environ.update(start.variables)
    try:
        os.chdir(start.directory)
    except OSError as error:
        warn(f"cannot start the node agent: {error}")
        return CANNOT_START
    # The agent is forked: the first two words, Python and the agent's file, are not needed.
    control = move_control_off_stdin(token, is_step=is_step)
    agent = fork_agent(start.command[2:], environ, control, pdsh)

    def beat() -> None:
        """Send heartbeats for as long as this process lives."""
        while True:
            send_message(token)
            time.sleep(limits.BEAT_S)

    def await_cut(fd: int) -> None:
        """Wait until pdsh's connection has ended; report that if the agent is still running."""
        while os.read(fd, 4096):
            pass
        if processes.start_ticks(agent.pid) is not None:  # otherwise the agent has ended
            send_message(token, Cut())

    threading.Thread(target=beat, daemon=True).start()  # only after the fork
    if pdsh is not None:
        end_run_after(await_cut, pdsh, agent.kill)
    return guard(agent)


# --- through pdsh -------------------------------------------------------------------------------


def await_pdsh(name: str, token: str) -> int | None:
    """Wait for pdsh's process at a socket. Returns the connection, or None if none is made.

    Gives up after PDSH_FETCH_S, or if the launcher's connection ends. Sends Ready, then heartbeats.
    Only this user's processes are accepted. No one can take the name first: the launcher chose it
    at random, and pdsh's command shows it only once every node is listening.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        send_message(token, Ready())

        ready = select.poll()
        ready.register(listener, select.POLLIN)
        ready.register(0, select.POLLRDHUP)  # heartbeats are for the agent, and stay unread

        deadline = time.monotonic() + limits.PDSH_FETCH_S
        while time.monotonic() < deadline:
            send_message(token)
            came = dict(ready.poll(limits.BEAT_S * 1000))
            if 0 in came:
                break
            if came:
                other, _ = listener.accept()
                if is_ours(other):
                    return other.detach()
                other.close()
    return None


def is_ours(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", peer)
    return bool(user == os.getuid())


def await_agent(name: str) -> int:
    """In pdsh's process, wait until the node's agent ends. Returns its exit code.

    Returns KILLED if the far side is gone, or if pdsh's connection ends. Raises OSError or
    SystemExit if the far side of this user does not listen.
    """
    with socket.socket(socket.AF_UNIX) as far_side:
        far_side.connect(f"\0{name}")
        if not is_ours(far_side):
            raise SystemExit("the socket belongs to another user")

        while True:
            ready = wait_for_input([0, far_side.fileno()])
            if far_side.fileno() in ready:
                code = far_side.recv(1)
                return code[0] if code else KILLED
            if not os.read(0, 4096):  # the end of pdsh's connection
                return KILLED
