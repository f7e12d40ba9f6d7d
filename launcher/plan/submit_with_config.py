"""Work out the SLURM job that a run needs, and submit it: scripts/submit_with_config.sh."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from distributed import hostlist
from distributed.environment import new_run_id
from distributed.errors import REFUSED, Refused
from launcher.plan.check_config import check_config
from launcher.plan.make_plan import make_plan
from launcher.plan.resume import resolve_script
from launcher.plan.settings import read_number
from launcher.plan.typed import Typed, Words
from launcher.text import PlanError, count, did_you_mean, print_row, warn

SBATCH_OPTIONS = ("partition", "account", "qos", "mem", "time")  # for every job
PER_GPU = ("cpus_per_gpu", "mem_per_gpu")  # for jobs with GPUs
OWN = (
    "config",
    "num_gpus_train",
    "num_gpus",
    "prepare",
    "nodelist",
    *SBATCH_OPTIONS,
    "dependency",
    "chain",
    *PER_GPU,
)
_OF_TRAINING = ("seed", "task", "resume")  # train.py's settings without a dot
_GPUS = re.compile(r"gpu:(?:[^:,(]+:)?(\d+)")  # as in gpu:a100:8(S:0-1)
_JOB_ID = re.compile(r"(\d+)(?:;\S+)?")  # a cluster's name may follow
MOST_GPUS = 100_000
MOST_JOBS = 1000  # of a chain


@dataclass(frozen=True)
class Size:
    """The smallest number of nodes that have the GPUs, with equally many on each."""

    num_nodes: int
    gpus: int  # per node
    is_exclusive: bool  # all GPUs of every node are used


def run(typed: Typed) -> int:
    """Submit the training. Returns the exit code (with --wait, the job's).

    Asks sinfo for the nodes' GPUs, has train.py check the config, and creates logs/, unless this is
    a dry run. Raises PlanError, LauncherError, HostlistError or Refused if the settings or the
    cluster do not allow the job. Exits if train.py or sbatch fails (see check_config, submit_all).
    """
    own, settings = split_settings(typed)
    gpus = read_number("num_gpus_train", own["num_gpus_train"], 1, MOST_GPUS)
    partition = own["partition"] or typed.environ.get("SBATCH_PARTITION", "")
    size = choose_size(gpus, gpus_of_nodes(partition))

    nodelist = own["nodelist"]
    if size.num_nodes == 1 and len(hostlist.expand(nodelist or "any")) > 1:
        warn(
            f"{typed.program}: warning: {count(gpus, 'GPU')} fit on one node; "
            f"nodelist={nodelist} is ignored"
        )
        nodelist = ""

    checked = replace(
        typed,
        fanout="check",
        config=own["config"],
        setting=settings,
        passed=(),
        nnodes=str(size.num_nodes),
        nproc=str(size.gpus),
        master="unknown",
    )
    plan = check_config(make_plan(checked))
    own["prepare"] = choose_preparation(own, plan.prepare, typed.program)

    script = "slurm_train.sh" if size.num_nodes > 1 else "slurm_train_single_node.sh"
    job = [f"--nodes={size.num_nodes}", f"--gpus-per-node={size.gpus}"]
    job += [f"--nodelist={nodelist}"] if nodelist else []
    job += ["--exclusive"] if size.is_exclusive else []
    job += [f"--{name.replace('_', '-')}={own[name]}" for name in PER_GPU if own[name]]
    job += [resolve_script(f"scripts/slurm/{script}"), plan.config or "-", *settings]
    job += ["--", *typed.rest] if typed.rest else []

    if not typed.is_dry_run:
        Path("logs").mkdir(exist_ok=True)  # SLURM does not create it, and the job fails silently
    return submit_all(typed, own, size, job)


# --- settings and size --------------------------------------------------------------------------


def split_settings(typed: Typed) -> tuple[dict[str, str], list[str]]:
    """Return the settings of this script by name ("" if not given), and those of the training.

    Raises PlanError if one is unknown, missing or not a valid number, or if --wait is given with
    several jobs.
    """
    own = dict.fromkeys(OWN, "")
    is_ours = not typed.environ.get("TRAIN_SCRIPT")
    others = []
    for setting in typed.setting:
        name, _, value = setting.partition("=")
        if name in OWN:
            own[name] = value
            continue
        if "." not in name and name not in _OF_TRAINING and is_ours:
            known = f"known settings: {', '.join(OWN)}, and the keys of the config"
            raise PlanError(f"unknown setting {name!r}; {did_you_mean(name, OWN)}{known}")
        others.append(setting)

    for name in "num_gpus_train", "config":
        if not own[name]:
            raise PlanError(f"no {name}; usage: {typed.usage}")
    read_number("num_gpus", own["num_gpus"] or "0", 0, MOST_GPUS)
    if read_number("chain", own["chain"] or "1", 1, MOST_JOBS) > 1 and typed.wait:
        raise PlanError("--wait follows one job, but chain submits several; omit one")
    return own, others


def choose_preparation(own: Mapping[str, str], by_config: str, program: str) -> str:
    """Return the script that prepares the training, as typed or from the config; "" if none.

    Warns if num_gpus asks for GPUs for such a script, but there is none.
    """
    script = own["prepare"] or by_config
    if int(own["num_gpus"] or 0) and not script:
        warn(
            f"{program}: warning: num_gpus is for a script that prepares the training, but none is "
            "set; give prepare=SCRIPT, or set prepare in the config; only the training is "
            "submitted"
        )
    return script


def choose_size(gpus: int, nodes: Sequence[int]) -> Size:
    """Return the fewest nodes that share the GPUs evenly; `nodes` has each node's GPU count.

    If no size fits, return the one with the fewest nodes: SLURM then rejects it.
    """
    most = max(nodes)
    fewest = -(-gpus // most)  # rounded up
    sizes = [n for n in range(fewest, gpus + 1) if gpus % n == 0]
    fitting = [n for n in sizes if sum(have >= gpus // n for have in nodes) >= n]
    num_nodes = (fitting or sizes)[0]
    return Size(num_nodes, gpus // num_nodes, is_exclusive=gpus == num_nodes * most)


def gpus_of_nodes(partition: str) -> list[int]:
    """Ask sinfo for the GPU count of each node with GPUs in a partition; "" means the default one.

    Several partitions are separated by commas. Raises Refused if there are no GPUs, or if sinfo is
    missing or fails.
    """
    if shutil.which("sinfo") is None:
        raise Refused("env-missing", "sinfo is not installed here; submit from a login node")

    # The user's SINFO_* variables filter and format what sinfo prints.
    ask = 'unset "${!SINFO_@}"; exec sinfo -h -N -o "%P %N %G" ${1:+-p "$1"}'
    command = ["bash", "-p", "-c", ask, "bash", partition]
    answer = subprocess.run(command, stdout=subprocess.PIPE, errors="replace")
    if answer.returncode != 0:
        raise Refused("env-missing", "sinfo failed, see above; submit where sinfo works")

    nodes = read_sinfo(answer.stdout, of_default=not partition)
    if not nodes:
        where = f" in partition {partition}" if partition else " in the default partition"
        raise Refused("too-few-gpus", f"sinfo shows no GPUs{where}; choose another partition")
    return nodes


def read_sinfo(text: str, *, of_default: bool) -> list[int]:
    """Return the GPU count of each node with GPUs, in any partition or in the default one.

    `text` has a line for each partition and node, `debug* node1 gpu:a100:8`; `*` marks the default
    partition. If a cluster has none, all partitions count.
    """
    lines = re.findall(r"^(\S+) (\S+) (\S+)$", text, re.MULTILINE)  # a site may print others
    in_default = [line for line in lines if line[0].endswith("*")]

    chosen = in_default if of_default and in_default else lines
    gres_of = {node: gres for _, node, gres in chosen}  # a node may be in several partitions
    counts = (map(int, _GPUS.findall(gres)) for gres in gres_of.values())
    return [number for number in map(sum, counts) if number]


# --- sbatch -------------------------------------------------------------------------------------


def submit_all(typed: Typed, own: Mapping[str, str], size: Size, job: Words) -> int:
    """Submit the preparation job, if there is one, and the training job or jobs.

    In a chain, each job starts after the previous one, and resumes its run. The job that ends the
    run cancels the rest, which it finds by their name (slurm.end_chain), the run's id.
    Returns the exit code: the job's with --wait, and REFUSED if SLURM could never start the job.
    Exits with REFUSED if sbatch fails. A dry run prints the commands.
    """
    common = [f"--{name}={own[name]}" for name in SBATCH_OPTIONS if own[name]]
    common += [f"--chdir={typed.here}"] if typed.here != Path.cwd() else []  # a path through a link
    common += map("=".join, zip(typed.passed[::2], typed.passed[1::2], strict=True))

    if not typed.is_dry_run and (cause := refusal([*common, *job])):
        # SLURM would keep a job in the queue even if it can never start.
        warn(
            f"{typed.program}: {count(size.num_nodes, 'node')} x {size.gpus} GPUs: {cause}; "
            "sinfo shows what is available"
        )
        return REFUSED

    jobs = Submission(typed.program, is_dry_run=typed.is_dry_run)
    after = own["dependency"]
    why_unstarted = f": its dependency is {after}" if after else ""
    if own["prepare"]:
        preparation = ["--nodes=1", f"--gpus-per-node={own['num_gpus'] or 0}", *start_after(after)]
        preparation += ["--output=logs/slurm-%j.out", own["prepare"], own["config"]]
        prepared = jobs.submit([*common, *preparation])
        after = f"afterok:{prepared}"
        why_unstarted = f": job {prepared} failed; see logs/slurm-{prepared}.out"

    if (number := int(own["chain"] or 1)) > 1:
        chain = typed.environ.get("RUN_ID") or new_run_id()
        common += ["--no-requeue", f"--job-name=chain-{chain}"]  # the next job continues instead
        common += [f"--export=ALL,RUN_ID={chain},CHAIN={chain}"]
        for _ in range(number):
            after = f"afterany:{jobs.submit([*start_after(after), *common, *job])}"
        return 0

    words = start_after(after) + (["--wait"] if typed.wait else [])
    job_id = jobs.submit([*common, *words, *job], waits=typed.wait)
    if jobs.sbatch is None or not typed.wait:
        return 0
    return follow(typed.program, job_id, jobs.sbatch, why_unstarted)


def start_after(after: str) -> list[str]:
    """Return sbatch's options for a job that starts after others, such as `afterok:7`; "": none."""
    return [f"--dependency={after}", "--kill-on-invalid-dep=yes"] if after else []


def refusal(words: Words) -> str:
    """Ask sbatch, without a submission, why SLURM could never start a job; empty if it could."""
    command = ["sbatch", "--test-only", *words]
    # A site's banner goes to stdout.
    result = subprocess.run(command, capture_output=True, errors="replace")
    if result.returncode == 0:
        return ""
    return ["no answer", *result.stderr.strip().splitlines()][-1]


class Submission:
    """Submits the jobs of one command. If one is not accepted, names those that are queued."""

    def __init__(self, program: str, *, is_dry_run: bool) -> None:
        self.program = program
        self.is_dry_run = is_dry_run
        self.queued = list[str]()
        self.sbatch: subprocess.Popen[str] | None = None  # the last one

    def submit(self, words: Words, *, waits: bool = False) -> str:
        """Print the sbatch command and run it. Returns the job's id, which is added to `queued`.

        With `waits`, sbatch itself ends only when the job does; its process is left in `sbatch`.
        Exits with REFUSED if sbatch fails or prints no id. A dry run only prints.
        """
        command = ["sbatch", "--parsable", *words]
        print_row("submit", shlex.join(command))
        if self.is_dry_run:
            return "JOBID"

        self.sbatch = sbatch = subprocess.Popen(command, stdout=subprocess.PIPE, errors="replace")
        job_id = self._read_id(sbatch, waits=waits)
        is_waiting = waits and job_id  # sbatch, for the job's end
        code = 0 if is_waiting else sbatch.wait()
        if code or not job_id:
            self._exit_naming_queued(code)
        print_row("job", f"{job_id}    (tail -f logs/slurm-{job_id}.out, scancel {job_id})")
        self.queued.append(job_id)
        return job_id

    @staticmethod
    def _read_id(sbatch: subprocess.Popen[str], *, waits: bool) -> str:
        """Return the last line that is an id, and show the others: a site's sbatch may add some.

        With `waits`, return the first one at once. Empty if there is none.
        """
        assert sbatch.stdout is not None
        job_id = ""
        for line in sbatch.stdout:
            if match := _JOB_ID.fullmatch(line.strip()):
                job_id = match[1]
                if waits:
                    break
            else:
                warn(line.rstrip("\n"))
        return job_id

    def _exit_naming_queued(self, code: int) -> NoReturn:
        """Exit because sbatch failed with this code, or printed no id; name the earlier jobs."""
        why = f"failed with exit code {code}, see above" if code else "printed no job id"
        ids = " ".join(self.queued)
        rest = f"queued before it: {ids}; to cancel, run scancel {ids}"
        warn(f"{self.program}: sbatch {why}; {rest if ids else 'see squeue --me'}")
        raise SystemExit(REFUSED)


def follow(program: str, job_id: str, sbatch: subprocess.Popen[str], why_unstarted: str) -> int:
    """Show the job's log until `sbatch --wait` ends. Returns the job's exit code.

    If there is no log then, warns that the job did not start, and returns 1 instead of 0:
    `why_unstarted` has the likely reason, which may be empty.
    """
    log = f"logs/slurm-{job_id}.out"
    command = ["tail", f"--pid={sbatch.pid}", "--follow=name", "--retry", "--lines=+1", log]
    tail = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    code = sbatch.wait()
    tail.wait()

    if Path(log).exists():
        return code
    warn(f"{program}: job {job_id} did not start{why_unstarted}")
    return code or 1
