"""Run a script under torchrun and under our launchers, and compare the outcomes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import CLUSTER, OWN_STORES, ROOT

RANKS = 2


@dataclass(frozen=True)
class Shape:
    """One script: the words after torchrun's own options, and what it needs."""

    name: str
    words: tuple[str, ...]
    needs: str = ""  # a package
    typed: str = ""  # on its standard input
    restarts: int = 0
    code: int = 0  # of the rank that fails first; torchrun's is then 1
    limit_s: float = 75.0  # for one run


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    code: int
    stdout: list[str]  # the lines of all ranks, sorted
    stderr: list[str]
    files: dict[str, str]  # path -> hash
    raw: str = field(repr=False, default="")


Way = Callable[[Shape, Path], Outcome]


# --- the launchers ------------------------------------------------------------------------------


class Launchers:
    """Runs a shape in a folder under each launcher."""

    def __init__(self, python: Path, *, has_cluster: bool, port: int = 29700) -> None:
        """Each run of torchrun uses the next port after `port`."""
        self.python = str(python)
        self._extensions = python.parents[1] / "extensions"
        self.has_cluster = has_cluster
        self._port = port

    def ways(self) -> dict[str, tuple[Way, Way] | None]:
        """Return the columns: torchrun's way and ours; None without a cluster."""
        return {
            "one machine": (self.torchrun, self.launch),
            "two nodes over ssh": (self.torchrun_on_two, self.ssh) if self.has_cluster else None,
            "SLURM, two nodes": (self.torchrun_on_two, self.slurm) if self.has_cluster else None,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of every run."""
        python = Path(self.python)
        return {
            **os.environ,
            "PYTHON": self.python,
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "SHOW_RANKS": "all",
            "GRACE": "5",
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "FORWARD_ENV": "HF_HUB_OFFLINE DS_ACCELERATOR",
            "TORCH_EXTENSIONS_DIR": str(self._extensions),  # what DeepSpeed compiles
            "NO_COLOR": "1",
        }

    def torchrun(self, shape: Shape, folder: Path) -> Outcome:
        self._port += 1
        return self._run([self._torchrun(shape, folder)], shape, folder, OWN_STORES)

    def launch(self, shape: Shape, folder: Path) -> Outcome:
        options = [f"--nproc-per-node={RANKS}", f"--max-restarts={shape.restarts}"]
        return self._run([[str(ROOT / "scripts/launch.sh"), *options, *shape.words]], shape, folder)

    def torchrun_on_two(self, shape: Shape, folder: Path) -> Outcome:
        self._port += 1
        where = ["--nnodes=2", "--master-addr=node1"]
        commands = [
            [
                CLUSTER,
                "run",
                f"node{node + 1}",
                *self._torchrun(shape, folder, *where, f"--node-rank={node}"),
            ]
            for node in range(2)
        ]
        return self._run(commands, shape, folder, OWN_STORES)

    def ssh(self, shape: Shape, folder: Path) -> Outcome:
        script, arguments = self._train_script(shape)
        command = [str(ROOT / "scripts/ssh/launch_torchrun_auto.sh"), "-", "1", "node1", "node2"]
        more = {"TRAIN_SCRIPT": script, "MAX_RESTARTS": str(shape.restarts)}
        return self._run([[CLUSTER, "run", "login", *command, *arguments]], shape, folder, more)

    def slurm(self, shape: Shape, folder: Path) -> Outcome:
        script, arguments = self._train_script(shape)
        more = {"TRAIN_SCRIPT": script, "MAX_RESTARTS": str(shape.restarts)}
        self._clear_locks()
        logs = logs_of(folder)
        logs.mkdir()
        submit = ["sbatch", "--parsable", f"--output={logs}/stdout", f"--error={logs}/stderr"]
        submit += [
            "--nodes=2",
            "--gpus-per-node=1",
            str(ROOT / "scripts/slurm/slurm_train.sh"),
            "-",
        ]
        job = subprocess.check_output(
            [CLUSTER, "run", "login", *submit, *arguments],
            env={**self.environment, **more, "LOG_DIR": str(logs)},
            cwd=folder,
            text=True,
        ).strip()
        code = self._wait_for(job, shape.limit_s)
        stdout, stderr = ((logs / name).read_bytes().decode() for name in ("stdout", "stderr"))
        return outcome(code, stdout, stderr, folder)

    def _clear_locks(self) -> None:
        """Remove the locks of a run that was killed while DeepSpeed was compiling."""
        for lock in self._extensions.glob("*/lock"):
            lock.unlink()

    def _wait_for(self, job: str, limit_s: float) -> int:
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit:
            told = subprocess.check_output(
                [CLUSTER, "run", "login", "scontrol", "show", "job", job], text=True
            )
            if re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)", told):
                return int(re.findall(r" ExitCode=(\d+):", told)[0])
            time.sleep(0.3)
        subprocess.run([CLUSTER, "run", "login", "scancel", job], check=True)
        return 124

    def _torchrun(self, shape: Shape, folder: Path, *where: str) -> list[str]:
        """Return the command. Ranks write to files, because torchrun mixes lines on a terminal."""
        options = ["--redirects=3", f"--log-dir={logs_of(folder)}"]
        options += [f"--nproc-per-node={1 if where else RANKS}", f"--master-port={self._port}"]
        options += [f"--max-restarts={shape.restarts}"]
        return [self.python, "-m", "torch.distributed.run", *options, *where, *shape.words]

    def _train_script(self, shape: Shape) -> tuple[str, list[str]]:
        count = 2 if shape.words[0] == "-m" else 1
        return " ".join(shape.words[:count]), ["--", *shape.words[count:]]

    def _run(
        self,
        commands: Sequence[Sequence[str]],
        shape: Shape,
        folder: Path,
        more: dict[str, str] | None = None,
    ) -> Outcome:
        self._clear_locks()
        logs = logs_of(folder)
        logs.mkdir()
        (logs / "stdin").write_text(shape.typed)
        running = []
        for number, command in enumerate(commands):
            with (
                (logs / "stdin").open() as stdin,
                (logs / f"stdout{number}").open("wb") as stdout,
                (logs / f"stderr{number}").open("wb") as stderr,
            ):
                running.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env={**self.environment, **(more or {}), "LOG_DIR": str(logs)},
                        stdin=stdin,
                        stdout=stdout,
                        stderr=stderr,
                    )
                )
        try:
            codes = [process.wait(shape.limit_s) for process in running]
        except subprocess.TimeoutExpired:
            for process in running:
                process.terminate()
            codes = [124]
            for process in running:
                process.wait()
        is_redirected = "--redirects=3" in commands[0]
        told, errors = (
            "".join(
                file.read_bytes().decode()
                for file in logs.glob(
                    f"**/attempt_*/**/{name}.log" if is_redirected else f"{name}*"
                )
            )
            for name in ("stdout", "stderr")
        )
        return outcome(max(codes), told, errors, folder)


def logs_of(folder: Path) -> Path:
    """Return the folder for a run's logs, beside the folder in which it runs."""
    return folder.with_name(f"{folder.name}.logs")


def outcome(code: int, stdout: str, stderr: str, folder: Path) -> Outcome:
    """Return a run's outcome. Tracebacks that follow from another are only in the node's log."""
    node_logs = logs_of(folder).glob("*/node_*.log")
    logged = "".join(file.read_bytes().decode() for file in node_logs)
    return Outcome(
        code,
        lines_of(stdout),
        lines_of(stderr + logged),
        files_of(folder),
        f"{stdout}\n--\n{stderr}",
    )


def lines_of(told: str) -> list[str]:
    """Return what the ranks printed, as sorted lines without the labels of node and rank."""
    label = re.compile(r"^(?:\[\d+\] )?(?:\[rank([\d,-]+)\]:? )?")
    lines: list[str] = []
    for line in re.split(r"[\r\n]+", told):
        found = label.match(line)
        assert found is not None
        lines += [line[found.end() :].strip()] * count_ranks(found[1] or "0")
    return sorted(line for line in lines if line and not line.startswith("[Gloo] Rank "))


def count_ranks(ranks: str) -> int:
    """Return how many ranks a label names: 4 for "0-2,5"."""
    runs = (run.partition("-") for run in ranks.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in runs)


def files_of(folder: Path) -> dict[str, str]:
    """Return a hash of each file, except Python's caches."""
    files = (
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


# --- the comparison -----------------------------------------------------------------------------


RATE = re.compile(r"\d(it/s|s/it)\b")


def differences(ours: Outcome, once: Outcome, again: Outcome, code: int) -> list[str]:
    """Return what differs from torchrun's two runs, in words.

    Args:
        code: the exit code that our launcher should have.
    """
    found = [] if ours.code == code else [f"exit code {ours.code}"]
    if once.stdout != again.stdout:
        found += compare("stdout", *map(without_numbers, (ours.stdout, once.stdout)))
    else:
        found += compare("stdout", ours.stdout, once.stdout)
    # A progress bar with a rate is the same in two runs only by chance.
    common = [line for line in once.stderr if line in again.stderr and not RATE.search(line)]
    found += compare("stderr", [line for line in common if line in ours.stderr], common)
    found += [f"file {name}" for name in sorted(ours.files.keys() ^ once.files.keys())]
    for name, content in sorted(once.files.items()):
        if again.files.get(name) == content != ours.files.get(name, content):
            found.append(f"content of {name}")
    return found


def compare(what: str, ours: list[str], theirs: list[str]) -> list[str]:
    missing, more = (Counter(theirs) - Counter(ours)), (Counter(ours) - Counter(theirs))
    found = []
    if missing:
        found.append(f"{what} lacks {missing.total()} lines, such as {next(iter(missing))!r}")
    if more:
        found.append(f"{what} has {more.total()} more lines, such as {next(iter(more))!r}")
    return found


def without_numbers(lines: list[str]) -> list[str]:
    return [re.sub(r"\d+(\.\d+)?", "N", line) for line in lines]
