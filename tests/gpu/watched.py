"""Cause a fault in a run, and watch how the run ends: for `make test-nccl`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_runs import HAS_GPU, LAUNCH, PATIENCE, ROOT, Ended, Failed, Machine, share_gpus
from harness import TORCHRUN

PROBE = str(ROOT / "tests/gpu/nccl_probe.py")
START_S = 60.0 * PATIENCE  # for all ranks to take steps
OURS_S, THEIRS_S = 40.0 * PATIENCE, 10.0  # for a run to end after the fault
END_S = 10.0 * PATIENCE  # for a launcher to end after SIGTERM
AFTER_S = 1.0  # from the end to the last look at the GPU
SIGNALS = {"rank": signal.SIGKILL, "agent": signal.SIGKILL, "stop": signal.SIGSTOP}


def under_ours(ranks: int, *words: str) -> list[str]:
    return [LAUNCH, "--nproc-per-node", str(ranks), PROBE, *words]


def under_torchrun(ranks: int, *words: str) -> list[str]:
    own = ["--standalone", "--local-addr=127.0.0.1"]  # needs no resolvable host name
    return [*TORCHRUN, *own, "--nproc-per-node", str(ranks), PROBE, *words]


@dataclass(frozen=True)
class Use:
    """What nvidia-smi says of all GPUs together."""

    processes: int
    mib: int


def ask_nvidia_smi() -> Use | None:
    """Return the use of the GPUs; None without a GPU, or without nvidia-smi."""
    if not HAS_GPU or not shutil.which("nvidia-smi"):
        return None
    # It can take a second, so both run at once.
    queries = [_query(what) for what in ("compute-apps=pid", "gpu=memory.used")]
    processes, used = (query.communicate(timeout=30)[0].split() for query in queries)
    return Use(len(processes), sum(int(word) for word in used if word.isdigit()))  # or [N/A]


def _query(what: str) -> subprocess.Popen[str]:
    words = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@dataclass(frozen=True)
class Sight:
    """How a run ended."""

    ended: Ended
    is_over: bool
    left: int = 0  # of its processes, 1 s after its end
    used: tuple[Use | None, ...] = ()  # before the run, during it, and 1 s after its end

    def tell(self) -> str:
        """Return the code, the seconds and what is left."""
        words = f"code {self.ended.code} after {self.ended.seconds:.1f} s"
        if not self.used:
            return self.ended.text  # it has not started
        if not self.is_over:
            words = f"not over after {self.ended.seconds:.0f} s"
        words += f", {self.left} processes left"
        if uses := [use for use in self.used if use]:
            mib = ", ".join(str(use.mib) for use in uses)
            words += f", GPU {mib} MiB in {', '.join(str(use.processes) for use in uses)} processes"
        return words

    def is_clean(self) -> bool:
        """Return whether neither a process nor memory on the GPU is left."""
        before, _, after = self.used
        is_freed = not before or not after or after.mib < before.mib + 64
        return self.is_over and not self.left and is_freed


class Watched:
    """A run of `nccl_probe.py fails`; leaves nothing behind."""

    def __init__(self, machine: Machine, command: list[str], ranks: int, **variables: str) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=machine.folder))
        self.ranks = ranks
        self.pids: list[tuple[int, int]] = []  # of each rank, and of its parent
        self.output = (self.folder / "output").open("w")
        words = [*command, str(self.folder)]
        self.launcher = machine.start(words, self.output, **variables)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.launcher.terminate()  # it ends ranks whose process ids are not known
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(0 if self.pids else END_S)
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()
        self.output.close()

    def text(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def wait_for_steps(self, limit_s: float) -> None:
        """Wait until all ranks take steps. Raises Failed."""
        files = [self.folder / str(rank) for rank in range(self.ranks)]
        end = time.monotonic() + limit_s
        while not all(file.exists() for file in files):
            if self.launcher.poll() is not None or time.monotonic() > end:
                raise Failed(f"no steps after {limit_s:.0f} s at most: {self.text()[-300:]}")
            time.sleep(0.02)
        for file in files:
            pid, parent = map(int, file.read_text().split())
            self.pids.append((pid, parent))

    def cause(self, what: str) -> None:
        """Do to the run, or let rank 1 do, what the word says."""
        (self.folder / "fault").touch()
        if what == "launcher":
            self.launcher.kill()
        elif what in SIGNALS:
            os.kill(self.pids[1][what == "agent"], SIGNALS[what])

    def wait(self, limit_s: float) -> bool:
        """Wait until the launcher and all ranks have ended; returns whether they have."""
        end = time.monotonic() + limit_s
        while self.launcher.poll() is None or self.alive():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def alive(self) -> list[int]:
        """Return the ranks and their parents that are still alive."""
        return [pid for pid in {pid for pair in self.pids for pid in pair} if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # a zombie's is empty
    return False


def watch(
    machine: Machine, command: list[str], what: str, ranks: int, limit_s: float, **variables: str
) -> Sight:
    """Start a run, cause the fault once it takes steps, and watch its end. Raises Failed."""
    before = ask_nvidia_smi()
    with Watched(machine, command, ranks, **variables) as run:
        run.wait_for_steps(max(1.0, min(START_S, machine.left())))
        during = ask_nvidia_smi()
        began = time.monotonic()
        run.cause(what)
        is_over = run.wait(max(1.0, min(limit_s, machine.left())))
        seconds = time.monotonic() - began
        time.sleep(AFTER_S)
        used = (before, during, ask_nvidia_smi())
        left, code = len(run.alive()), run.launcher.poll() or 0
        code = code if code >= 0 else 128 - code
        return Sight(Ended(code, run.text(), seconds), is_over, left, used)


def keep(machine: Machine, name: str, sights: Sequence[tuple[str, Sight]], lines: int = 60) -> None:
    """Write the last lines that users see of each run to a file."""
    machine.blocks.mkdir(parents=True, exist_ok=True)
    parts = []
    for launcher, sight in sights:
        shown = "\n".join(sight.ended.text.splitlines()[-lines:])
        parts.append(f"--- {launcher}: {sight.tell()}\n\n{shown}\n")
    (machine.blocks / f"{name}.txt").write_text("\n".join(parts))


def watch_both(
    machine: Machine, name: str, what: str, ranks: int, theirs_s: float, **variables: str
) -> tuple[Sight, Sight]:
    """Cause a fault under our launcher and under torchrun, and keep what users see.

    Raises Failed if ours does not start.
    """
    ours, theirs = under_ours(ranks, "fails", what), under_torchrun(ranks, "fails", what)
    shared = {**share_gpus(ranks), **variables}
    seen = [("ours", watch(machine, ours, what, ranks, OURS_S, **shared))]
    keep(machine, name, seen)
    try:
        other = watch(machine, theirs, what, ranks, theirs_s, **variables)
    except Failed as failure:
        other = Sight(Ended(-1, str(failure), 0.0), is_over=False)
    seen.append(("torchrun", other))
    keep(machine, name, seen)
    return seen[0][1], seen[1][1]
