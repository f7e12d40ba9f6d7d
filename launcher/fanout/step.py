"""The step of a SLURM job that runs the agents: start srun, act on signals, end it.

The agents report how the run ended through srun's stdout, in lines that begin with a token; the
launcher prints the failure block once srun has ended. srun waits without limit for a node that it
has lost, so the launcher ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distributed import hostlist
from distributed.errors import STOPPED
from distributed.job import job_id
from distributed.stop_signals import NOTICE, QUERY, STOP_SIGNALS, Interrupts, handled_signals
from launcher import own_time, processes
from launcher.agent.control import MESSAGES, Done, Membership
from launcher.agent.deadline import Deadline
from launcher.failure import Failure
from launcher.failure_block import Outcome, print_outcome, print_resume
from launcher.fanout.ending import NodeResult, conclude
from launcher.fanout.protocol import Answers, Exit
from launcher.plan.plan import Plan
from launcher.plan.slurm import ask_squeue, in_batch_script
from launcher.record.run_json import ASKED, NOTICED
from launcher.terminal import Terminal
from launcher.text import short_host_name
from launcher.typed_json import MessageError
from launcher.wire import limits
from launcher.wire.messages import KILLED

LIMIT = "TimeLimit"  # squeue's reason
MOST_RESTARTS = 3  # in a row that gain no checkpoint
Srun = subprocess.Popen[bytes]


def start(command: Sequence[str], directory: Path, stdout: int | None = None) -> Srun:
    """Start a command in a session of its own; it gets SIGTERM when this process ends.

    A terminal's Ctrl-C would make srun kill the step, with nothing saved.
    """
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, QUERY, *processes.WAKING})
        processes.die_with_parent(parent, signal.SIGTERM)

    return subprocess.Popen(  # this process has one thread
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,
        preexec_fn=prepare,
    )


class Output:
    """What comes on srun's stdout: the agents' messages are taken out of the ranks' output."""

    def __init__(self, srun: Srun, token: str) -> None:
        self.reports: dict[int, Outcome | Done] = {}  # by the node rank with which each was started
        self.membership: Membership | None = None  # the nodes that the run goes on with; None: all
        self._answers = Answers(token, _read_piece)
        self._pieces: dict[int, bytes] = {}
        self._screen = Terminal(1)
        assert srun.stdout is not None
        self._fd = srun.stdout.fileno()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended: the first node that tells it knows best, unless it only stopped."""
        here = [self.reports[rank] for rank in sorted(self.reports) if self._takes_part(rank)]
        outcomes = [outcome for outcome in here if isinstance(outcome, Outcome)]
        first = outcomes[0] if outcomes else None
        if first and first.code and not first.failure:
            return next((outcome for outcome in outcomes if outcome.failure), first)
        return first

    @property
    def begun(self) -> int:
        """How many nodes' parts have begun."""
        return len(self._pieces)

    @property
    def unreported(self) -> set[int]:
        """The nodes whose part began and reported no end."""
        return {*filter(self._takes_part, self._pieces)} - self.reports.keys()

    def _takes_part(self, rank: int) -> bool:
        return self.membership is None or rank in self.membership.nodes

    def close(self) -> None:
        """Show what has come, up to the end of a line."""
        self._thread.join(limits.DRAIN_S)
        self._screen.drain(limits.DRAIN_S)
        if self._screen.open_by is self:
            print(file=sys.stderr)

    def _follow(self) -> None:
        data = b"."
        while data:
            data = os.read(self._fd, 65536)
            text, pieces = self._answers.read(data)
            for rank, piece in pieces:
                self._pieces[rank] = self._pieces.get(rank, b"") + piece
                try:
                    message = MESSAGES.read(self._pieces[rank])
                except MessageError:  # not whole yet
                    continue
                self._pieces[rank] = b""
                if isinstance(message, Outcome | Done):
                    self.reports[rank] = message
                elif self.membership is None or message.attempt >= self.membership.attempt:
                    self.membership = message
            if pieces:
                os.kill(os.getpid(), signal.SIGCHLD)  # wakes run_step()
            if text:
                self._screen.show(text, self)


def _read_piece(text: bytes) -> tuple[int, bytes]:
    """Return the node rank and a piece of its message: srun mixes the nodes' long lines."""
    rank, _, piece = text.partition(b" ")
    if not rank.isdigit():
        raise MessageError("no node rank")
    return int(rank), piece


def run_step(plan: Plan, command: Sequence[str]) -> int:
    """Run the step to its end, and act on signals; returns the run's exit code."""
    handled = handled_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*handled, QUERY, *processes.WAKING})
    asked: list[int] = [NOTICE] if signal.sigtimedwait({NOTICE}, 0) else []
    if asked and plan.checkpoint_dir is not None and requeue(plan):
        return STOPPED
    (plan.folder / NOTICED).unlink(missing_ok=True)  # of an earlier start
    srun = start(command, plan.directory, stdout=None if plan.engine else subprocess.PIPE)
    output = None if plan.engine else Output(srun, os.environ["LAUNCH_TOKEN"])
    started = time.time()
    await_end(plan, srun, output, asked)
    code, outcome = processes.shell_code(srun.returncode), None
    if output is not None:
        output.close()
        is_killed = code >= KILLED  # srun's is the highest of its tasks'
        outcome = find_outcome(plan, output, started) if is_killed and not asked else output.outcome
    if outcome is not None:
        outcome = as_slurm_ended(outcome)
        code = outcome.code
        asked.append(outcome.signum)  # scancel may have sent it to the ranks
    # 128 + SIGUSR1: the notice came before there was anything to save.
    has_saved = code == STOPPED or (code == 128 + NOTICE and plan.checkpoint_dir is not None)
    comes_back = NOTICE in asked and has_saved
    if outcome is not None:  # first, because SLURM ends a job that it requeues
        shown = replace(outcome, command="") if comes_back else outcome
        print_outcome(shown, sys.stderr, plan.folder)
    if comes_back and not requeue(plan) and outcome is not None:
        print_resume(outcome, sys.stderr)
    if srun.returncode == -signal.SIGKILL and code and in_batch_script(os.environ):
        signal.sigtimedwait(handled, limits.REQUEUE_S)
    return code


def await_end(plan: Plan, srun: Srun, output: Output | None, asked: list[int]) -> None:
    """Wait for srun's end; adds the signals that ask for the run's end to `asked`."""
    handled, interrupts, begun, end = handled_signals(), Interrupts(), 0, Deadline()
    while srun.poll() is None:
        if output and output.outcome:
            may_go_on = plan.min_nodes and output.unreported  # without a node that has ended
            end.set_within(limits.DECIDE_S + plan.grace_s if may_go_on else limits.SRUN_END_S)
        else:
            end = Deadline()
        if output and output.begun > begun:  # a signal before that may not have reached it
            begun = output.begun
            for signum in asked:
                pass_on(signum, plan, srun)
        left_s = min(end.at - own_time.now(), limits.BEAT_S)
        came = processes.await_signal({*handled, QUERY}, left_s)
        if end.take():
            srun.kill()
            srun.wait()
        elif came == QUERY and QUERY not in handled:
            with contextlib.suppress(OSError):
                (plan.folder / ASKED).touch()  # asks where all ranks are
        elif came is not None:
            asked.append(came)
            if came == signal.SIGINT and interrupts.is_second():
                srun.terminate()  # which kills them
            else:
                pass_on(came, plan, srun)


def find_outcome(plan: Plan, output: Output, started: float) -> Outcome | None:
    """Return the outcome of a step of which a task was killed: as told, else the killed agent's."""
    outcome = output.outcome
    if not output.unreported or (outcome and outcome.failure):
        return outcome
    killed, well = Exit(KILLED, 0), Exit(0, 0)  # which only stopped
    nodes = [
        NodeResult(host, killed if rank in output.unreported else well, output.reports.get(rank))
        for rank, host in enumerate(hostlist.expand(plan.hosts))
    ]
    return conclude(nodes, plan, started=started, stopped_by=None)


def as_slurm_ended(outcome: Outcome) -> Outcome:
    """Return the outcome with SIGTERM's code, if SLURM ended the run and no rank saved.

    A time limit is reported, because nobody asked for it, unlike scancel.
    """
    is_stopped = outcome.failure is None and outcome.code not in (0, STOPPED)
    if not is_stopped or outcome.signum == signal.SIGINT:
        return outcome
    code, now = 128 + signal.SIGTERM, time.time()
    if (ask_squeue(f"--job={job_id(os.environ)}", "--format=%r") or "").strip() == LIMIT:
        cause = "SLURM ended the job at its time limit, before the ranks had saved and left"
        failure = Failure("time-limit", cause, code, short_host_name(), -1, now)
        return replace(outcome, code=code, failure=failure)
    is_cancelled = outcome.signum == signal.SIGTERM and in_batch_script(os.environ)
    return replace(outcome, code=code) if is_cancelled else outcome


def pass_on(signum: int, plan: Plan, srun: Srun) -> None:
    """Send every task of the step SIGTERM, or a notice; a second one changes nothing there.

    SLURM signals all processes of a task, and ranks that do not handle a notice would die of it:
    the agents, who know, find it in a file.
    """
    if signum != NOTICE:
        threading.Thread(target=stop_step, args=(plan.run_id, srun), daemon=True).start()
        return
    if not plan.engine:
        with contextlib.suppress(OSError):  # a full disk
            (plan.folder / NOTICED).touch()
            return
    srun.send_signal(NOTICE)  # srun forwards it to the tasks that it knows to have started


def stop_step(name: str, srun: Srun) -> None:
    """Send SIGTERM to every task of our step, so that the ranks can save; srun forwards no TERM."""
    listed = ask_squeue("--steps", f"--job={os.environ['SLURM_JOB_ID']}", "--format=%i %j")
    if listed is None:
        srun.send_signal(NOTICE)  # works without SLURM's controller
        return
    steps = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [name]]
    if steps:
        subprocess.run(["scancel", "--quiet", "--signal=TERM", *steps])  # they may have ended
    else:
        srun.terminate()  # the step has not started yet


def requeue(plan: Plan, environ: Mapping[str, str] = os.environ) -> bool:
    """Put the job back into the queue, where SLURM starts it again under its id.

    After three restarts in a row without a new checkpoint the job ends instead. Returns False if
    SLURM refuses. In a chain of jobs the next one resumes the run.
    """
    if environ.get("CHAIN"):
        return True
    if plan.checkpoint_dir is not None:
        latest = plan.directory / plan.checkpoint_dir / plan.run_id / "latest"
        record = plan.folder / "requeues"
        record.parent.mkdir(parents=True, exist_ok=True)
        newest = os.readlink(latest) if latest.is_symlink() else "none"
        with record.open("a") as file:
            print(newest, file=file)
        last = record.read_text().splitlines()[-MOST_RESTARTS - 1 :]
        if last == [newest] * (MOST_RESTARTS + 1):
            cause = f"{MOST_RESTARTS} restarts made no progress; the job is not requeued"
            print(f"{plan.program}: {cause}", file=sys.stderr)
            return True
    # SLURM ends a job that it requeues by SIGTERM, which is blocked here and in scontrol, and only
    # KillWait later by SIGKILL: there is time to say so.
    job = job_id(environ)
    is_back = subprocess.run(["scontrol", "requeue", job]).returncode == 0
    if is_back:
        print(f"requeued job {job}; it resumes when SLURM starts it again", file=sys.stderr)
    return is_back
