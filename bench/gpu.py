"""What one GPU does, in at most 9 minutes and without a network: `make bench-gpu`.

PYTHONPATH=. python bench/gpu.py [--small]: GPT-2 124M (config/gpt2_124m.yaml) on random tokens, in
train.py, a bare loop, accelerate and Lightning (`pip install accelerate lightning` first), all
taking turns. Then what else has to work on a GPU, a row each. --small tries all of it on any
machine with a tiny model, and writes no table.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from table import describe_machine, render, write_section

from distributed.collectives import to_bytes

ROOT = Path(__file__).resolve().parents[1]
CONFIG = str(ROOT / "config/gpt2_124m.yaml")
LAUNCH = str(ROOT / "scripts/ssh/launch_singlenode.sh")
SELF_TEST = str(ROOT / "scripts/test_distributed.sh")
OTHERS = {"bare loop": "bare", "accelerate": "accelerate", "Lightning": "lightning"}
ROUNDS = 2
LIMIT_S = 540.0  # of all together
COMMAND_S = 180.0  # of one command: if it hangs, the other rows have their time
STEPS, FROM_STEP = 120, 40
FEW = 40  # steps, where nothing is measured
TOKENS = 20_000_000
GPU = ["train.global_batch_size=32", "train.grad_accumulation=1"]
SMALL = ["train.global_batch_size=4", "train.grad_accumulation=1", "train.compile=false"]
SMALL += ["model.layers=2", "model.heads=2", "model.width=64", "model.context=32"]
SMALL += ["data.num_workers=1", "data.pin_memory=false"]


class Bench:
    """Runs programs on the same data and settings, in one folder."""

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self.folder = folder
        self._ends = time.monotonic() + LIMIT_S
        self._settings = [f"data.path={folder}", *settings]
        self._environ = {**os.environ, "PYTHON": sys.executable, "LOG_DIR": str(folder / "logs")}
        self._environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
        path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        self._environ["PYTHONPATH"] = os.pathsep.join(path)
        for name, count in (("train.bin", TOKENS), ("val.bin", TOKENS // 16)):
            tokens = torch.randint(50257, (count,), dtype=torch.int32).to(torch.uint16)
            (folder / name).write_bytes(to_bytes(tokens))

    def run(self, command: list[str], **variables: str) -> str:
        """Return what a command printed. Raises RuntimeError with its code and last line."""
        done = subprocess.run(
            command,
            env=self._environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=min(COMMAND_S, max(0.0, self._ends - time.monotonic())),
        )
        if done.returncode != 0:
            last = (done.stdout.strip().splitlines() or ["no word"])[-1]
            raise RuntimeError(f"code {done.returncode}: {last}")
        return done.stdout

    def loop(self, name: str, steps: int = STEPS, from_step: int = FROM_STEP) -> dict[str, float]:
        """Return what gpu_loops.py measures of a loop."""
        script = str(ROOT / "bench/gpu_loops.py")
        words = [name, str(steps), str(from_step), CONFIG, *self._settings]
        told = self.run([sys.executable, script, *words])
        lines = [line for line in told.splitlines() if line.startswith("{")]  # among warnings
        found: dict[str, float] = json.loads(lines[-1])
        return found

    def words(self, *more: str) -> list[str]:
        """Return train.py's settings for a few steps."""
        steps = [f"train.max_steps={FEW}", "train.log_every=10", "train.eval_every=0"]
        steps += ["checkpoint.every=0", f"checkpoint.dir={self.folder / 'checkpoints'}"]
        return [*self._settings, *steps, "tracking=[]", *more]

    def train(self, run_id: str, *more: str, ranks: int = 1, **variables: str) -> None:
        """Train under the launcher."""
        self.run([LAUNCH, CONFIG, str(ranks), *self.words(*more)], RUN_ID=run_id, **variables)

    def metrics(self, run_id: str) -> list[dict[str, float]]:
        """Return a run's log lines, once there are some."""
        file = self.folder / "logs" / run_id / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def start_and_stop(self, run_id: str) -> int:
        """Stop a run by SIGTERM after its first log line; returns the launcher's code."""
        command, environ = [LAUNCH, CONFIG, "1", *self.words()], self._environ | {"RUN_ID": run_id}
        quiet, ends = subprocess.DEVNULL, min(self._ends, time.monotonic() + COMMAND_S)
        launcher = subprocess.Popen(command, env=environ, stdout=quiet, stderr=quiet)
        try:
            while launcher.poll() is None and not self.metrics(run_id):
                time.sleep(0.05)
                if time.monotonic() > ends:
                    raise subprocess.TimeoutExpired(command, COMMAND_S)
            launcher.send_signal(signal.SIGTERM)
            return launcher.wait(max(1.0, ends - time.monotonic()))
        finally:
            launcher.kill()


# --- the loops ----------------------------------------------------------------------------------


def time_train(bench: Bench, run_id: str) -> dict[str, float]:
    """Return what train.py measures, and what part of the GPU one token per second needs."""
    bench.train(run_id, f"train.max_steps={STEPS}")
    lines = [line for line in bench.metrics(run_id) if line["step"] > FROM_STEP]
    speed = statistics.harmonic_mean([line["tokens_per_second"] for line in lines])
    memory, share = lines[-1]["peak_memory_gb"], lines[-1].get("mfu", 0.0)
    share /= lines[-1]["tokens_per_second"]
    return {"tokens_per_second": speed, "memory_gb": memory, "share": share}


def compare_loops(bench: Bench) -> str:
    """Return the table of all loops; one that fails says so in its row."""
    loops: dict[str, Callable[[int], dict[str, float]]] = {
        "train.py": lambda number: time_train(bench, f"speed-{number}")
    }
    for name, loop in OTHERS.items():
        loops[name] = functools.partial(time_other, bench, loop)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    said: dict[str, str] = {}
    for number in range(ROUNDS):
        for name, time_loop in loops.items():
            if name in OTHERS and not is_installed(OTHERS[name]):
                said[name] = "not installed"
                continue
            said[name] = attempt(lambda: keep(seen[name], time_loop(number)))  # noqa: B023
            print(name, seen[name][-1:] or said[name], flush=True)
    share = max((one["share"] for one in seen["train.py"]), default=0.0)
    rows = []
    for name, found in seen.items():
        if not found:
            rows.append([name, said[name], "", ""])
            continue
        speed = statistics.median(one["tokens_per_second"] for one in found)
        memory = statistics.median(one["memory_gb"] for one in found)
        mfu = f"{100 * share * speed:.1f} %" if share else "not known"
        rows.append([name, f"{speed:,.0f}", mfu, f"{memory:.1f}"])
    return render(["loop", "tokens per second", "MFU", "peak memory, GB"], rows)


def time_other(bench: Bench, loop: str, _number: int) -> dict[str, float]:
    return bench.loop(loop)


def keep(found: list[dict[str, float]], one: dict[str, float]) -> str:
    found.append(one)
    return ""


def is_installed(package: str) -> bool:
    return package == "bare" or importlib.util.find_spec(package) is not None


# --- what else has to work ----------------------------------------------------------------------


def without_waits(bench: Bench) -> str:
    command = [sys.executable, str(ROOT / "bench/waits.py"), "--config", CONFIG, *bench.words()]
    told = bench.run(command, RUN_ID="waits")
    return next(line for line in told.splitlines() if line.startswith("waits"))


def one_rank(bench: Bench, loop: str) -> str:
    return f"{bench.loop(loop)['tokens_per_second']:,.0f} tokens per second"


def saves(bench: Bench) -> str:
    stalls = bench.loop("stall")
    return ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in stalls.items())


def stop_and_resume(bench: Bench) -> str:
    """Compare a resumed run with two that nobody stopped: kernels may add up in another order."""
    for run_id in ("whole", "again"):
        bench.train(run_id)
    code = bench.start_and_stop("parts")
    stopped_at = (bench.folder / "checkpoints/parts/latest").resolve().name
    bench.train("parts")
    command = [sys.executable, "-m", "distributed.checkpoint", "hash"]
    whole, again, parts = (
        bench.run([*command, str(bench.folder / "checkpoints" / run_id)])
        for run_id in ("whole", "again", "parts")
    )
    same = "the same bytes" if parts == whole else "other bytes"
    others = "also the same" if again == whole else "other bytes, too"
    losses = (f"{bench.metrics(run_id)[-1]['loss']:.6f}" for run_id in ("whole", "again", "parts"))
    told = f"code {code} at {stopped_at}; resumed: {same}; a second run never stopped: {others}"
    return f"{told}; last losses of the first, the second and the resumed run: {', '.join(losses)}"


def two_ranks(bench: Bench, backend: str) -> str:
    bench.train(f"two-{backend}", ranks=2, BACKEND=backend)
    return f"loss {bench.metrics(f'two-{backend}')[-1]['loss']:.3f} after {FEW} steps"


def refuses_nccl(bench: Bench) -> str:
    try:
        return f"not refused: {two_ranks(bench, 'nccl')}"
    except RuntimeError as error:
        return f"refused, {error}"


def self_test(bench: Bench) -> str:
    return bench.run([SELF_TEST, "1"]).strip().splitlines()[-1]


CHECKS: dict[str, Callable[[Bench], str]] = {
    "a step waits for the GPU": without_waits,
    "`scripts/test_distributed.sh 1`": self_test,
    "DDP in a group of one rank": lambda bench: one_rank(bench, "ddp"),
    "FSDP2 in a group of one rank": lambda bench: one_rank(bench, "fsdp"),
    "two ranks on one GPU, gloo": lambda bench: two_ranks(bench, "gloo"),
    "two ranks on one GPU, NCCL": refuses_nccl,
    "a save of the model and AdamW's state blocks the loop for": saves,
    "stopped by SIGTERM, and resumed": stop_and_resume,
}


def attempt(work: Callable[[], str]) -> str:
    """Return what the work returns, or in words why it does not."""
    try:
        return work()
    except subprocess.TimeoutExpired:
        return f"not done: {COMMAND_S:.0f} s, or the {LIMIT_S:.0f} s of all, were over"
    except Exception as error:  # one failure must not cost the other rows
        return f"failed, {type(error).__name__}: {error}"


def main() -> None:
    """Measure, and write both tables."""
    is_small = sys.argv[1:] == ["--small"]
    if not (is_small or torch.cuda.is_available()):
        sys.exit(
            "bench/gpu.py: torch sees no GPU here; run it where one is, or try it with --small"
        )
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", ignore_cleanup_errors=True) as name:
        bench = Bench(Path(name), SMALL if is_small else GPU)
        loops = compare_loops(bench)
        rows = []
        for what, work in CHECKS.items():
            rows.append([what, attempt(lambda: work(bench))])  # noqa: B023
            print(*rows[-1], flush=True)
    text = f"{loops}\n\n{render(['on this machine', 'seen'], rows)}"
    if is_small:
        print(text)
        return
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    write_section("gpu", f"{describe_machine('make bench-gpu')}, {gpu}\n\n{text}")


if __name__ == "__main__":
    main()
