"""The steps of a SLURM job: their srun commands, and how a step is asked to stop."""

import re
import signal
import subprocess
from collections.abc import Sequence

from distributed import hostlist
from distributed.environment import tasks_per_node
from distributed.stop_signals import NOTICES
from launcher import handshake, importable
from launcher.fanout.loop import Child, Loop, Show
from launcher.fanout.nodes import Node, Way
from launcher.plan.plan import Plan
from launcher.plan.slurm import ask_squeue
from launcher.text import PlanError

KILL_ALL = "--kill-on-bad-exit=1"
# What srun prints about tasks that have failed; without it, they would seem to be late.
_FAILED = re.compile(rb"srun: error: \S+: tasks? (\d+(?:[,-]\d+)*): Exited with exit code (\d+)")


class Step(Way):
    """A step of the job: srun, and the programs that it runs. They end if the launcher ends."""

    def __init__(
        self,
        loop: Loop,
        command: Sequence[str],
        token: str,
        nodes: Sequence[Node],  # by node rank, each with one program
        show: Show,
    ) -> None:
        self.failed = list[int]()  # the node ranks of tasks that failed before the start
        self._nodes = [*nodes]
        super().__init__(loop, command, token, show, last_signal=signal.SIGTERM)

    def node_of(self, number: int) -> Node | None:
        return self._nodes[number] if number < len(self._nodes) else None

    def read_output(self, data: bytes, is_error: bool) -> None:
        """Do what Way.read_output() does. Until the start, note which tasks have failed."""
        is_early = self._nodes and not self._nodes[0].is_started  # later, a rank may print it, too
        for tasks, code in _FAILED.findall(data) if is_error and is_early else ():
            for number in hostlist.expand(f"[{tasks.decode()}]"):
                if node := self.node_of(int(number)):
                    node.code = int(code)
                    self.failed.append(int(number))
        super().read_output(data, is_error)

    def reap(self) -> None:
        """Do what Child.reap() does. If srun has ended, no node can be reached any more."""
        super().reap()
        for node in self._nodes:
            if node.code is None:
                node.code = self.code


def step_command(plan: Plan, *, nproc: int, port: int) -> list[str]:
    """Return the command that starts the ranks of all nodes: through an agent on each node.

    The run's variables are set on the nodes: srun forwards none under sbatch --export=NONE.
    With LAUNCHER=srun, there is no agent; raises PlanError if the tasks do not suit the ranks.
    """
    if plan.engine:
        return rank_step(plan, nproc)
    agent = plan.inside(plan.agent_command(nproc=nproc, port=port, node_rank=None))
    return node_step(plan, kill_options(plan), plan.with_variables(agent))


def kill_options(plan: Plan) -> list[str]:
    """Return srun's options for a failed task: it ends all others, unless the run can lose a node.

    If it can, the step outlives the node.
    """
    return ["--kill-on-bad-exit=0", "--no-kill", "--wait=0"] if plan.min_nodes else [KILL_ALL]


def rank_step(plan: Plan, nproc: int) -> list[str]:
    """Return the command that starts each rank as a separate task, for LAUNCHER=srun.

    Raises PlanError if the job has a number of tasks per node other than `nproc`.
    """
    environ = plan.environ
    # If nobody chose the number of tasks, SLURM_TASKS_PER_NODE counts CPUs; srun starts one.
    tasks = environ.get("SLURM_TASKS_PER_NODE", "1") if environ.get("SLURM_NTASKS") else "1"
    if {*tasks_per_node(tasks, "SLURM_TASKS_PER_NODE")} != {nproc}:
        raise PlanError(
            f"LAUNCHER=srun needs {nproc} tasks per node, but the job has {tasks}; "
            f"give --ntasks-per-node={nproc}",
            "wrong-world",
        )

    step = ["srun", KILL_ALL, f"--chdir={plan.directory}", f"--job-name={plan.run_id}"]
    if cpus := environ.get("SLURM_CPUS_PER_TASK"):  # srun does not inherit it
        step.append(f"--cpus-per-task={cpus}")
    if environ.get("SLURM_GPUS_PER_NODE"):  # from the script; sbatch's options may differ
        step = ["env", f"SLURM_GPUS_PER_NODE={environ.get('SLURM_GPUS_ON_NODE', '')}", *step]
    if not environ.get("SLURM_GPUS_ON_NODE"):  # the script's --cpus-per-gpu has no meaning then
        step = ["env", "--unset=SLURM_CPUS_PER_GPU", *step]
    if environ.get("SLURM_CPU_BIND_LIST"):  # of an srun shell; users set only SLURM_CPU_BIND
        step = ["env", "--unset=SLURM_CPU_BIND", *step]
    step += more_options(plan)

    variables = [f"MASTER_ADDR={plan.master_addr}"] if plan.has_named_master else []
    variables += [
        f"OMP_NUM_THREADS={environ.get('OMP_NUM_THREADS') or 1}",
        f"PYTHONPATH={importable.search_path(environ)}",
    ]
    rank = plan.inside([plan.python, "-u", *plan.words])
    return [*step, *plan.with_variables([*variables, *rank])]


def node_step(plan: Plan, options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the srun command that runs `command` once per node, with all resources of the job.

    srun does not inherit the CPUs, nor the GPUs if sbatch's options differ from the script's. It
    must not read how the job, or the shell that submitted it, divides them among tasks: these
    variables are unset. The job name applies to the step: stop_step() finds the step by it.
    `options` are for srun; they follow SRUN_OPTS, which must not override them.
    """
    shares = "GPUS_PER_TASK NTASKS_PER_GPU CPUS_PER_GPU TRES_PER_TASK GPU_BIND TRES_BIND CPU_BIND"
    shares += " MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE"  # without them, a step has all memory
    shares += " LABELIO"  # would put a number before each message
    step = ["env", *(f"--unset=SLURM_{name}" for name in shares.split())]

    step += ["srun", f"--nodes={plan.num_agents}"]
    if plan.left_out:
        step.append(f"--exclude={','.join(plan.left_out)}")
    step += [f"--chdir={plan.directory}", f"--ntasks={plan.num_agents}", "--ntasks-per-node=1"]
    if cpus := plan.environ.get("SLURM_JOB_CPUS_PER_NODE"):  # nodes may differ; a step cannot
        step.append(f"--cpus-per-task={min(tasks_per_node(cpus, 'SLURM_JOB_CPUS_PER_NODE'))}")
    step.append(f"--job-name={plan.run_id}")
    if gpus := plan.environ.get("SLURM_GPUS_ON_NODE"):
        step.append(f"--gpus-per-node={gpus}")
    return [*step, *more_options(plan), *options, *command]


def more_options(plan: Plan) -> list[str]:
    """Return the srun options for the run's container, and the user's or site's own."""
    return [*plan.step_options(), *plan.environ.get("SRUN_OPTS", "").split()]


def agent_variables(plan: Plan) -> dict[str, str]:
    """Return variables for the far sides and their agents: a new secret, and srun's list of names.

    After sbatch --export with NONE or a list, srun forwards only what is named, so we name these,
    and PATH, by which srun finds the program, and HOME.
    """
    variables = {"RUN_SECRET": handshake.new_secret()}
    exported = (plan.environ.get("SLURM_EXPORT_ENV") or "ALL").split(",")
    if "ALL" not in exported:
        named = [word for word in exported if word not in ("NONE", "NIL")]
        names = [*named, "PATH", "HOME", "LAUNCH_TOKEN", *variables]
        variables["SLURM_EXPORT_ENV"] = ",".join(names)
    return variables


def stop_step(plan: Plan, srun: Child) -> None:
    """Send SIGTERM to every task of our step, so that ranks can save. Waits for SLURM's answers."""
    listed = ask_squeue("--steps", f"--job={plan.job}", "--format=%i %j")
    if listed is None:
        srun.terminate(NOTICES[0])  # unlike SIGTERM, srun forwards it, without the controller
        return
    steps = re.findall(rf"^(\S+) {re.escape(plan.run_id)}$", listed, re.MULTILINE)
    if steps:
        subprocess.run(["scancel", "--quiet", "--signal=TERM", *steps])  # the steps may have ended
    else:
        srun.terminate()  # the step has not started yet
