"""Variables that a scheduler sets for only one node, which must not be sent to the others.

A value that the user chose goes to all nodes: one that was typed for this launch or exported in the
job's script, given to qsub, named in FORWARD_ENV, or set by SITE, VENV, CONDA_ENV or MODULES.
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.plan import pbs
from launcher.plan.plan import Plan
from launcher.plan.typed import Choices
from launcher.proc import read_proc
from launcher.processes import read_stat
from launcher.text import Environ, Say, short_host_name
from launcher.wire import limits

GPUS = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
)
THREADS = "OMP_NUM_THREADS"
OWN = {  # by a variable that names the scheduler; srun sets SLURM's again on each node
    "PBS_JOBID": (*GPUS, THREADS, "NCPUS"),
    "SLURM_GPUS_ON_NODE": GPUS,
    "LSB_JOBID": GPUS,
}
_SHELLS = ("bash", "dash", "zsh", "fish", "ksh", "ksh93", "mksh", "tcsh", "busybox")
# Each node writes its variables $1 to a file in the folder $0: a task's stdout is the job's, not
# pbsdsh's. Other variables, including secrets, are not copied.
_ANSWER = 'env -0 | grep -z -E "^($1)=" >"$0/$PBS_NODENUM"'


@dataclass
class Own:
    """What the scheduler has set for this node only, and for each of the others."""

    names: Collection[str]
    is_default: bool  # THREADS is PBS's own choice: all CPUs of the chunk, for each rank
    values: Mapping[str, Environ] = field(default_factory=dict)  # by node

    def fetch_values(self, plan: Plan, say: Say) -> None:
        """Set `values`. Warns about nodes whose values are unknown.

        May run pbsdsh and wait for it (see ask_for_values).
        """
        self.values = ask_for_values(self.names, plan)
        # A node loses nothing without its NCPUS, or without PBS's default number of threads.
        quiet = {"NCPUS", THREADS} if self.is_default else {"NCPUS"}
        names = " ".join(sorted({*self.names} - quiet))
        missing = [node.name for node in plan.nodes if node.name not in self.values]
        if names and missing:
            say(
                f"warning: {names}: the scheduler's values for this node are not sent to the "
                f"others, whose values are unknown ({', '.join(missing)}); "
                f"to send this node's values, set FORWARD_ENV='{names}', unless they are UUIDs of "
                "its GPUs"
            )

    def of_node(self, node: str, nproc: int = 0) -> dict[str, str]:
        """Return what the scheduler set for a node, for its preflight or its agent's `nproc` ranks.

        Empty for a node whose values are unknown.
        """
        values = dict(self.values.get(node, {}))
        # PBS's default would start as many threads as CPUs in each of several ranks.
        if self.is_default and nproc != 1:
            values.pop(THREADS, None)
        return values


def find_own(choices: Choices, begun: Collection[str]) -> Own:
    """Return which variables the scheduler has set for this node only; `values` are still empty.

    `begun` has the shell's initial variables, as `NAME=value`: in the job, a value that is not
    among them was typed. A value that the Python environment changed counts as typed. In a PBS job,
    qstat is asked for those that qsub sent.
    """
    environ = choices.environ
    # The schedulers of this job, by the variables that name them.
    signs = [sign for sign in OWN if environ.get(sign)]
    names = {name for sign in signs for name in OWN[sign]} & environ.keys()
    # In a shell that is older than the job, the scheduler's values are as new as typed ones.
    began_in_job = any(f"{sign}={environ[sign]}" in begun for sign in signs)
    attributes = pbs.ask_qstat(environ.get("PBS_JOBID", "")) if names else {}
    sent = f",{attributes.get('Variable_List', '')},".replace("\\,", ",")

    chosen = {*choices.activated, *asked_names(environ)}
    for name in names:
        value = f"{name}={environ[name]}"
        is_typed = began_in_job and value not in begun
        if is_typed or f",{value}," in sent:
            chosen.add(name)

    # The request chose one number for all nodes, or this number is not PBS's default, NCPUS.
    threads = {chunk.get("ompthreads") for chunk in pbs.read_chunks(attributes)} - {None}
    if len(threads) == 1 or environ.get(THREADS) != environ.get("NCPUS"):
        chosen.add(THREADS)
    names -= chosen
    return Own(names, THREADS in names and not threads)


def asked_names(environ: Environ) -> list[str]:
    """Return the names in FORWARD_ENV."""
    return environ.get("FORWARD_ENV", "").replace(",", " ").split()


def read_begun() -> set[str]:
    """Return the shell's initial variables, as `NAME=value`; none of another user's shell."""
    return {*os.fsdecode(read_proc(_find_shell(), "environ")).split("\0")}


def _find_shell() -> int:
    """Return the id of the session's shell that started this process; without one, of the parent.

    Programs such as timeout or make may stand between: they already have the variables that were
    typed with the command.
    """
    pid = os.getppid()
    with contextlib.suppress(OSError, IndexError):  # another user's, or it has ended
        while os.getsid(pid) == os.getsid(0):
            if Path(f"/proc/{pid}/exe").readlink().name in _SHELLS:
                return pid
            pid = int(read_stat(pid)[1])
    return os.getppid()


def ask_for_values(names: Collection[str], plan: Plan) -> dict[str, dict[str, str]]:
    """Return what the scheduler set for each node, by node; only here if pbsdsh does not answer.

    pbsdsh is asked, and waited for, only if there are several nodes, and variables to ask for.
    """
    environ = plan.environ
    hosts = list(dict.fromkeys(pbs.read_lines(environ)))
    by_host = dict[str, Environ]()
    if names and len(hosts) > 1 and len(plan.nodes) > 1:
        with contextlib.suppress(OSError):  # the preflight reports a folder that is not writable
            by_host = ask_pbsdsh(names, hosts, plan.directory / plan.log_dir)

    host_of = {str(number): host for number, host in enumerate(hosts)}
    here = host_of.get(environ.get("PBS_NODENUM", "0"), short_host_name())
    by_host[here] = environ  # known without pbsdsh

    by_node = {}
    for node in plan.nodes:
        if node.host in by_host:
            values = by_host[node.host]
            by_node[node.name] = {name: values[name] for name in names if name in values}
    return by_node


def ask_pbsdsh(names: Collection[str], hosts: Sequence[str], folder: Path) -> dict[str, Environ]:
    """Return the values that PBS gives a task, for each host that answers in time.

    Waits for all hosts, PBSDSH_S seconds and more for many. Each task writes a file to a temporary
    folder in `folder`, which is created. Raises OSError if that or the start of pbsdsh fails.
    """
    by_host = dict[str, Environ]()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".nodes-", dir=folder) as answers:
        task = ["pbsdsh", "--", "/bin/sh", "-c", _ANSWER, answers, "|".join(names)]
        limit_s = limits.PBSDSH_S + len(hosts) // 10
        null = subprocess.DEVNULL
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(task, timeout=limit_s, stdin=null, stdout=null, stderr=null)

        for number, host in enumerate(hosts):
            with contextlib.suppress(OSError):
                if text := os.fsdecode(Path(answers, str(number)).read_bytes()):
                    by_host[host] = dict(line.partition("=")[::2] for line in text.split("\0"))
    return by_host
