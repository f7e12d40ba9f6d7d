"""The node agent, one per node: `python -m distributed.run`, with torchrun's own arguments.

    python -m distributed.run --nproc-per-node 4 train.py --config config/local3.yaml

This process, the supervisor, forwards signals, and ends what the agent leaves; it imports no torch.
The agent (agent.py) imports torch once, forks the ranks, and ends them if the supervisor exits. On
one machine, a reaper waits for either to exit, and ends the rest if the other is killed or stopped.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from distributed.stop_signals import ADDED, QUERY, STOP_SIGNALS, handled_signals, notices
from launcher import descriptors, importable, own_time, processes, typed_json
from launcher.agent.control import (
    AgentNote,
    Control,
    SupervisorLink,
    await_client,
    close,
    collect_signals,
    end_run_after,
    follow_stream,
    report_outcome,
)
from launcher.command_line import find_option, read_for_torch, read_grace, read_silence
from launcher.descriptors import wait_for_input
from launcher.explain.kinds import Kind
from launcher.explain.rules import find_rule
from launcher.failure import Failure, explain_exit, signal_name
from launcher.interrupt import code_for_shell
from launcher.outcome import Outcome
from launcher.outer_job import leave_outer_job
from launcher.outer_run import leave_outer_run
from launcher.own_time import Deadline
from launcher.preflight.cgroup import count_memory_kills
from launcher.record import run_json
from launcher.text import OwnEnviron, mend_streams, warn, whole
from launcher.wire import limits

EXHAUSTED = ("low-nofile", "low-nproc", "out-of-memory")  # may make an import fail
HAS_TORCH = b"\0"  # the first byte of the file for an agent's last output, once torch is imported


@dataclass
class Agent:
    """The agent process, which this process supervises."""

    pid: int
    notes: socket.socket  # on which it sends its AgentNote
    words: int  # the file for its last output
    note: AgentNote  # what is known before the agent sends its own
    control: Control | None
    grace_s: float
    pausing: Set[signal.Signals]  # Ctrl-Z on a terminal, which suspends the run
    folder: Path | None  # of the run, if this process is its launcher
    passed_on: list[int] = field(default_factory=list)  # the signals sent to the agent

    def send(self, signum: int) -> None:
        self.passed_on.append(signum)
        processes.send([self.pid], signum)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def ask(self) -> None:
        """Have the agent show its ranks' stacks, or print that the ranks have not started yet."""
        if wait_for_input([self.notes.fileno()], 0):  # its note has come: ranks start now
            processes.send([self.pid], QUERY)
        else:
            warn("node agent: the ranks have not started yet")


def main() -> int:
    """Run the agent as a child. Returns its code, or INTERRUPTED; a rank raises SystemExit."""
    environ = os.environ
    mend_streams()
    processes.outlive_others()
    leave_outer_run(environ)
    leave_outer_job(environ)
    is_launcher = environ.pop("LAUNCH_START", "") == "local"
    agent = fork_agent(sys.argv[1:], environ, None, is_launcher=is_launcher)
    return code_for_shell(guard(agent), agent.passed_on)


def fork_agent(
    arguments: Sequence[str],
    environ: OwnEnviron,
    control: Control | None,
    held: int | None = None,  # a descriptor of this process, which the agent closes
    *,
    is_launcher: bool = False,  # this process is the launcher
) -> Agent:
    """Fork the agent and, as a launcher, the reaper. Only this process returns.

    Signals stay blocked until guard() handles them. Threads end the run if the remote launcher or
    podman's client is gone. Children that this process already has are never ended.
    """
    client = int(environ.pop("LAUNCH_CLIENT", "0"))  # podman's client, if in a container
    added = find_option(arguments, "--signals-to-handle") or environ.get("PET_SIGNALS_TO_HANDLE")
    if added:
        environ[ADDED] = added
    handled = handled_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, a child would leave no status
    is_alone = find_option(arguments, "--nnodes") in ("", "1", "1:1")  # the only node
    pausing = {signal.SIGTSTP} - {*handled} if is_alone and control is None else set()
    awaited = {*handled, QUERY, *processes.WAKING, *pausing}
    signal.pthread_sigmask(signal.SIG_SETMASK, awaited)
    reapers = start_reaper(environ["LAUNCH_TOKEN"]) if is_launcher else (None, None)
    processes.spare_descendants()
    processes.adopt_orphans()
    ours, theirs = socket.socketpair()
    me, words = os.getpid(), descriptors.anonymous_file("words")

    if (pid := os.fork()) == 0:
        ours.close()
        for fd in reapers[0], control.fd if control else None, held:
            close(fd)
        processes.leave_terminal(me)  # Ctrl-C on a terminal reaches only the supervisor
        processes.adopt_orphans()
        descriptors.raise_limit()  # one for each rank of the run, and for each node
        for signum in handled:
            signal.signal(signum, signal.SIG_DFL)
        if QUERY not in handled:
            signal.signal(QUERY, lambda *_: None)  # ignored until there are ranks
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited - {*notices()})  # see collect_signals()
        link = SupervisorLink(theirs, control, reapers[1], words)
        sys.exit(_run_agent(arguments, environ, link, me))

    theirs.close()
    close(reapers[1])
    given = find_option(arguments, "--node-rank") or environ.get("SLURM_NODEID", "")
    node_rank = whole(given)  # the best guess so far
    logs, run_id = find_option(arguments, "--log-dir"), environ.get("RUN_ID", "")
    writes_record = is_launcher and logs and run_id and not node_rank
    folder = Path(logs, run_id) if writes_record else None
    note = AgentNote(run_id, node_rank, 0.0, 0)
    agent = Agent(pid, ours, words, note, control, read_grace(arguments, environ), pausing, folder)

    if control:
        silence_s = read_silence(environ)
        end_run_after(lambda _: follow_stream(control, silence_s), control.fd, agent.kill)
    if client:
        end_run_after(await_client, client, agent.kill)
    return agent


def _run_agent(
    arguments: Sequence[str], environ: OwnEnviron, link: SupervisorLink, supervisor: int
) -> int:
    """Import torch, then run the agent or, if ENGINE names it, torch's launcher. Returns a code."""
    environ["PYTHONPATH"] = importable.search_path(environ)
    sys.path += importable.__path__  # scripts import the helper from there
    if environ.get("ENGINE") == "torch.distributed.launch":
        with _importing(link.words):
            from torch.distributed.launch import launch, parse_args  # torch does the rest
        collect_signals()
        launch(read_for_torch(parse_args, arguments))  # type: ignore[no-untyped-call]
        return 0

    given = set(environ)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # NumPy is not needed
    with _importing(link.words):
        from launcher.agent.agent import run_agent  # imports torch
    for name in environ.keys() - given:  # added by the import, not meant for the ranks
        del environ[name]

    try:
        return run_agent(arguments, environ, link)
    except Exception:
        if os.getppid() == supervisor:  # not in a rank
            os.pwrite(link.words, traceback.format_exc().encode(), len(HAS_TORCH))
            os._exit(1)  # the supervisor reports it
        raise


@contextlib.contextmanager
def _importing(file: int) -> Iterator[None]:
    """Redirect stderr to the supervisor's file during an import; exit with 1 if that fails."""
    gc.disable()  # an import leaves little garbage, and collecting it takes a quarter of the time
    stderr = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    gc.freeze()  # the garbage collector must not write to pages shared with the ranks
    gc.enable()
    sys.stderr.flush()
    os.dup2(stderr, 2)
    os.close(stderr)
    sys.stderr.write(os.pread(file, 1 << 16, 0).decode(errors="replace"))  # such as warnings
    os.ftruncate(file, 0)
    os.pwrite(file, HAS_TORCH, 0)


def start_reaper(token: str) -> tuple[int, int]:
    """Start the reaper, which is not a descendant of this process and finds the run by its token.

    Returns two descriptors, for the supervisor and the agent to hold; the reaper sees them close.
    """
    (supervisor, for_supervisor), (agent, for_agent) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            for signum in STOP_SIGNALS:
                signal.signal(signum, signal.SIG_IGN)  # it ends after the run
            for fd in {*map(int, os.listdir("/proc/self/fd"))} - {supervisor, agent}:
                with contextlib.suppress(OSError):  # other processes wait for these to close
                    os.close(fd)
            processes.leave_session()
            ended = wait_for_input([supervisor, agent])
            if supervisor not in ended:  # it ends the rest, unless it is killed or stopped
                ended = wait_for_input([supervisor], limits.STOP_AGENT_S)
            processes.end_marked(token, limits.ORPHANS_S if ended else 0)  # 0: it is stopped
        os._exit(0)

    os.close(supervisor)
    os.close(agent)
    os.waitpid(child, 0)
    return for_supervisor, for_agent


def guard(agent: Agent) -> int:
    """Wait for the agent's exit, end leftover processes, and report a death. Returns the code."""
    memory_kills = count_memory_kills()
    status = _await_end(agent)
    left = processes.end_descendants()
    code = processes.exit_code(status)

    output = os.pread(agent.words, 1 << 16, 0)  # while importing torch, or on exit
    has_torch = output.startswith(HAS_TORCH)
    text = output.removeprefix(HAS_TORCH).decode(errors="replace")
    sys.stderr.write(text)
    words = [line.strip() for line in text.splitlines() if line.strip(" ^~")]
    has_failed = code != 0 and {*agent.passed_on} <= {*notices()}  # it may raise after a stop
    is_unreported = words or not has_torch  # once it has torch, only a crash leaves text
    if os.WIFSIGNALED(status) or (has_failed and is_unreported):
        has_kills = count_memory_kills() > memory_kills
        why = _explain_death(code, words, has_torch=has_torch, is_out_of_memory=has_kills)
        was_forwarded = os.WTERMSIG(status) in agent.passed_on
        _report_death(agent, code, None if was_forwarded else why, words, left=len(left))

    agent.notes.close()
    if agent.folder:  # the agent may have exited before it recorded the run
        run_json.note_end(agent.folder, code)
    return code


def _await_end(agent: Agent) -> int:
    """Forward signals until the agent exits; kill it if it does not stop. Returns its wait status.

    Signals are blocked and taken one by one, because a handler could interrupt another.
    """
    kill, handled = Deadline(), handled_signals()
    while (status := dict(processes.reap()).get(agent.pid)) is None:
        wait_s = min(kill.at - own_time.now(), limits.BEAT_S)
        came = processes.await_signal({*handled, QUERY, *agent.pausing}, wait_s)
        if came in agent.pausing:
            processes.suspend()
        elif came == QUERY and QUERY not in handled:  # --signals-to-handle can make it a stop
            agent.ask()
        elif came:
            agent.send(came)
            if came not in notices():  # after a notice, the run continues
                kill.set_within(agent.grace_s + limits.STOP_AGENT_S)
        elif kill.expire():
            agent.kill()  # first: a terminal that accepts nothing would hold up the warning
            warn("node agent: killed: it did not stop in time; it is stopped (SIGSTOP) or hangs")
    return status


def _report_death(
    agent: Agent, code: int, why: tuple[str, str] | None, words: Sequence[str], *, left: int
) -> None:
    """Report and record how the run ended, in place of an agent that was killed or has failed.

    `why` is the fault and the cause; None if this process sent the signal. SIGKILL is then silent.
    """
    failure = None
    agent.notes.setblocking(False)
    try:
        note = typed_json.parse(AgentNote, agent.notes.recv(65536))
    except (OSError, ValueError):  # the agent exited before the run began
        note = replace(agent.note, started=time.time())

    folder = note.folder or agent.folder
    if folder:
        run_json.note_end(folder, code, agent=agent.pid)

    if why:
        frames = words[-3:] if signal_name(code) else words[-4:-1]  # else the last is the cause
        host = socket.gethostname()
        failure = Failure(*why, code, host, note.node_rank, time.time(), frames=frames)
    elif code == processes.KILLED:  # the launcher is gone, or the agent did not stop in time
        return

    outcome = Outcome(
        code,
        failure,
        stopped=note.ranks,
        left=left,
        started=note.started,
        run_id=note.run_id,
        command=note.command,
    )
    report_outcome(outcome, agent.control, is_line_open=note.ranks > 0, folder=folder)


def _explain_death(
    code: int, words: Sequence[str], *, has_torch: bool, is_out_of_memory: bool
) -> tuple[str, str]:
    """Return the fault and the cause of an agent's exit that the agent did not report itself.

    `words` are the agent's last lines. `is_out_of_memory` means that the kernel killed a process.
    """
    if is_out_of_memory and code == processes.KILLED:
        fault, cause = explain_exit(code, out_of_memory=True)
        return fault, f"the node agent: {cause}"
    if by_signal := signal_name(code):
        when = "from outside this run" if has_torch else "while it imported torch"
        return "agent-killed", f"{by_signal} to the node agent, {when}"

    last = words[-1] if words else f"exit code {code}"
    cause = f"the node agent {'failed' if has_torch else 'could not import torch'}: {last}"
    fault = "agent-killed" if has_torch else "env-missing"
    rule = find_rule("\n".join(words))
    if rule and rule.kind == Kind.CAUSE and (has_torch or rule.fault in EXHAUSTED):
        fault = rule.fault
    return fault, cause
