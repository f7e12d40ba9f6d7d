"""PBS: the nodes of a job, and the command that requests a job."""

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from shutil import which

from distributed.job import ask_scheduler
from launcher.plan.plan import NodePlan
from launcher.plan.typed import Words
from launcher.text import Environ, OwnEnviron, PlanError, count, read_text, whole
from launcher.wire import limits

# What scripts read of a job, and what is the same on each of its nodes; PBS_ARRAYID is Torque's.
JOB_VARIABLES = "PBS_JOBID", "PBS_JOBNAME", "PBS_O_WORKDIR", "PBS_ARRAY_INDEX", "PBS_ARRAYID"
REQUEST = (
    "ask for nodes with qsub -l select=2:ncpus=16:ngpus=4 (PBS Pro, OpenPBS)"
    " or qsub -l nodes=2:ppn=4 (Torque)"
)


def read_nodefile(environ: Environ, nproc: int | None) -> tuple[NodePlan, ...]:
    """Return a PBS job's nodes, each with `nproc` ranks; if that is None, asks qstat for them.

    Raises PlanError if this is not a PBS job, or if its node file does not have the requested size.
    """
    if not environ.get("PBS_JOBID"):
        raise PlanError(f"this is not a PBS job; {REQUEST}")

    lines = read_lines(environ)
    names = dict.fromkeys(lines)
    num_asked = whole(environ.get("PBS_NUM_NODES", ""))  # set by Torque; 0: not known
    is_complete = bool(lines)
    if lines and num_asked and len(names) != num_asked:
        # Torque counts what was requested; a scheduler may put several of these nodes on one host.
        requested = int(environ.get("PBS_NUM_PPN") or 1) * num_asked
        is_complete = requested in (0, len(lines))  # 0: no nodes were requested
    if not is_complete:
        raise PlanError(
            f"the job's node file has {count(len(names), 'node')}, but should have "
            f"{num_asked or 'some'}; {REQUEST}"
        )

    if nproc:
        return tuple(NodePlan(name, nproc) for name in names)
    ranks, is_chosen = count_ranks(lines, read_chunks(ask_qstat(environ["PBS_JOBID"])))
    is_by_lines = bool(ranks) and not is_chosen
    return tuple(NodePlan(name, ranks.get(name), is_by_lines) for name in names)


def asked_ranks(environ: Environ) -> int | None:
    """Return the ranks that a PBS job requested for its only node; None if it requested none.

    None also outside a PBS job. May ask qstat, and raises PlanError (see read_nodefile).
    """
    if not environ.get("PBS_JOBID") or not read_lines(environ):
        return None
    node = read_nodefile(environ, None)[0]
    return None if node.is_by_lines else node.nproc


def read_lines(environ: Environ, name: str = "PBS_NODEFILE") -> list[str]:
    """Return the lines of a variable's file, if any; the node file has one for each MPI process."""
    file = Path(environ.get(name) or "/nonexistent")
    return file.read_text(errors="surrogateescape").split() if file.is_file() else []


def count_nodes(environ: Environ) -> int:
    """Return the number of nodes of this job; 0 outside a PBS job."""
    return len({*read_lines(environ)})


def count_ranks(
    lines: Sequence[str], chunks: Sequence[Mapping[str, str]]
) -> tuple[dict[str, int], bool]:
    """Return the ranks of each node (empty: one per GPU), and whether the request chose them.

    `lines` are those of the node file, which lists a chunk's host `mpiprocs` times (once by
    default). If `mpiprocs` is 1 for all chunks, each chunk has a rank per GPU, even if PBS puts
    several chunks on one node.
    """
    counts = Counter(lines)
    gpus = [int(chunk.get("ngpus") or 0) for chunk in chunks]
    is_one_each = {chunk.get("mpiprocs", "1") for chunk in chunks} == {"1"}

    is_by_gpus = any(gpus) and is_one_each and len(gpus) == len(lines)
    if is_by_gpus:
        gpus_of = dict.fromkeys(lines, 0)
        for name, number in zip(lines, gpus, strict=True):
            gpus_of[name] += number
        return {name: number or 1 for name, number in gpus_of.items()}, True

    is_chosen = any("mpiprocs" in chunk for chunk in chunks)
    is_default = max(counts.values()) == 1
    return {} if is_default else counts, is_chosen


def add_tools_to_path(environ: OwnEnviron) -> None:
    """Add the folder of PBS's commands to PATH if a job's PATH lacks it.

    PBS starts a program that follows `--` without a shell, and its own default for PATH,
    /bin:/usr/bin, does not contain its commands.
    """
    path = environ.get("PATH", "")
    if not environ.get("PBS_JOBID") or which("qstat", path=path):
        return

    text = read_text(_conf_file(environ))
    if found := re.search(r"^\s*PBS_EXEC=[\"']?([^\"'\s]+)", text, re.MULTILINE):
        environ["PATH"] = f"{path}:{found[1]}/bin"


def _conf_file(environ: Environ) -> Path:
    return Path(environ.get("PBS_CONF_FILE") or "/etc/pbs.conf")


@cache
def ask_qstat(name: str, option: str = "-f") -> dict[str, str]:
    """Return qstat's attributes of a job (-Qf: queue, -Bf: server); empty if PBS is silent."""
    answer = ask_scheduler("qstat", option, name) if name else None
    # qstat folds long lines, even within a character.
    text = os.fsdecode(os.fsencode(answer or "").replace(b"\n\t", b""))
    return dict(line.lstrip().split(" = ", 1) for line in text.splitlines() if " = " in line)


def read_chunks(attributes: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the resources of each chunk that a job requested; empty if they are not known."""
    asked = attributes.get("schedselect") or attributes.get("Resource_List.select") or ""
    chunks = list[dict[str, str]]()
    for chunk in filter(None, asked.split("+")):  # 2:ncpus=16:ngpus=4 is two chunks
        number, _, rest = chunk.partition(":") if chunk[0].isdecimal() else ("1", "", chunk)
        chunks += [dict(word.partition("=")[::2] for word in rest.split(":"))] * int(number)
    return chunks


def describe_missing_qstat(environ: Environ) -> str:
    """Return a warning if this is a PBS job, but qstat does not answer; otherwise empty."""
    job = environ.get("PBS_JOBID", "")
    if not job or ask_qstat(job):
        return ""

    cause, cure = f"qstat -f {job} does not answer", "check it in a job"
    if not which("qstat", path=environ.get("PATH")):
        cause = f"qstat is neither in PATH nor in PBS_EXEC of {_conf_file(environ)}"
        cure = "submit with qsub -v PATH"
    lost = "the resume line, the request's GPUs and threads, and the variables of qsub -v"
    return f"{cause}; without it, {lost} are not known; {cure}"


def describe_short_delay(grace_s: int, environ: Environ) -> str:
    """Return a warning if kill_delay is known to be too short for a save; otherwise empty."""
    delay = _kill_delay(environ)
    close_s = limits.STOP_CLOSE_S
    stop_s = grace_s + close_s
    if not delay.isdecimal() or stop_s <= int(delay):
        return ""

    cause = f"a stop can take {stop_s} s (GRACE + {close_s}), but PBS kills this job {delay} s "
    cause += f"after qdel or the walltime (kill_delay of queue {environ['PBS_QUEUE']})"
    cure = f"submit with qsub -K {stop_s}, or " if is_torque(environ) else ""
    cure += f"ask your administrator to set kill_delay={stop_s}"
    most_grace_s = int(delay) - close_s
    if most_grace_s > 0:
        cure += f", or set GRACE={most_grace_s} if the ranks save within {most_grace_s} s"
    return f"{cause}; {cure}"


def _kill_delay(environ: Environ) -> str:
    """Return the seconds from SIGTERM to SIGKILL, as qstat shows them; empty if PBS is silent.

    The defaults, 10 s and 2 s, are those of pbs_queue_attributes(7B) and of Torque.
    """
    job = ask_qstat(environ.get("PBS_JOBID", ""))
    queue = ask_qstat(environ.get("PBS_QUEUE", ""), "-Qf") if job else {}
    if not queue:
        return ""
    if not is_torque(environ):
        return queue.get("kill_delay", "10")

    server = ask_qstat(job.get("server", ""), "-Bf")
    delays = job.get("user_kill_delay"), queue.get("kill_delay"), server.get("kill_delay")
    return next(filter(None, delays), "2")  # the job's comes first


def set_launch_job(environ: OwnEnviron) -> None:
    """Set LAUNCH_JOB to what identifies this start of a PBS job, for all processes of this launch.

    Otherwise each would have to ask PBS (see this_job). It is unset outside a PBS job, or if PBS
    does not answer.
    """
    environ.pop("LAUNCH_JOB", None)
    job = environ.get("PBS_JOBID", "")
    attributes = ask_qstat(job)
    # Torque calls it start_count.
    starts = attributes.get("run_count") or attributes.get("start_count") or ""
    if starts.isdecimal() and "ctime" in attributes:
        identity = {
            "job": job,
            "run_id": job,
            "start": max(int(starts) - 1, 0),  # PBS counts from 1
            "cluster": job.partition(".")[2],  # the server, as in 7.head
            "submitted": attributes["ctime"],
        }
        environ["LAUNCH_JOB"] = json.dumps(identity)


def names_from_qsub(environ: Environ) -> list[str]:
    """Return the names of the variables that qsub -v has set for this job.

    Empty with -V, which sends all variables of the login shell, and if PBS does not answer.
    """
    attributes = ask_qstat(environ.get("PBS_JOBID", ""))
    names = re.findall(r"(?:^|,)(\w+)=", attributes.get("Variable_List", ""))
    return [] if "HOME" in names else [name for name in names if not name.startswith("PBS_")]


# --- the command that asks for a job ------------------------------------------------------------

_REPEATED = {
    "-A": "Account_Name",
    "-P": "project",
    "-N": "Job_Name",
    "-j": "Join_Path",
    "-k": "Keep_Files",
    "-m": "Mail_Points",
    "-M": "Mail_Users",
}
# A #PBS line: an option, or `-l` with a resource's name, and its value. The options -J and -t
# (Torque) are not read: they would start all tasks of a job array again.
_LINE = re.compile(r"^#PBS (-[^Jt\W](?: \w+(?==))?)[ =](.*)$", re.MULTILINE)
_LIST = "Resource_List."
_DEFAULTS = ("_pbs_project_default", "STDIN", "n", "a")
_DERIVED = {"nodect", "neednodes", "nodes", "select", "place", "soft_walltime"}
_DERIVED_FROM_CHUNKS = {"ncpus", "mem", "vmem", "mpiprocs", "ompthreads", "ngpus", "naccelerators"}


def is_torque(environ: Environ) -> bool:
    """Return whether this is Torque, whose qsub differs from OpenPBS's and PBS Pro's.

    Torque (Administrator Guide 6.1, `qsub`): the size is `-l nodes=2:ppn=4`, -F gives the script
    its arguments, and PBS_VERSION in a job begins with TORQUE. OpenPBS 23.06 and PBS Pro (Reference
    Guide 2022.1, `qsub`): the size is `-l select=2:ncpus=4`, there is no -F, and a program with its
    arguments follows `--`. Outside a job, this asks qsub for its version.
    """
    if environ.get("PBS_JOBID"):
        return environ.get("PBS_VERSION", "").startswith("TORQUE")
    version = ask_scheduler("sh", "-c", "qsub --version 2>&1") or ""
    return version.lower().startswith("version:")  # PBS Pro prints pbs_version = 23.06.06


def job_command(environ: Environ, script: Path, typed: Words) -> list[str]:
    """Return the qsub command for what was typed; -V forwards the variables.

    It requests what qstat shows of this job or, outside a job, one node; empty without a size.
    """
    command = _qsub(environ, script)
    arguments = typed[1:]
    if not command:
        return []
    if not is_torque(environ):
        return [*command, "--", str(script), *arguments]
    return [*command, *(["-F", shlex.join(arguments)] if arguments else []), str(script)]


def own_command(environ: Environ, typed: Words) -> list[str]:
    """Return the qsub command that submits this batch job again; empty if qstat does not show it.

    It submits the user's batch file or, if a command followed `--`, what was typed. Also empty for
    a file that asks for a job array.
    """
    attributes = ask_qstat(environ.get("PBS_JOBID", ""))
    words = (attributes.get("Submit_arguments") or attributes.get("submit_args") or "").split()
    if "--" in words:
        return job_command(environ, Path(typed[0]), typed)

    file = Path(environ.get("PBS_O_WORKDIR", ""), *words[-1:])  # qsub's last argument
    # No file if qsub read it from a pipe. One with -J (Torque: -t) would start the whole array.
    array = re.compile(r"^#PBS\b.*\s-[Jt]", re.MULTILINE)
    if not file.is_file() or array.search(file.read_text(errors="replace")):
        return []
    command = _qsub(environ, file)
    return [*command, words[-1]] if command else []


def _qsub(environ: Environ, script: Path) -> list[str]:
    """Return qsub with the options that a job needs to be like this one; see job_command().

    The job's attributes override the script's #PBS lines; an empty one removes the line's option.
    Asks qstat in a job; empty if the job's size is not known.
    """
    attributes = _this_job(environ) if environ.get("PBS_JOBID") else _one_node(environ)
    resources = _resources(attributes, has_chunks=not is_torque(environ))
    if not resources:
        return []

    options = dict(_LINE.findall(script.read_text(errors="surrogateescape"))) | resources
    options |= {name: value for name, value in attributes.items() if name.startswith("-")}

    command = ["qsub", "-V"]
    for option, value in options.items():
        if value:
            letter, _, name = option.partition(" ")
            command += [letter, f"{name}={value}" if name else value]
    return command


def _resources(attributes: Mapping[str, str], *, has_chunks: bool) -> dict[str, str]:
    """Return the values of qsub's -l, by `-l NAME`; empty if the job's size is not known.

    `has_chunks` is false for Torque. Omits what PBS derives from these: qsub would reject both.
    """
    first = ["select", "place", "walltime"] if has_chunks else ["nodes", "walltime"]
    given = {name.removeprefix(_LIST): attributes[name] for name in attributes if _LIST in name}
    if not given.get(first[0]):
        return {}

    derived = _DERIVED | (_DERIVED_FROM_CHUNKS if has_chunks else set())
    derived |= {name for chunk in read_chunks(attributes) for name in chunk}
    names = [*first, *(name for name in given if name not in derived)]
    return {f"-l {name}": given[name] for name in names if name in given}


def _one_node(environ: Environ) -> dict[str, str]:
    """Return the attributes of a job of one node, with a CPU for each rank."""
    ranks = environ.get("NPROC_PER_NODE") or "1"
    select = f"1:ncpus={ranks}:mpiprocs={ranks}"
    return {f"{_LIST}select": select, f"{_LIST}nodes": f"1:ppn={ranks}"}


def _this_job(environ: Environ) -> dict[str, str]:
    """Return this job's attributes from qstat, and by letter the options it was submitted with."""
    attributes = ask_qstat(environ["PBS_JOBID"])
    options = {
        option: attributes[name]
        for option, name in _REPEATED.items()
        if name in attributes and attributes[name] not in _DEFAULTS
    }

    if folder := os.path.dirname(attributes.get("Output_Path", "").partition(":")[2]):
        options["-o"] = f"{folder}/".removeprefix(f"{os.getcwd()}/")  # PBS names the file
    if queue := environ.get("PBS_O_QUEUE"):  # the queue of the submission; it may route jobs
        options["-q"] = queue
    if attributes.get("Rerunable") == "False":
        options["-r"] = "n"
    return {f"{_LIST}walltime": "", **attributes, **options}  # "" removes the script's
