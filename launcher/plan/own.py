"""What a scheduler sets for one node alone, and must never travel to the others.

A value that the user chose is everyone's: one that was typed for this launch or exported in the
job's script, given to qsub, named in FORWARD_ENV, or set by VENV, CONDA_ENV and MODULES.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.plan import pbs
from launcher.plan.plan import Plan
from launcher.text import short_host_name

GPUS = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
)
THREADS = "OMP_NUM_THREADS"
OWN = {  # by a variable that tells of the scheduler; srun sets SLURM's anew on each node
    "PBS_JOBID": (*GPUS, THREADS, "NCPUS"),
    "SLURM_GPUS_ON_NODE": GPUS,
    "LSB_JOBID": GPUS,
}
ANSWER_S = 5.0  # for pbsdsh on all nodes
# A task's stdout is the job's, not pbsdsh's; what else is there, secrets too, stays there.
_ANSWER = 'env -0 | grep -z -E "^($1)=" >"$0/$PBS_NODENUM"'


class Own(NamedTuple):
    """What the scheduler has set for this node alone."""

    names: Collection[str]
    is_default: bool  # THREADS is PBS's own choice: all CPUs of the chunk, for each rank


def find_own(environ: Mapping[str, str], activated: Collection[str], begun: Collection[str]) -> Own:
    """Return which variables the scheduler has set for this node alone.

    `activated` are the names that the Python's environment has changed, `begun` the `NAME=value`
    that the shell was begun with: in the job, a value that is not among them was typed.
    """
    signs = [sign for sign in OWN if environ.get(sign)]
    names = {name for sign in signs for name in OWN[sign]} & environ.keys()
    is_shell = any(f"{sign}={environ[sign]}" in begun for sign in signs)
    job = environ.get("PBS_JOBID")
    attributes = pbs.ask_qstat(job) if job and names else {}
    given = f",{attributes.get('Variable_List', '')},".replace("\\,", ",")
    values = {name: f"{name}={environ[name]}" for name in names}
    is_typed = {name: is_shell and value not in begun for name, value in values.items()}
    chosen = {name for name in names if is_typed[name] or f",{values[name]}," in given}
    chosen |= {*activated, *asked_names(environ)}
    threads = {chunk.get("ompthreads") for chunk in pbs.read_chunks(attributes)} - {None}
    if len(threads) == 1 or environ.get(THREADS) != environ.get("NCPUS"):
        chosen.add(THREADS)
    names -= chosen
    return Own(names, THREADS in names and not threads)


def asked_names(environ: Mapping[str, str]) -> list[str]:
    """Return the names that FORWARD_ENV has."""
    return environ.get("FORWARD_ENV", "").replace(",", " ").split()


def read_begun() -> set[str]:
    """Return the `NAME=value` that the shell was begun with; none where it is a scheduler's."""
    try:
        text = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:  # another user's
        text = b""
    return {*os.fsdecode(text).split("\0")}


def ask_nodes(
    names: Collection[str], plan: Plan, environ: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return each node's own values by its name; this node's alone if pbsdsh does not answer."""
    hosts = list(dict.fromkeys(pbs.read_lines(environ)))
    found: dict[str, Mapping[str, str]] = {}
    if names and len(hosts) > 1 and len(plan.nodes) > 1:
        with contextlib.suppress(OSError):  # the preflight says that the folder cannot be written
            found = ask_pbsdsh(names, hosts, plan.directory / plan.log_dir)
    here = {str(number): host for number, host in enumerate(hosts)}
    found[here.get(environ.get("PBS_NODENUM", "0"), short_host_name())] = environ
    there = {node.name: found.get(node.name.rpartition("@")[2]) for node in plan.nodes}
    return {
        node: {name: values[name] for name in names if name in values}
        for node, values in there.items()
        if values is not None
    }


def ask_pbsdsh(
    names: Collection[str], hosts: Sequence[str], folder: Path
) -> dict[str, Mapping[str, str]]:
    """Return the values that PBS gives a task on each host, of those that answer in time."""
    found: dict[str, Mapping[str, str]] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".nodes-", dir=folder) as answers:
        task = ["pbsdsh", "--", "/bin/sh", "-c", _ANSWER, answers, "|".join(names)]
        limit_s, null = ANSWER_S + len(hosts) // 10, subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(task, timeout=limit_s, stdin=null, stdout=null, stderr=null)
        for number, host in enumerate(hosts):
            with contextlib.suppress(OSError):
                if text := os.fsdecode(Path(answers, str(number)).read_bytes()):
                    found[host] = dict(line.partition("=")[::2] for line in text.split("\0"))
    return found


def find_unknown(own: Own, plan: Plan, values: Collection[str]) -> str:
    """Return a line on the nodes whose own values matter, but are not known; empty: none."""
    quiet = {"NCPUS", THREADS} if own.is_default else {"NCPUS"}
    missing = [node.name for node in plan.nodes if node.name not in values]
    names = sorted({*own.names} - quiet)
    if not (names and missing):
        return ""
    what = "what the scheduler set for this node alone is not sent to the others"
    cure = f"to send this node's, FORWARD_ENV='{' '.join(names)}'"
    return f"{' '.join(names)}: {what}, whose own is not known ({' '.join(missing)}); {cure}"
