"""Fan-out through srun, from a job's batch script or from salloc's shell.

One step runs the far side (far_side.py) on each node; its stdin goes to all of them. Each agent
takes its node rank from the step's variables. With LAUNCHER=srun, the far sides only check the
nodes; then another step starts one task for each rank.
"""

import math
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from signal import Signals

from distributed import hostlist
from distributed.errors import REFUSED, STOPPED
from distributed.job import job_id
from distributed.stop_signals import NOTICES, QUERY, handled_signals
from launcher import processes
from launcher.failure_block import print_outcome, print_resume
from launcher.fanout.fanout import Fanout
from launcher.fanout.launch_end import LaunchEnd, as_slurm_ended
from launcher.fanout.nodes import Node, far_side_command, wait_for
from launcher.fanout.requeue import (
    block_signals,
    choose_requeue,
    leave_if_stopped,
    requeue_after_notice,
)
from launcher.fanout.steps import (
    Step,
    agent_variables,
    kill_options,
    node_step,
    step_command,
    stop_step,
)
from launcher.fanout.swap import exclude_ill
from launcher.interrupt import code_for_shell
from launcher.outcome import Outcome
from launcher.plan.plan import BeReady, Plan
from launcher.plan.slurm import has_ended, in_batch_script
from launcher.preflight.compare import Preflight
from launcher.processes import KILLED
from launcher.text import PlanError, count, warn
from launcher.wire import limits
from launcher.wire.messages import Exit, Fault, Hello, Report, Start, StopRequest

_TERMINATED = 128 + signal.SIGTERM
_CANNOT_START = (REFUSED, *range(125, 128))  # the exit codes of a broken Python, and of env


def run(plan: Plan, be_ready: BeReady) -> int:
    """Start the run on all nodes of the job, and wait for its end. Returns the run's exit code.

    Returns REFUSED if a check fails, and 0 after a dry run, which also checks the nodes in a step
    of the job, but then prints a command. Raises PlanError or Refused if nothing was started.
    """
    if has_ended(plan.job):
        cause = f"SLURM_JOB_ID is {plan.job}, a job that has ended"
        raise PlanError(f"{cause}; unset the SLURM_ variables, or salloc again")
    if plan.engine and not plan.is_ours:
        warn(
            f"{plan.program}: warning: LAUNCHER=srun does not set RANK; in "
            f"{' '.join(plan.words[:2])}, call init_distributed(), or read SLURM's variables"
        )
    return SrunFanout(plan).run(be_ready)


class SrunFanout(Fanout[Node]):
    """A run on the nodes of a SLURM job."""

    def __init__(self, plan: Plan) -> None:
        self.everyone = list[Node]()  # by node rank
        plan = replace(plan, environ={**plan.environ, **agent_variables(plan)})
        super().__init__(plan, self.everyone, [])
        self.early = list[Signals]()  # notices that came before the agents started
        self.end_at = math.inf  # when to kill srun, which waits for lost nodes

    def begin_step(self, command: Sequence[str], nodes: Sequence[Node]) -> None:
        show = self.terminals.make_show(b"")
        self.step = Step(self.loop, command, self.token, nodes, show)
        self.ways = [self.step]

    def await_end(self, seconds: float) -> None:
        """Wait until srun has ended, but only for so long."""
        until = time.monotonic() + seconds
        while self.step.code is None and time.monotonic() < until:
            self.turn(until)

    # --- the preflight ------------------------------------------------------------------------

    def reach(self) -> None:
        """Start the far sides in a step, have them check their nodes, and wait for the reports.

        Waits for up to STEP_PREFLIGHT_S, or for STEP_IMAGE_S if the step loads an image: srun
        itself gives up on a silent node only after several of SLURM's timeouts.
        """
        plan = self.plan
        limit_s = limits.STEP_IMAGE_S if plan.step_options() else limits.STEP_PREFLIGHT_S
        until = time.monotonic() + limit_s
        self.everyone[:] = map(Node, hostlist.expand(plan.hosts))

        # RUN_ID is for `--stacks`, which finds ranks by it.
        inside = ["env", f"--chdir={plan.root}", f"RUN_ID={plan.run_id}"]
        far_side = [*inside, *far_side_command(plan, "--step")]
        step = node_step(plan, ["--input=all", "--wait=0", *kill_options(plan)], far_side)
        self.begin_step(["env", f"LAUNCH_TOKEN={self.token}", *step], self.everyone)

        self.await_answers(Hello, until)
        if all(node.answer(Hello) for node in self.everyone):
            self.step.ask(plan.request(meeting_size=plan.num_agents))
            self.await_answers(Report, until)

    def await_answers(self, kind: type, until: float) -> None:
        """Wait for an answer of each node. Warn about nodes that keep the others waiting."""
        wait_for(kind, self.everyone, self.turn, time.monotonic() + limits.STEP_NAMING_S)
        awaited = [node for node in self.everyone if node.code is None]
        late = [node.name for node in awaited if not node.answer(kind)]
        if 0 < len(late) < len(awaited):  # without any, the step may wait for the job's other steps
            self.say(
                f"warning: no answer to the preflight from {', '.join(late)} "
                f"for {limits.STEP_NAMING_S:g} s; waiting [node-missing]"
            )
        wait_for(kind, self.everyone, self.turn, until)

    def explain_silences(self) -> Mapping[int, Fault]:
        """End the step, and return why nodes have not reported.

        A node that has not said hello keeps the others waiting. Exits if SLURM ended the step.
        """
        plan = self.plan
        self.disconnect()
        code = processes.shell_code(self.step.code or 0)
        awaited = Report if all(node.answer(Hello) for node in self.everyone) else Hello
        silent = [rank for rank, node in enumerate(self.everyone) if not node.answer(awaited)]
        if self.step.failed:  # with it, srun ends the others
            silent = self.step.failed[:1]
            code = self.everyone[silent[0]].code or code
        elif code == _TERMINATED:  # by SLURM, or by disconnect()
            self.drain()
            leave_if_stopped(plan)

        names = ",".join(self.everyone[rank].name for rank in silent)
        cause = f"no answer to the preflight (srun's exit code is {code}, see above)"
        fault = Fault("node-missing", cause, f"try srun --nodelist={names} hostname")
        if code in _CANNOT_START or (plan.container and 0 < code < KILLED):
            where = plan.container or plan.directory
            cure = f"make {where}, {plan.root} and {plan.python} available there"
            fault = Fault("env-missing", "the preflight did not start, see above", cure)
        return dict.fromkeys(silent, fault)

    def swap(self, ill: Collection[int]) -> tuple[Plan, list[str]] | None:
        return exclude_ill(self.plan, ill)

    def disconnect(self) -> None:
        """End the step: the far sides exit, and srun kills what hangs."""
        self.step.close_input()
        self.await_end(limits.SRUN_END_S)
        self.step.terminate()
        self.await_end(limits.CONTROL_END_S)
        self.step.terminate(signal.SIGKILL)
        self.await_end(limits.KILL_S)

    # --- the run ------------------------------------------------------------------------------

    def run_checked(
        self, reports: Sequence[Report], preflight: Preflight, be_ready: BeReady
    ) -> int:
        """Do what every fan-out does. A dry run ends here, and so does a job that SLURM takes back.

        Returns STOPPED if a notice came first and the job is requeued.
        """
        plan, first = self.plan, reports[0]
        command = step_command(plan, nproc=first.nproc, port=first.port)
        self.show_plan(reports, preflight)
        if plan.is_dry_run:
            self.disconnect()
            self.drain()
            print(
                f"# job {job_id(plan.environ)}, {count(plan.num_nodes, 'node')}: ranks "
                f"0-{plan.num_nodes * first.nproc - 1}, rendezvous {plan.master_addr}:{first.port}"
            )
            print(plan.shell_line(command))
            return 0

        self.drain()
        if self.step.code is not None:
            leave_if_stopped(plan)
        be_ready()
        if self.early and plan.checkpoint_dir:
            block_signals()
            if requeue_after_notice(plan):
                self.disconnect()
                return STOPPED
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled_signals())
        return self.run_ranks(command) if plan.engine else self.run_agents(reports)

    def start_agents(self, reports: Sequence[Report]) -> None:
        """Have all far sides start their agents, and pass on the notices that came before."""
        plan, first = self.plan, reports[0]
        command = plan.agent_command(nproc=first.nproc, port=first.port, node_rank=None)
        for node in self.everyone:
            node.note_start()
        self.step.ask(Start(command, plan.run_variables(), plan.directory))
        for signum in self.early:
            self.forward_signal(signum)

    def run_ranks(self, command: Sequence[str]) -> int:
        """Start a task for each rank, without agents, and wait for their end. Returns the code."""
        self.disconnect()
        self.everyone.clear()
        self.asked += self.early
        self.started = time.time()
        self.begin_step(command, [])
        self.step.close_input()
        self.await_end(math.inf)
        return self.report_end()

    def turn(self, until: float) -> None:
        """Do what every fan-out does. Once all nodes have ended or are gone, srun must end, too."""
        super().turn(min(until, self.end_at))
        now = time.monotonic()
        rest = [node for node in self.everyone if not node.is_left and not node.answer(Exit)]
        if rest != self.everyone and all(now - node.heard > limits.QUIET_S for node in rest):
            end_s = limits.for_nodes(limits.SRUN_END_S, len(self.everyone))
            self.end_at = min(self.end_at, now + end_s)
        if now >= self.end_at:
            self.step.terminate(signal.SIGKILL)

    def handle_silence(self) -> None:
        """Do what every fan-out does, unless the agents decide, or SLURM may have suspended all."""
        now = time.monotonic()
        awaited = self.silence.awaited
        if self.nodes.can_change or all(now - node.heard > 2 * limits.BEAT_S for node in awaited):
            for node in awaited:
                node.forgive_silence()
        super().handle_silence()

    def send(self, request: StopRequest, nodes: Sequence[Node]) -> None:
        """Send all nodes, or one, a notice or a query, or SIGTERM for any other signal.

        A second Ctrl-C kills the tasks. With LAUNCHER=srun, signal the tasks themselves.
        """
        signum = request.signum
        if signum == signal.SIGINT and self.interrupts.record_and_check():
            self.step.terminate()
        elif not self.plan.engine:
            only = self.everyone.index(nodes[0]) if len(nodes) == 1 else -1
            is_stop = signum not in (*NOTICES, QUERY)
            self.step.ask(StopRequest(signal.SIGTERM if is_stop else signum, only))
        elif signum in NOTICES:
            self.step.terminate(signum)  # srun forwards it to the tasks that have started
        elif signum != QUERY:
            threading.Thread(target=stop_step, args=(self.plan, self.step), daemon=True).start()

    def stop_early(self, signum: Signals) -> None:
        """Keep a notice until the agents start; exit after another signal."""
        if signum in NOTICES:
            self.early.append(signum)
        else:
            super().stop_early(signum)

    # --- the end ------------------------------------------------------------------------------

    def report_end(self) -> int:
        """End the step, print how the run ended, and requeue the job if it is to resume.

        Returns the run's exit code, INTERRUPTED after a Ctrl-C.
        """
        plan = self.plan
        if self.step.code is None:
            self.disconnect()
        code = processes.shell_code(self.step.code or 0)
        outcome = self.find_outcome(code)
        asked: list[int] = [*self.asked]
        if outcome:
            code = outcome.code
            asked.append(outcome.signum)  # scancel may have sent the signal directly to the ranks

        self.drain()
        if self.step.code == -signal.SIGKILL:
            stop_step(plan, self.step)  # what srun has left
        block_signals()
        requeue_job = choose_requeue(plan, code, asked, outcome)
        if outcome:  # before the requeue, which ends this job
            shown = replace(outcome, command="") if requeue_job else outcome  # SLURM resumes it
            print_outcome(shown, sys.stderr, plan.folder)
        if requeue_job and not requeue_job(plan) and outcome:  # the user has to resume the run
            print_resume(outcome, sys.stderr)

        # A node was lost: SLURM may requeue the job with a signal, unless this script exits.
        if self.step.code == -signal.SIGKILL and code and in_batch_script(plan.environ):
            signal.sigtimedwait(handled_signals(), limits.REQUEUE_S)
        return code_for_shell(code, asked)

    def find_outcome(self, code: int) -> Outcome | None:
        """Return the outcome of the run; None if nothing was reported, lost or killed.

        Asks scontrol. `code` is srun's, the highest of its tasks. If a signal other than SIGTERM
        ended one, nodes without a reported exit count as killed, but not after a signal that was
        passed on, nor if an outcome was reported: then srun may have been killed because tasks took
        long to exit.
        """
        plan = self.plan
        has_outcome = any(node.answer(Outcome) for node in self.nodes.current)
        is_killed = code >= KILLED and code != _TERMINATED and not (self.asked or has_outcome)
        parts = self.nodes.parts(unreported=KILLED if is_killed else 0)
        if not any(part.told or part.code or part.lost for part in parts):
            return None
        stopped_by = next(iter(self.asked), 0)
        return as_slurm_ended(LaunchEnd(plan, parts, self.started, stopped_by).outcome(), plan)
