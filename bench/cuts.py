"""What a run of two nodes does when a network cable is out for some seconds: `make bench-cuts`, or
python bench/cuts.py [SECONDS...].

On a cluster in a box (as root), over ssh from a login host and as a SLURM job, the cable of node 0,
of node 1 or of the login host, where ssh's launcher and SLURM's controller are, is pulled and put
back. The table shows what was said, and counted from the pull:

- when the failure block stood in the output;
- when no rank was left on any node;
- when the launcher had ended, or the job: SLURM may call it COMPLETING then, until it has heard of
  the node that was cut off.

A run that goes on after the cut is told to end, and its exit code is shown. SLURM keeps the default
of its SlurmdTimeout, by which it gives up a node: 300 s.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shape_runs import CLUSTER, ROOT, cluster
from table import describe_machine, render, write_section

CUTS_S = (3, 5, 8, 14, 25, 35, 120)
HOSTS = {"node 0": "node1", "node 1": "node2", "login": "login"}
START_S = 60.0  # until the first step
AFTER_S = 60.0  # beyond the end of the cut, for the run to end
ON_S = 5.0  # after the cut, a run that still makes steps goes on
_BLOCK = re.compile(rb"^(?:FAILED +|(?=stopped ))(.*)", re.MULTILINE)


@dataclass
class Run:
    """One run of two nodes with a rank each."""

    folder: Path
    start: Callable[[Path, dict[str, str]], Callable[[], int | None]]

    def __enter__(self) -> Run:
        self.output.touch()
        self.wait(are_connected, START_S)  # again, after the cut before
        self.poll = self.start(self.folder, {**os.environ, **self.variables})
        if self.wait(lambda: b"step" in self.output.read_bytes(), START_S) is None:
            raise RuntimeError(f"no start:\n{self.output.read_text()}")
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "enough").touch()
        self.wait(lambda: self.poll() is not None, AFTER_S)

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def variables(self) -> dict[str, str]:
        return {
            "FOLDER": str(self.folder),
            "FORWARD_ENV": "FOLDER",
            "LOG_DIR": str(self.folder),
            "TRAIN_SCRIPT": str(ROOT / "bench/cut_steps.py"),
            "GRACE": "5",
            "PYTHON": sys.executable,
            "NO_COLOR": "1",
        }

    @staticmethod
    def wait(has_come: Callable[[], bool], limit_s: float) -> float | None:
        """Return the seconds until it has come; None: not within the limit."""
        began = time.monotonic()
        while not has_come():
            if time.monotonic() > began + limit_s:
                return None
            time.sleep(0.1)
        return time.monotonic() - began

    def is_left(self) -> bool:
        """Whether a rank is still there: each holds a lock on a file."""
        for rank in range(2):
            with (self.folder / f"rank_{rank}").open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
        return False


def are_connected() -> bool:
    """Whether each host reaches the sshd of every other."""
    pairs = itertools.permutations(HOSTS.values(), 2)
    reach = ["bash", "-c", 'exec 2>/dev/null </dev/tcp/"$0"/22']
    tries = (subprocess.run([CLUSTER, "run", one, *reach, other]) for one, other in pairs)
    return all(done.returncode == 0 for done in tries)


def on_login(*command: str) -> str:
    return subprocess.run(
        [CLUSTER, "run", "login", *command], capture_output=True, text=True
    ).stdout


def set_slurmd_timeout(seconds: int) -> None:
    conf = Path(os.environ["CLUSTER_DIR"], "etc/slurm.conf")
    conf.write_text(re.sub(r"(?m)^SlurmdTimeout=.*", f"SlurmdTimeout={seconds}", conf.read_text()))
    on_login("scontrol", "reconfigure")


def are_idle() -> bool:
    """Whether SLURM would start a job on both nodes."""
    return {*on_login("sinfo", "--noheader", "--format=%T").split()} == {"idle"}


def over_ssh(folder: Path, variables: dict[str, str]) -> Callable[[], int | None]:
    """Start the run; returns what gives its exit code once it has ended."""
    script = ROOT / "scripts/ssh/launch_torchrun_auto.sh"
    with (folder / "output").open("wb") as output:
        launcher = subprocess.Popen(
            [CLUSTER, "run", "login", str(script), "-", "1", "node1", "node2"],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return launcher.poll


def as_job(folder: Path, variables: dict[str, str]) -> Callable[[], int | None]:
    """Submit the run; returns what gives the job's exit code once it is no longer held."""
    for state in ("down", "resume"):  # else SLURM asks a node that was lost again in minutes
        on_login("scontrol", "update", "nodename=node[1-2]", f"state={state}", "reason=cut")
    Run.wait(are_idle, START_S)
    submit = ["sbatch", "--parsable", f"--output={folder}/output", "--nodes=2"]
    submit += ["--gpus-per-node=1", "--no-requeue", str(ROOT / "scripts/slurm/slurm_train.sh"), "-"]
    job = subprocess.check_output(
        [CLUSTER, "run", "login", *submit], cwd=folder, env=variables, text=True
    ).strip()

    def code() -> int | None:
        told = on_login("scontrol", "show", "job", job)
        if not re.search(r"JobState=(COMPLET(?:ING|ED)|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)", told):
            return None
        status, signum = map(int, re.findall(r" ExitCode=(\d+):(\d+)", told)[0])
        return status or (128 + signum if signum else 0)

    return code


WAYS = {"ssh": over_ssh, "SLURM": as_job}


def main() -> None:
    """Write the table; exits with 1 where a run holds its nodes with nothing running."""
    seconds = [int(word) for word in sys.argv[1:]] or CUTS_S
    with cluster(is_wanted=True) as is_up:
        if not is_up:
            sys.exit(1)
        set_slurmd_timeout(300)
        rows = []
        for way, cut_s, where in itertools.product(WAYS, seconds, HOSTS):
            rows.append([way, where, f"{cut_s} s", *cut(way, HOSTS[where], cut_s)])
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = ["under", "cut off", "for", "said", "after", "ranks gone after", "ended after", "code"]
    text = f"{describe_machine('make bench-cuts')}\n\n{render(head, rows)}"
    if sys.argv[1:]:
        print(text)
    else:
        write_section("cuts", text)
    sys.exit(any("held" in cell for row in rows for cell in row))


def cut(way: str, host: str, cut_s: int) -> list[str]:
    """Cut a host off during a run; returns the cells that tell what came of it."""
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder), WAYS[way]) as run:
        marks: dict[str, float] = {}
        began = time.monotonic()
        subprocess.run([CLUSTER, "cut", host], check=True)
        is_cut, steps = True, 0
        while time.monotonic() < began + cut_s + AFTER_S and len(marks) < 3:
            now = time.monotonic() - began
            if is_cut and now >= cut_s:
                subprocess.run([CLUSTER, "restore", host], check=True)
                is_cut, steps = False, run.output.read_bytes().count(b"step")
            told = run.output.read_bytes()
            if _BLOCK.search(told):
                marks.setdefault("said", now)
            if not run.is_left():
                marks.setdefault("gone", now)
            if (host != "login" or not is_cut or way == "ssh") and run.poll() is not None:
                marks.setdefault("ended", now)
                marks.setdefault("said", now)
            if not is_cut and now > cut_s + ON_S and not marks and told.count(b"step") > steps + 9:
                break
            time.sleep(0.1)
        if is_cut:
            subprocess.run([CLUSTER, "restore", host], check=True)
        if not marks:
            return [*went_on(run), str(run.poll())]
        blocks = _BLOCK.finditer(run.output.read_bytes())
        said = [" ".join(block[1].decode().split()) for block in blocks]
        times = [f"{marks[name]:.0f} s" if name in marks else "" for name in ("said", "gone")]
        ended = f"{marks['ended']:.0f} s" if "ended" in marks else "held"
        return ["; ".join(said) or "nothing", *times, ended, str(run.poll())]


def went_on(run: Run) -> list[str]:
    """Tell the run to end; returns the cells of one that nothing has ended."""
    (run.folder / "enough").touch()
    ended = run.wait(lambda: run.poll() is not None, AFTER_S)
    return ["nothing; it went on", "", "", "" if ended is not None else "held"]


if __name__ == "__main__":
    main()
