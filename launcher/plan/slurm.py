"""SLURM: the nodes of a job or of a step, and the command that asks for a job."""

import os
import re
import signal
import subprocess

from distributed import environment, hostlist
from distributed.errors import STOPPED
from distributed.job import ask_scheduler, in_slurm_step, job_id
from distributed.stop_signals import NOTICES
from launcher.master_port import is_loopback
from launcher.plan.plan import World
from launcher.plan.settings import read_nproc, read_number
from launcher.plan.typed import Typed, Words
from launcher.slurm_node import find_address, slurm_node
from launcher.text import Environ, PlanError, warn, whole

_REPEATED = {  # sbatch's options that a resumed job needs, and where its record has their values
    "--mem": "MinMemoryNode",
    "--mem-per-cpu": "MinMemoryCPU",
    "--mem-per-gpu": "MemPerTres",
    "--cpus-per-gpu": "CpusPerTres",
    "--exclude": "ExcNodeList",
    "--partition": "Partition",
    "--account": "Account",
    "--qos": "QOS",
    "--time": "TimeLimit",
    "--constraint": "Features",
}
_UNSET = ("0", "(null)", "N/A", "Partition_Limit")
_BY_SCRIPT = ("gres:gpu:4", "gres/gpu:4", "1-00:00:00")  # what our batch scripts ask for


def in_batch_script(environ: Environ) -> bool:
    """Return whether this runs in a job's batch script, as opposed to salloc's shell."""
    return "SLURM_PROCID" in environ and "SLURM_STEP_ID" not in environ


def read_job(environ: Environ, script: str, asked: int | None) -> World:
    """Return a job's nodes and ranks per node (None: one per GPU).

    Without MASTER_ADDR, the job's first node, which gets node rank 0, is the master; SLURM is asked
    for its address if its name has none. `script` is the entry script as it was typed, `asked` the
    ranks per node that the user asked for. Raises PlanError if this is not a job, or if the scripts
    cannot use it, and LauncherError or HostlistError if a variable of SLURM cannot be read.
    """
    names = "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST"
    if missing := [name for name in names if not environ.get(name)]:
        is_set = next(filter(environ.get, names), "")
        why = f": {is_set} is set, but not {missing[0]}" if is_set else ""
        raise PlanError(f"this is not a SLURM job{why}; use sbatch {script}, or salloc first")

    num_nodes = read_number("SLURM_JOB_NUM_NODES", environ["SLURM_JOB_NUM_NODES"], 1, 100_000)
    if in_slurm_step(environ):
        raise PlanError(f"srun started {script}, which starts srun itself; omit srun")
    if environ.get("SLURM_HET_SIZE"):
        raise PlanError(
            "a heterogeneous job has nodes that differ, but this script treats all alike; omit the "
            ": and the groups after it, or start train.py with srun --het-group",
            "wrong-world",
        )

    tasks = asked_tasks(environ)
    if tasks and asked not in (None, tasks):
        raise PlanError(
            f"{asked} processes per node, but the job has SLURM_TASKS_PER_NODE={tasks}; "
            "omit the number",
            "wrong-world",
        )
    gpus = environ.get("SLURM_GPUS_ON_NODE") or None
    nproc = tasks or asked or read_nproc("SLURM_GPUS_ON_NODE", gpus)

    nodes = environ["SLURM_JOB_NODELIST"]
    given = environ.get("MASTER_ADDR", "") if num_nodes > 1 else ""  # one node is its own master
    if is_loopback(given):
        raise PlanError(
            f"MASTER_ADDR is {given}, which the job's other nodes cannot reach; unset it, or give "
            "the first node's address",
            "loopback-address",
        )

    first = hostlist.first(nodes)
    master = given or (find_address(first) if num_nodes > 1 else first)
    return World(num_nodes, master, nproc=nproc, hosts=nodes, job=environ["SLURM_JOB_ID"])


def asked_tasks(environ: Environ) -> int | None:
    """Return the number of tasks per node that the user asked for, if it is more than one.

    Otherwise None: one task on each node is what the node agents need anyway. Raises PlanError if
    the nodes have different numbers of tasks, and LauncherError if SLURM's list cannot be read.
    """
    # If the user asked for no tasks, SLURM sets SLURM_TASKS_PER_NODE to the CPUs of each node.
    if not environ.get("SLURM_NTASKS"):
        return None

    text = environ.get("SLURM_TASKS_PER_NODE", "1")
    tasks, *others = {*environment.tasks_per_node(text, "SLURM_TASKS_PER_NODE")}  # each size once
    if others:
        raise PlanError(
            f"the job has unequal nodes, SLURM_TASKS_PER_NODE={text}; "
            "give sbatch --ntasks-per-node",
            "wrong-world",
        )
    return tasks if tasks > 1 else None


def read_step(typed: Typed) -> World | None:
    """Return the nodes of a step with one task per node, and its node rank; None outside a task.

    `nproc` is not set. May ask SLURM for the master's address. Raises PlanError if an argument
    contradicts the step, and LauncherError if the step has several tasks per node, or if srun's
    variables cannot be read.
    """
    environ = typed.environ
    step = slurm_node(environ, master=typed.master or "")
    if step is None:
        return None

    # The user wants all of the job's nodes, but srun has started this on a part of them.
    if typed.nnodes == environ.get("SLURM_JOB_NUM_NODES") and (part := _describe_part(environ)):
        raise PlanError(
            f"{part}; start it with {_on_all_nodes(environ)}, without node numbers", "wrong-world"
        )
    for name, given, variable in (
        ("NUM_NODES", typed.nnodes, "SLURM_STEP_NUM_NODES"),
        ("NODE_RANK", typed.node_rank, "SLURM_NODEID"),
    ):
        if given not in (None, environ[variable]):
            raise PlanError(
                f"the argument {name} is {given!r} but srun's {variable} is {environ[variable]}; "
                "omit the argument (the batch shell may have expanded it)",
                "wrong-world",
            )

    num_nodes, node_rank, master_addr = step
    return World(num_nodes, master_addr, node_rank)


def refuse_many_tasks(environ: Environ) -> None:
    """Raise LauncherError if srun has started this program several times on one node."""
    if environ.get("SLURM_STEP_NUM_TASKS") != environ.get("SLURM_STEP_NUM_NODES"):
        slurm_node(environ)  # raises it, except in a shell of the step


def refuse_many_nodes(typed: Typed) -> None:
    """Raise PlanError if the step, or the job outside a step, has several nodes: one is used."""
    environ = typed.environ
    is_step = in_slurm_step(environ)
    nodes = environ.get("SLURM_STEP_NUM_NODES" if is_step else "SLURM_JOB_NUM_NODES")
    if not environ.get("SLURM_JOB_ID") or nodes in (None, "1"):
        return

    srun = f"use srun --nodes={nodes} --ntasks={nodes}"
    if is_step:
        raise PlanError(
            f"this allocation has {nodes} nodes, but {typed.program} uses only one; "
            f"{srun} --overlap scripts/cluster_train.sh CONFIG"
        )
    raise PlanError(
        f"the job has {nodes} nodes, but srun did not start {typed.program} on them; "
        f"{srun} scripts/cluster_train.sh CONFIG",
        "batch-step",
    )


def warn_of_part(typed: Typed, *, needs_srun: bool = False) -> None:
    """Warn if a program that should use all nodes of a job starts in a step with fewer nodes.

    `needs_srun` means that srun has to start the program on each node; others reach all nodes from
    the batch script.
    """
    if part := _describe_part(typed.environ):
        cure = f"run {typed.program} in the batch script or salloc's shell, without srun"
        if needs_srun:
            cure = f"start it with {_on_all_nodes(typed.environ)}"
        warn(
            f"{typed.program}: warning: {part}, and the run uses no others; "
            f"to use all, {cure} [partial-launch]"
        )


def _describe_part(environ: Environ) -> str:
    """Return in words which part of the job's nodes a step has; "" if all, or outside a step."""
    step = whole(environ.get("SLURM_STEP_NUM_NODES", ""))
    job = whole(environ.get("SLURM_JOB_NUM_NODES", ""))
    is_part = in_slurm_step(environ) and 0 < step < job
    return f"this step has {step} of the job's {job} nodes" if is_part else ""


def _on_all_nodes(environ: Environ) -> str:
    nodes = environ["SLURM_JOB_NUM_NODES"]
    return f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1"


def job_command(environ: Environ, script: str | None, typed: Words) -> list[str]:
    """Return the command that repeats what was typed, in a job of the same size, from any shell.

    `script` is a batch script of this project; None if another script was typed. Outside a job,
    that is sbatch without a size. In a job, asks SLURM for what was requested; without an answer,
    such options are missing. Empty if SLURM does not say which file is the job's batch script.
    Raises PlanError or LauncherError (see asked_tasks).
    """
    if not environ.get("SLURM_JOB_ID"):
        return ["sbatch", script or typed[0], *typed[1:]]

    words = [f"--nodes={environ['SLURM_JOB_NUM_NODES']}"]
    if tasks := asked_tasks(environ):
        words.append(f"--ntasks-per-node={tasks}")

    record = ask_scontrol("job", job_id(environ))
    gres = re.sub("gres[:/]", "", record.get("TresPerNode", "(null)"))  # / since SLURM 23.11
    gpus = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE")
    if gpus:
        models = re.findall("gpu:([^:,]+):", gres)
        lacks_model = len(models) == 1 and gpus.isdecimal()  # salloc's value may be a100:4
        words.append(f"--gpus-per-node={f'{models[0]}:{gpus}' if lacks_model else gpus}")

    is_in_batch = in_batch_script(environ)
    # In the user's own file or in salloc's shell, no line of our scripts asks for these.
    omitted = _UNSET + _BY_SCRIPT if script and is_in_batch else _UNSET
    for option, field in _REPEATED.items():
        if (value := record.get(field, "0")) not in omitted:
            words.append(f"{option}={re.sub('gres[:/]gpu:', '', value)}")
    words += ["--exclusive"] if record.get("OverSubscribe") == "NO" else []
    if task := environ.get("SLURM_ARRAY_TASK_ID"):
        words.append(f"--array={task}")  # this task alone

    if is_in_batch and script:
        return ["sbatch", *words, script, *typed[1:]]
    if is_in_batch:  # the user's own file, which contains the command
        batch = (ask_squeue(f"--job={job_id(environ)}", "--format=%o") or "").strip()
        is_known = batch not in ("", "(null)")  # the latter: sbatch --wrap, or a pipe
        return ["sbatch", *words, *_split_batch(batch)] if is_known else []
    if gres not in _UNSET and not gpus:  # salloc sets no variable for --gres
        words.append(f"--gres={gres}")
    return ["salloc", *words, *typed]


def _split_batch(text: str) -> list[str]:
    """Return a batch file and its arguments; its path may have spaces if it is on this machine."""
    file = text
    while not os.path.isfile(file) and " " in file:
        file = file.rpartition(" ")[0]
    return [file, *text[len(file) :].split()]


def step_command(environ: Environ, typed: Words) -> list[str]:
    """Return the srun command that repeats what was typed, in a step of the same size."""
    sizes = {
        "nodes": "SLURM_STEP_NUM_NODES",
        "ntasks": "SLURM_STEP_NUM_TASKS",
        "gpus-per-node": "SLURM_GPUS_ON_NODE",
    }
    given = [f"--{size}={environ[name]}" for size, name in sizes.items() if environ.get(name)]
    return ["srun", *given, *typed]


def end_chain(code: int, environ: Environ) -> None:
    """Cancel the waiting jobs of this job's chain if the run has completed or failed by itself.

    They are still needed if the run saved and stopped, if a part of it was killed, if a notice
    ended its ranks, or if the job is at its time limit. Does nothing outside a chain or a batch
    script. Asks SLURM for the limit.
    """
    name = chain_of(environ)
    kills = signal.SIGKILL, *NOTICES  # SIGKILL also after a node was lost
    is_needed = code == STOPPED or code - 128 in kills
    if name and in_batch_script(environ) and not (is_needed or is_at_time_limit(environ)):
        subprocess.run(["scancel", "--state=PENDING", f"--name=chain-{name}"])


def end_step(environ: Environ) -> None:
    """End this process's step after it refused to start: tasks on other nodes would wait for it.

    Only node ranks 0 and 1 do so, and only if this process is the whole task; it ignores SIGTERM
    from then on. Does nothing outside a step, or in a step of one node.
    """
    if not in_slurm_step(environ) or environ["SLURM_STEP_NUM_NODES"] == "1":
        return

    # Two of the nodes ask SLURM, because one may not get here: only the others refuse an argument
    # that is right on node rank 0, such as NODE_RANK=0.
    is_chosen = environ.get("SLURM_NODEID") in ("0", "1")
    # Otherwise a script started this process, and may continue after it.
    is_whole_task = environ.get("SLURM_TASK_PID") == str(os.getpid())
    if is_chosen and is_whole_task:
        # scancel signals this process, too, which must exit with the code of its own error.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        step = f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
        subprocess.run(["scancel", "--quiet", "--signal=TERM", step])


def chain_of(environ: Environ) -> str:
    """Return the name of this job's chain; "" if it is in none.

    submit_with_config.sh sets CHAIN to the run's id; other values belong to other programs.
    """
    name = environ.get("CHAIN", "")
    return name if name == environ.get("RUN_ID") else ""


def is_at_time_limit(environ: Environ) -> bool:
    """Ask SLURM whether it is ending this job at its time limit; False if it does not answer."""
    return ask_scontrol("job", job_id(environ)).get("Reason") == "TimeLimit"


def preempt_mode(environ: Environ) -> str:
    """Ask SLURM what it does to this job when the grace time of its preemption ends.

    Returns a mode such as REQUEUE; "" outside a grace time, or if SLURM does not show the job. The
    mode is that of the job's QOS, unless this is "cluster", otherwise that of the partition: OFF if
    SLURM shows none. SLURM cancels what it cannot requeue, such as salloc's shell. A job that exits
    before the grace time ends counts as failed, so one with REQUEUE has to requeue itself.
    """
    job = ask_scontrol("job", job_id(environ))
    if job.get("JobState") != "RUNNING" or job.get("PreemptTime", "None") == "None":
        return ""
    if not in_batch_script(environ):
        return "CANCEL"

    ask_for_mode = f"sacctmgr -nP show qos name={job['QOS']} format=PreemptMode"
    mode = (ask_scheduler(*ask_for_mode.split()) or "").strip().upper()
    if mode not in ("", "CLUSTER"):
        return mode
    return ask_scontrol("partition", job["Partition"]).get("PreemptMode", "OFF")


def ask_scontrol(kind: str, name: str) -> dict[str, str]:
    """Return the fields of the record of a job or partition; none if SLURM does not answer."""
    fields = re.findall(r"(\w+)=(\S*)", ask_scheduler("scontrol", "show", "-o", kind, name) or "")
    # Of fields with the same name, the first counts: the job's command may contain NAME=VALUE.
    return dict(reversed(fields))


def ask_squeue(*options: str) -> str | None:
    """Return what squeue prints; None if SLURM does not answer."""
    return ask_scheduler("squeue", "--noheader", *options)


def has_ended(job: str) -> bool:
    """Ask SLURM whether a job has ended or is ending; False if it does not answer.

    It is asked for the job's record: a site's squeue may answer from a cache that does not have the
    job yet. Some minutes after the end, SLURM deletes the record, and rejects the id.
    """
    told = ask_scheduler("sh", "-c", 'scontrol show -o job "$0" 2>&1; true', job) or ""
    live = r" JobState=(PENDING|RUNNING|SUSPENDED|CONFIGURING|RESIZING|SIGNALING|STOPPED|REQUEUE)"
    return not re.search(live, told) and bool(re.search(" JobState=|Invalid job id", told))
