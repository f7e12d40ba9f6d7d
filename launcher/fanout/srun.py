"""Fan-out through srun, from a job's batch script or from salloc's shell.

It starts one agent on each node; each agent takes its node rank from the step's variables. With
LAUNCHER=srun, it starts one task for each rank instead.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from distributed import hostlist
from distributed.environment import tasks_per_node
from distributed.errors import REFUSED, Refused
from distributed.job import job_id
from launcher import handshake, importable, processes
from launcher.fanout.step import Srun, requeue, run_step, start_srun
from launcher.fanout.swap import exclude_ill, find_ill
from launcher.interrupt import leave_unstarted
from launcher.plan.plan import LONGEST, BeReady, Plan, print_plan
from launcher.plan.slurm import has_ended, preempt_mode
from launcher.preflight import compare
from launcher.preflight.check_node import read_reports
from launcher.text import PlanError, count, warn
from launcher.typed_json import encode, in_pieces
from launcher.wire import limits
from launcher.wire.messages import Report

KILL_ALL = "--kill-on-bad-exit=1"
_CANNOT_START = (REFUSED, *range(125, 128))  # the exit codes of a broken Python, and of env


def run(plan: Plan, be_ready: BeReady) -> int:
    """Start the run on all nodes of the job, and wait for its end. Returns the run's exit code.

    Returns REFUSED if a check fails, and 0 after a dry run, which also checks the nodes in a step
    of the job, but then prints the command. Raises PlanError or Refused if nothing was started.
    """
    if has_ended(plan.job):
        cause = f"SLURM_JOB_ID is {plan.job}, a job that has ended"
        raise PlanError(f"{cause}; unset the SLURM_ variables, or salloc again")
    plan = replace(plan, environ={**plan.environ, **agent_variables(plan)})
    if plan.engine and not plan.is_ours:
        warn(
            f"{plan.program}: warning: LAUNCHER=srun does not set RANK; in "
            f"{' '.join(plan.words[:2])}, call init_distributed(), or read SLURM's variables"
        )

    checked = check_nodes(plan)
    if not checked:
        return REFUSED
    plan, first, outcome = checked
    counts = plan.rank_counts(first.nproc)
    command = step_command(plan, nproc=first.nproc, port=first.port)
    print_plan(plan, first, outcome, counts)

    if plan.is_dry_run:
        print(
            f"# job {job_id(plan.environ)}, {count(plan.num_nodes, 'node')}: "
            f"ranks 0-{sum(counts) - 1}, rendezvous {plan.master_addr}:{first.port}"
        )
        print(plan.shell_line(command))
        return 0

    be_ready()
    return run_step(plan, command)


def agent_variables(plan: Plan) -> dict[str, str]:
    """Return variables for the agents: a new secret, and how to report the run's end.

    After sbatch --export with NONE or a list, srun forwards only what is named, so we name these,
    and PATH, by which srun finds the program, and HOME.
    """
    variables = {"RUN_SECRET": handshake.new_secret()}
    if not plan.engine:
        variables |= {"LAUNCH_START": "step", "LAUNCH_TOKEN": os.urandom(16).hex()}

    exported = (plan.environ.get("SLURM_EXPORT_ENV") or "ALL").split(",")
    if "ALL" not in exported:
        named = [word for word in exported if word not in ("NONE", "NIL")]
        variables["SLURM_EXPORT_ENV"] = ",".join([*named, "PATH", "HOME", *variables])
    return variables


# --- the preflight ------------------------------------------------------------------------------


def check_nodes(plan: Plan) -> tuple[Plan, Report, compare.Preflight] | None:
    """Check every node; replace faulty ones and repeat, while there are spares. Prints the faults.

    Returns the plan, node rank 0's report, and the comparison of all reports; None if the start
    is refused. Raises Refused if a node does not answer, and no spare can replace it.
    """
    reports = ask_nodes(plan)
    outcome = compare.combine(reports)
    if any(found.fault.name == "port-blocked" for found in outcome.findings):
        # A slow prolog or image may have made a node late, after the others had stopped waiting.
        reports = ask_nodes(plan)
        outcome = compare.combine(reports)

    is_refused = compare.print_findings(
        outcome, plan.program, is_strict=plan.is_strict, out=sys.stderr
    )
    answers = {report.node_rank: report for report in reports}
    ill = find_ill(plan, [answers.get(number) for number in range(plan.num_agents)])

    if swapped := exclude_ill(plan, ill):
        plan, changes = swapped
        warn(f"{plan.program}: {'; '.join(changes)}")
        return check_nodes(plan)

    if silent := silent_hosts(plan, reports):
        cause = f"no answer to the preflight from {', '.join(silent)}, and no spare can take over"
        raise Refused("node-missing", f"{cause}; try srun --nodelist={','.join(silent)} hostname")
    return None if is_refused else (plan, reports[0], outcome)


def ask_nodes(plan: Plan) -> list[Report]:
    """Run the preflight on every node. Returns the reports of those that answer, by node rank.

    Waits for up to STEP_PREFLIGHT_S, or STEP_IMAGE_S (see read_answers).

    Raises Refused if more nodes are silent than there are spares. Exits if SLURM ended the step.
    """
    pieces = in_pieces(encode(plan.request(meeting_size=plan.num_agents)), LONGEST)
    check = plan.inside([*plan.module_command("launcher.preflight.check_node"), *pieces])
    command = ["env", f"--chdir={plan.root}", *check]
    srun = start_srun(
        plan, node_step(plan, ["--kill-on-bad-exit=0", "--wait=0"], command), subprocess.PIPE
    )

    answers = read_answers(srun, plan)
    code = processes.shell_code(srun.returncode)
    if code == 128 + signal.SIGTERM:  # from SLURM, or from read_answers() after its limit
        leave_if_stopped(plan)

    reports = read_reports(answers)
    silent = silent_hosts(plan, reports)
    if reports and len(silent) <= plan.num_spares:
        return reports

    cure = ""
    if plan.container and srun.returncode > 0:
        cure = f"check that the image exists and contains {plan.python}"
    elif srun.returncode in _CANNOT_START:
        cure = f"make {plan.directory}, {plan.root} and {plan.python} available there"
    if cure:
        cause = f"the preflight did not start on {', '.join(silent)}, see above"
        raise Refused("env-missing", f"{cause}; {cure}")
    raise Refused(
        "node-missing",
        f"no answer to the preflight from {', '.join(silent)} (srun's exit code is {code}, see "
        f"above); try srun --nodelist={','.join(silent)} hostname",
    )


def leave_if_stopped(plan: Plan) -> None:
    """Exit if a preemption or the end of the job has ended the preflight's step.

    Asks SLURM, and requeues the job if its preemption allows that. scancel and preemptions signal
    steps before the batch script, so no signal has told this process yet.
    """
    mode = preempt_mode(plan.environ)
    if "REQUEUE" in mode:
        requeue(plan)
    if mode or has_ended(plan.job):
        leave_unstarted(signal.SIGTERM)


def read_answers(srun: Srun, plan: Plan) -> bytes:
    """Return what the preflight's step printed. Warns about nodes that keep the others waiting.

    Ends the step after a limit, which is longer if the step loads an image: srun itself gives up on
    a silent node only after several of SLURM's timeouts.
    """
    limit_s = limits.STEP_IMAGE_S if plan.step_options() else limits.STEP_PREFLIGHT_S
    try:
        return bytes(srun.communicate(timeout=limits.STEP_NAMING_S)[0])
    except subprocess.TimeoutExpired as wait:
        reports = read_reports(wait.output or b"")

    silent = silent_hosts(plan, reports)
    if reports and silent:  # without any report, the step may still wait for the job's other steps
        warn(
            f"{plan.program}: warning: no answer to the preflight from {', '.join(silent)} "
            f"for {limits.STEP_NAMING_S:g} s; waiting [node-missing]"
        )

    try:
        return bytes(srun.communicate(timeout=limit_s - limits.STEP_NAMING_S)[0])
    except subprocess.TimeoutExpired:
        srun.terminate()
        return bytes(srun.communicate()[0])


def silent_hosts(plan: Plan, reports: Iterable[Report]) -> list[str]:
    """Return the hosts of the node ranks, and of the spares, that have not answered."""
    answered = {report.node_rank for report in reports}
    hosts = enumerate(hostlist.expand(plan.hosts))
    return [host for node_rank, host in hosts if node_rank not in answered]


# --- the commands -------------------------------------------------------------------------------


def step_command(plan: Plan, *, nproc: int, port: int) -> list[str]:
    """Return the command that starts the ranks of all nodes: through an agent on each node.

    The run's variables are set on the nodes: srun forwards none under sbatch --export=NONE.
    With LAUNCHER=srun, there is no agent; raises PlanError if the tasks do not suit the ranks.
    """
    if plan.engine:
        return rank_step(plan, nproc)
    agent = plan.inside(plan.agent_command(nproc=nproc, port=port, node_rank=None))
    # If the run can lose a node, the step outlives it. Otherwise one failed task ends all others.
    options = ["--kill-on-bad-exit=0", "--no-kill", "--wait=0"] if plan.min_nodes else [KILL_ALL]
    return node_step(plan, options, plan.with_variables(agent))


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
