"""The step of a SLURM job that runs the agents: start srun, handle signals, end the step.

Through srun's stdout, the agents report how the run ended, in lines that begin with a token.
Another engine reports nothing. srun would wait for a lost node: the launcher ends it.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from distributed import hostlist
from distributed.errors import STOPPED
from distributed.job import job_id
from distributed.stop_signals import NOTICES, QUERY, STOP_SIGNALS, Interrupts, handled_signals
from launcher import own_time, processes
from launcher.failure_block import print_outcome, print_resume
from launcher.fanout.launch_end import LaunchEnd, NodePart, as_slurm_ended
from launcher.interrupt import code_for_shell
from launcher.outcome import Outcome
from launcher.own_time import Deadline
from launcher.plan import slurm
from launcher.plan.plan import Plan
from launcher.plan.slurm import ask_squeue, in_batch_script
from launcher.processes import KILLED
from launcher.record.run_json import ASKED, NOTICED
from launcher.terminal import Terminal
from launcher.text import open_own, warn
from launcher.wire import limits
from launcher.wire.launcher_link import Answers
from launcher.wire.messages import Exit, Membership

MOST_STARTS = 4  # in a row without a new checkpoint
Srun = subprocess.Popen[bytes]


def start_srun(plan: Plan, command: Sequence[str], stdout: int | None) -> Srun:
    """Start srun in a new session; it gets SIGTERM when this process ends. Does not wait for it.

    In our own session, Ctrl-C would make srun kill the step before anything is saved. `stdout` is
    as for Popen: None means that srun prints to this process's stdout.
    """
    parent = os.getpid()

    def prepare() -> None:  # a child inherits the signals that this process blocks
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, QUERY, *processes.WAKING})
        processes.leave_terminal(parent, signal.SIGTERM)

    return subprocess.Popen(  # preexec_fn is safe: this process has one thread
        command,
        cwd=plan.directory,
        env=plan.environ,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        preexec_fn=prepare,
    )


class Output:
    """Reads srun's stdout in a thread: shows the ranks' output, and keeps the agents' messages."""

    def __init__(self, srun: Srun, token: str) -> None:
        self.outcomes = dict[int, Outcome]()  # by the node rank that each node started with
        self.exits = dict[int, int]()  # the agents' exit codes, by the same
        self.membership: Membership | None = None  # the nodes that the run still has; None: all
        self.begun = set[int]()  # the nodes that have sent anything
        self._answers = Answers(token)
        self._news = deque[tuple[int, object]]()  # filled by the thread
        self._screen = Terminal(1)
        assert srun.stdout
        self._fd = srun.stdout.fileno()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def receive(self) -> None:
        """Take in what the agents have reported since the last call."""
        while self._news:
            rank, message = self._news.popleft()
            self.begun.add(rank)
            match message:
                case Outcome():
                    self.outcomes[rank] = message
                case Exit():
                    self.exits[rank] = message.code
                case Membership() if (  # a lost node rank 0's may arrive after its successor's
                    self.membership is None or message.attempt >= self.membership.attempt
                ):
                    self.membership = message

    @property
    def has_outcome(self) -> bool:
        """Whether a node that still takes part has reported how the run ended."""
        return any(map(self._takes_part, self.outcomes))

    @property
    def unreported(self) -> set[int]:
        """The nodes that started, still take part, and have not reported an exit."""
        return {*filter(self._takes_part, self.begun)} - self.exits.keys()

    def parts(self, hosts: str, code: int) -> list[NodePart]:
        """Return how the part of each node ended, by node rank, then of the spares.

        One that started but reported no exit gets `code`. `hosts` is SLURM's list of the nodes.
        """
        ends = self.exits | dict.fromkeys(self.unreported, code)
        names = hostlist.expand(hosts)
        ranks = range(len(names)) if self.membership is None else self.membership.nodes
        return [NodePart(names[rank], ends.get(rank, 0), self.outcomes.get(rank)) for rank in ranks]

    def _takes_part(self, rank: int) -> bool:
        return self.membership is None or rank in self.membership.nodes

    def close(self) -> None:
        """Take in the last reports, and show the last output; wait up to DRAIN_S for each."""
        self._thread.join(limits.DRAIN_S)
        self.receive()
        self._screen.drain(limits.DRAIN_S)
        if self._screen.open_by is self:
            print(file=sys.stderr)

    def _follow(self) -> None:
        data = b"."  # anything but the end
        while data:
            data = os.read(self._fd, 65536)
            text, told = self._answers.read(data)
            self._news.extend(told)
            if told:
                os.kill(os.getpid(), signal.SIGCHLD)  # wakes run_step()
            if text:
                self._screen.show(text, self)


def run_step(plan: Plan, command: Sequence[str]) -> int:
    """Run the step to its end, report it, and requeue the job if it is to resume.

    Returns the run's exit code, INTERRUPTED after a Ctrl-C. If a notice came first, returns STOPPED
    without starting the step, if the job can be requeued. Leaves the handled signals blocked.
    """
    handled = handled_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*handled, QUERY, *processes.WAKING})

    early = signal.sigtimedwait(NOTICES, 0)
    asked = [early.si_signo] if early else []  # the signals that ask for a stop
    if asked and plan.checkpoint_dir and requeue_after_notice(plan):
        return STOPPED
    for name in NOTICED.values():
        (plan.folder / name).unlink(missing_ok=True)  # of an earlier start

    srun = start_srun(plan, command, None if plan.engine else subprocess.PIPE)
    output = None if plan.engine else Output(srun, plan.environ["LAUNCH_TOKEN"])
    started = time.time()
    asked = await_end(plan, srun, output, asked)

    code = processes.shell_code(srun.returncode)
    outcome = None
    if output:
        output.close()
        outcome = find_outcome(plan, output, code, started, asked)
    if outcome:
        code = outcome.code
        asked.append(outcome.signum)  # scancel may have sent the signal directly to the ranks

    requeue_job = choose_requeue(plan, code, asked, outcome)
    if outcome:  # before the requeue, which ends this job
        shown = replace(outcome, command="") if requeue_job else outcome  # SLURM resumes it
        print_outcome(shown, sys.stderr, plan.folder)
    if requeue_job and not requeue_job(plan) and outcome:  # the user has to resume the run
        print_resume(outcome, sys.stderr)

    # A node was lost: SLURM may requeue the job itself, with a signal, unless this script exits.
    if srun.returncode == -signal.SIGKILL and code and in_batch_script(plan.environ):
        signal.sigtimedwait(handled, limits.REQUEUE_S)
    return code_for_shell(code, asked)


def choose_requeue(
    plan: Plan, code: int, asked: Sequence[int], outcome: Outcome | None
) -> Callable[[Plan], bool] | None:
    """Return the function that requeues the job, after a preemption or a notice; otherwise None.

    Asks SLURM whether it preempts the job.
    """
    has_failed = outcome and outcome.failure
    is_stopped = code in (STOPPED, 128 + signal.SIGTERM) and not has_failed
    # SLURM requeues a preempted job only if it is still running when its grace time ends.
    if is_stopped and "REQUEUE" in slurm.preempt_mode(plan.environ):
        return requeue

    # 128 + SIGUSR1: no rank had saved. With checkpoints, the job can start again all the same.
    has_saved = code == STOPPED or (code - 128 in NOTICES and plan.checkpoint_dir)
    has_notice = not {*asked}.isdisjoint(NOTICES)
    return requeue_after_notice if has_saved and has_notice else None


def requeue_after_notice(plan: Plan) -> bool:
    """Record the newest checkpoint. Requeue the job, unless its last starts had the same one.

    Returns False if the user has to resume: the job was cancelled, or SLURM rejects the request.
    """
    job = job_id(plan.environ)
    if slurm.chain_of(plan.environ):
        return True  # see requeue()
    if slurm.has_ended(job):  # scancel came after the notice
        return False

    newest = record_newest(plan)
    if len(newest) == MOST_STARTS and len({*newest}) == 1:
        warn(f"{plan.program}: {MOST_STARTS - 1} restarts made no progress; not requeuing the job")
        return True
    if not requeue(plan):
        return False

    limit = slurm.ask_scontrol("job", job).get("TimeLimit", "")
    if re.match("00:0[0-3]:", limit):  # a notice may come 60 s early
        cause = f"the notice comes at once, or nearly so, if the time limit is {limit}"
        cure = "ask for more --time, or for a later notice: --signal=B:USR1@30"
        warn(f"{plan.program}: warning: {cause}; {cure} [time-limit]")
    return True


def requeue(plan: Plan) -> bool:
    """Put the job back into the queue, and say so; SLURM starts it again under the same id.

    Returns False if SLURM rejects the request. Does nothing in a chain: the next job resumes.
    """
    if slurm.chain_of(plan.environ):
        return True
    job = job_id(plan.environ)
    # SLURM ends the requeued job with SIGTERM, which is blocked, and SIGKILL after KillWait.
    is_back = subprocess.run(["scontrol", "requeue", job]).returncode == 0
    if is_back:
        warn(f"requeued job {job}; it resumes when SLURM starts it again")
    return is_back


def record_newest(plan: Plan) -> list[str]:
    """Add the newest checkpoint's name to a file in the run's folder, which has one per start.

    Returns the last MOST_STARTS; none if that fails, or if no folder of checkpoints is known.
    """
    if not plan.checkpoint_dir:
        return []
    folder = plan.directory / plan.checkpoint_dir / plan.run_id
    steps = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    newest = max(map(int, filter(str.isdecimal, steps)), default=0)
    record = plan.folder / "requeues"
    with contextlib.suppress(OSError):  # a full disk is no reason not to requeue the job
        plan.folder.mkdir(parents=True, exist_ok=True)
        with open_own(record, "a") as file:
            print(f"step-{newest}", file=file)
        return record.read_text().splitlines()[-MOST_STARTS:]
    return []


def await_end(plan: Plan, srun: Srun, output: Output | None, early: Sequence[int]) -> list[int]:
    """Wait for srun to end, and forward signals. Returns those that asked for a stop.

    They begin with those that came `early`, before srun was started. SIGQUIT shows all stacks. Ends
    srun on a second Ctrl-C, or if it hangs after the run's end.
    """
    asked = [*early]
    handled = handled_signals()
    interrupts = Interrupts()
    begun = 0
    end = Deadline()

    while srun.poll() is None:
        if output:
            output.receive()
        if output and output.has_outcome:
            may_continue = plan.min_nodes and output.unreported  # without the ended nodes
            end_s = limits.for_nodes(limits.SRUN_END_S, plan.num_agents)
            end.set_within(limits.DECIDE_S + plan.grace_s if may_continue else end_s)
        else:
            end = Deadline()  # the run may continue without the nodes that have reported its end

        if output and len(output.begun) > begun:  # a new node may have missed signals
            begun = len(output.begun)
            for signum in asked:
                forward_signal(signum, plan, srun)

        left_s = min(end.at - own_time.now(), limits.BEAT_S)
        came = processes.await_signal({*handled, QUERY}, left_s)
        if end.expire():
            srun.kill()
            srun.wait()
        elif came == QUERY and QUERY not in handled:
            with contextlib.suppress(OSError):
                open_own(plan.folder / ASKED, "a").close()  # asks for the stacks of all ranks
        elif came is not None:
            asked.append(came)
            if came == signal.SIGINT and interrupts.record_and_check():
                srun.terminate()  # which kills the ranks
            else:
                forward_signal(came, plan, srun)
    return asked


def find_outcome(
    plan: Plan, output: Output, code: int, started: float, asked: Sequence[int]
) -> Outcome | None:
    """Return the outcome of a step; None if no agent reported one or failed, and none was killed.

    Asks scontrol. `code` is srun's, the highest of its tasks. If it is 137 or more, nodes without a
    reported exit count as killed, but not after a signal in `asked`, nor if an outcome was
    reported: then await_end() may have killed srun, because tasks took long to exit.
    """
    is_killed = code >= KILLED and not (asked or output.has_outcome)
    parts = output.parts(plan.hosts, KILLED if is_killed else 0)
    if not any(part.told or part.code for part in parts):
        return None
    first_signal = next(iter(asked), 0)
    return as_slurm_ended(LaunchEnd(plan, parts, started, first_signal).outcome(), plan)


def forward_signal(signum: int, plan: Plan, srun: Srun) -> None:
    """Send every task of the step a notice, or SIGTERM for any other signal, without waiting.

    SLURM signals all processes of a task, and a notice would kill ranks that do not handle it. So
    the agents, which know these ranks, get it through a file. They ignore a second SIGTERM.
    """
    if signum not in NOTICES:
        threading.Thread(target=stop_step, args=(plan, srun), daemon=True).start()
        return
    if not plan.engine:
        with contextlib.suppress(OSError):  # a full disk: try it through srun
            open_own(plan.folder / NOTICED[signum], "a").close()
            return
    srun.send_signal(signum)  # srun forwards the notice to the tasks that it knows have started


def stop_step(plan: Plan, srun: Srun) -> None:
    """Send SIGTERM to every task of our step, so that ranks can save. Waits for SLURM's answers."""
    listed = ask_squeue("--steps", f"--job={plan.job}", "--format=%i %j")
    if listed is None:
        srun.send_signal(NOTICES[0])  # unlike SIGTERM, srun forwards it, without the controller
        return
    steps = re.findall(rf"^(\S+) {re.escape(plan.run_id)}$", listed, re.MULTILINE)
    if steps:
        subprocess.run(["scancel", "--quiet", "--signal=TERM", *steps])  # the steps may have ended
    else:
        srun.terminate()  # the step has not started yet
