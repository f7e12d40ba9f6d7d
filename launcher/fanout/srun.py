"""Fan-out through srun, from a job's batch script or from salloc's shell.

It starts one agent on each node, which takes its node rank from the step's variables; with
LAUNCHER=srun it starts one task for each rank instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from distributed import hostlist
from distributed.environment import job_id, tasks_per_node
from distributed.errors import REFUSED, STOPPED, Refused
from distributed.stop_signals import NOTICE, STOP_SIGNALS, Interrupts, handled_signals
from launcher import handshake, processes
from launcher.plan.plan import Plan, PlanError, print_plan, shell_line
from launcher.preflight import compare
from launcher.preflight.check_node import Report, read_reports
from launcher.text import count
from launcher.typed_json import encode

PREFLIGHT_S = 300.0  # for all nodes to answer; other steps of the job may have to end first
SQUEUE_S = 10.0  # for an answer of SLURM's controller
LONGEST = 100_000  # characters of an argument; Linux allows 128 KiB
MOST_RESTARTS = 3  # in a row that gain no checkpoint
_CANNOT_START = range(125, 128)  # exit codes of env: a folder or a program is not there


def run(plan: Plan, be_ready: Callable[[], None]) -> int:
    """Start all nodes of the job; returns the run's exit code."""
    if not plan.is_dry_run:  # a notice that comes during the preflight stays pending
        signal.pthread_sigmask(signal.SIG_BLOCK, {NOTICE})
    os.environ.update(secret_variables(os.environ))
    _warn_of_missing_rank(plan)
    reports = check_nodes(plan)
    outcome = compare.judge(reports)
    if compare.print_findings(outcome, plan.program, is_strict=plan.is_strict, out=sys.stderr):
        return REFUSED
    first = reports[0]
    counts = plan.rank_counts(first.nproc)
    command = step_command(plan, nproc=first.nproc, port=first.port)
    print_plan(plan, first, outcome, counts)
    if plan.is_dry_run:
        where = f"rendezvous {plan.master_addr}:{first.port}"
        nodes = count(plan.num_nodes, "node")
        print(f"# job {job_id(os.environ)}, {nodes}: ranks 0-{sum(counts) - 1}, {where}")
        print(shell_line(plan.directory, command))
        return 0
    be_ready()
    return run_step(plan, command)


def secret_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the run's secret, and what has srun forward it.

    After sbatch --export=NONE or a list, srun forwards what that names, and finds no program.
    """
    variables = {"RUN_SECRET": handshake.new_secret()}
    exported = (environ.get("SLURM_EXPORT_ENV") or "ALL").split(",")
    if "ALL" not in exported:
        named = [word for word in exported if word not in ("NONE", "NIL")]
        variables["SLURM_EXPORT_ENV"] = ",".join([*named, "PATH", "HOME", "RUN_SECRET"])
    return variables


def _warn_of_missing_rank(plan: Plan) -> None:
    if plan.engine and not plan.is_ours:
        cause = f"LAUNCHER=srun sets no RANK: {' '.join(plan.words[:2])}"
        cure = "must call init_distributed(), or read SLURM's variables"
        print(f"{plan.program}: warning: {cause} {cure}", file=sys.stderr)


# --- the preflight ------------------------------------------------------------------------------


def check_nodes(plan: Plan) -> list[Report]:
    """Run the preflight on every node; returns the reports by node rank.

    Raises:
        Refused: a node did not answer.
    """
    request = encode(plan.request(meeting_size=plan.num_nodes))
    pieces = [request[at : at + LONGEST] for at in range(0, len(request), LONGEST)]
    command = ["env", f"--chdir={plan.root}", plan.python, str(plan.root / "scripts/lib/start.py")]
    command += ["launcher.preflight.check_node", *pieces]
    step = node_step(plan, ["--kill-on-bad-exit=0"], command, os.environ)
    srun = _start(step, stdout=subprocess.PIPE)
    try:
        answers, _ = srun.communicate(timeout=PREFLIGHT_S)
    except subprocess.TimeoutExpired:
        srun.terminate()
        answers, _ = srun.communicate()
    reports: list[Report] = []
    try:
        reports = read_reports(answers.decode(errors="replace").splitlines())
    except ValueError as error:
        print(f"{plan.program}: {error}", file=sys.stderr)
    answered = {report.node_rank for report in reports}
    hosts = enumerate(hostlist.expand(plan.hosts))
    silent = [host for node_rank, host in hosts if node_rank not in answered]
    if not silent:
        return reports
    if srun.returncode in _CANNOT_START:
        cause = f"the preflight did not start on {' '.join(silent)}, see above"
        needed = f"{plan.directory}, {plan.root} and {plan.python}"
        raise Refused("env-missing", f"{cause}; let {needed} be there as they are here")
    cause = f"no answer to the preflight from {' '.join(silent)}"
    how = f"srun's exit code is {processes.shell_code(srun.returncode)}, see above"
    raise Refused("node-missing", f"{cause} ({how}); try srun --nodelist={silent[0]} hostname")


# --- the commands -------------------------------------------------------------------------------


def step_command(
    plan: Plan, *, nproc: int, port: int, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the command that starts the ranks of all nodes.

    The run's variables are set on the nodes: srun forwards none under sbatch --export=NONE.

    Raises:
        PlanError: with LAUNCHER=srun, the job has another number of tasks.
    """
    if not plan.engine:
        agent = plan.agent_command(nproc=nproc, port=port, is_placed=False)
        return node_step(plan, ["--kill-on-bad-exit=1"], plan.with_variables(agent), environ)
    tasks = environ.get("SLURM_TASKS_PER_NODE", "1")
    if {*tasks_per_node(tasks, "SLURM_TASKS_PER_NODE")} != {nproc}:
        cause = f"LAUNCHER=srun starts the job's tasks, SLURM_TASKS_PER_NODE={tasks}"
        cure = f"give --ntasks-per-node={nproc}"
        raise PlanError(f"{cause}, for {nproc} ranks per node; {cure} [wrong-world]")
    step = ["srun", "--kill-on-bad-exit=1", f"--job-name={plan.run_id}"]
    if cpus := environ.get("SLURM_CPUS_PER_TASK"):  # srun does not inherit it
        step.append(f"--cpus-per-task={cpus}")
    if environ.get("SLURM_GPUS_PER_NODE"):  # the script's value; sbatch's options may differ
        step = ["env", f"SLURM_GPUS_PER_NODE={environ.get('SLURM_GPUS_ON_NODE', '')}", *step]
    threads = f"OMP_NUM_THREADS={environ.get('OMP_NUM_THREADS') or 1}"
    return [*step, *plan.with_variables([threads, plan.python, "-u", *plan.words])]


def node_step(
    plan: Plan, options: Sequence[str], command: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """Return the srun command that runs `command` once per node, with all resources of the job.

    srun does not inherit the processors, nor the GPUs where sbatch's options differ from the
    script's. The job name belongs to the step: stop_step() finds the step by it.
    """
    step = ["env", "--unset=SLURM_GPUS_PER_TASK", "srun", f"--nodes={plan.num_nodes}"]
    step += [f"--ntasks={plan.num_nodes}", "--ntasks-per-node=1"]
    if cpus := environ.get("SLURM_JOB_CPUS_PER_NODE"):
        step.append(f"--cpus-per-task={min(tasks_per_node(cpus, 'SLURM_JOB_CPUS_PER_NODE'))}")
    step.append(f"--job-name={plan.run_id}")
    if gpus := environ.get("SLURM_GPUS_ON_NODE"):
        step.append(f"--gpus-per-node={gpus}")
    return [*step, *options, *command]


# --- the run ------------------------------------------------------------------------------------


def _start(command: Sequence[str], stdout: int | None = None) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; it gets SIGTERM when this process ends.

    A terminal's Ctrl-C would make srun kill the step, with nothing saved.
    """
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
        processes.die_with_parent(parent, signal.SIGTERM)

    return subprocess.Popen(  # this process has one thread
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,
        preexec_fn=prepare,
    )


def run_step(plan: Plan, command: Sequence[str]) -> int:
    """Run the step to its end, and act on signals; returns its exit code."""
    handled = handled_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*handled, signal.SIGCHLD})
    has_notice = signal.sigtimedwait({NOTICE}, 0) is not None
    if has_notice and requeue(plan):
        return STOPPED
    srun = _start(command)
    interrupts = Interrupts()
    while srun.poll() is None:
        signum = signal.sigwait({*handled, signal.SIGCHLD})
        if signum == NOTICE:
            has_notice = True
            srun.send_signal(NOTICE)  # srun forwards it to the tasks
        elif signum == signal.SIGINT and interrupts.is_second():
            srun.terminate()  # which kills them
        elif signum != signal.SIGCHLD:
            threading.Thread(target=stop_step, args=(plan.run_id, srun), daemon=True).start()
    code = processes.shell_code(srun.returncode)
    # 128 + SIGUSR1: the notice came before there was anything to save.
    has_saved = code == STOPPED or (code == 128 + NOTICE and plan.checkpoint_dir is not None)
    if has_notice and has_saved:
        requeue(plan)
    return code


def stop_step(name: str, srun: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to every task of our step, so that the ranks can save; srun forwards no TERM."""
    command = ["squeue", "--noheader", "--steps", f"--job={os.environ['SLURM_JOB_ID']}"]
    try:
        listed = subprocess.check_output([*command, "--format=%i %j"], timeout=SQUEUE_S, text=True)
    except (OSError, subprocess.SubprocessError):
        srun.send_signal(NOTICE)  # works without SLURM's controller
        return
    steps = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [name]]
    if steps:
        subprocess.run(["scancel", "--signal=TERM", *steps])
    else:
        srun.terminate()  # the step has not started yet


def requeue(plan: Plan, environ: Mapping[str, str] = os.environ) -> bool:
    """Put the job back into the queue, where SLURM starts it again under its id.

    After three restarts in a row without a new checkpoint the job ends instead. Returns False if
    SLURM refuses.
    """
    if plan.checkpoint_dir is not None:
        latest = plan.directory / plan.checkpoint_dir / plan.run_id / "latest"
        record = plan.directory / plan.log_dir / plan.run_id / "requeues"
        record.parent.mkdir(parents=True, exist_ok=True)
        newest = os.readlink(latest) if latest.is_symlink() else "none"
        with record.open("a") as file:
            print(newest, file=file)
        last = record.read_text().splitlines()[-MOST_RESTARTS - 1 :]
        if last == [newest] * (MOST_RESTARTS + 1):
            cause = f"{MOST_RESTARTS} restarts gained no step; the job is not requeued"
            print(f"{plan.program}: {cause}", file=sys.stderr)
            return True
    return subprocess.run(["scontrol", "requeue", job_id(environ)]).returncode == 0
