"""Measure what single settings give GPT-2 124M on one GPU, in at most 8 minutes.

`make bench-settings` trains GPT-2 (config/gpt2_124m.yaml) on random tokens in a bare loop:

1. a base line, which computes as train.py does today and is measured again after every seventh row;
2. a row for each change of ROWS, in a process of its own, 50 steps after 10 to warm up;
3. all changes that helped, together; then the base line and these rows again while time is left.

On a GPU, a row has at most 75 s. Rows that the time does not allow are left out, and say so. Each
result is written to JSON=FILE (logs/gpu_settings.jsonl) as soon as it is known, one line of JSON
each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_runs import GPT2_CONFIG, HAS_GPU, PATIENCE, ROOT, Failed, Machine
from harness import describe_machine, render, write_section

LIMIT_S = 460.0 if HAS_GPU else 230.0  # for everything
ROW_S = 75.0 * PATIENCE  # for one row, at most
LEAST_S = 25.0 if HAS_GPU else 10.0  # a row starts only if it has this long
TOGETHER_S = 45.0 if HAS_GPU else 25.0  # reserved for all changes that helped
ROUNDS = 3 if HAS_GPU else 1
EVERY = 7 if HAS_GPU else 99  # rows from one base line to the next
HELPED = 1.005  # times the speed of the base line
BASE, TOGETHER, TRAIN = "base line", "together", "train.py, as it is"
ROWS: dict[str, dict[str, Any]] = {
    "loss compiled": {"compiled": "blocks, loss"},
    "model compiled as a whole": {"compiled": "model"},
    "model and loss in one graph": {"compiled": "step"},
    "q, k and v without copies": {"views": True},
    "micro-batch 64": {"batch": 64},
    "micro-batch 16": {"batch": 16},
    "micro-batch 128": {"batch": 128},
    "FLASH_ATTENTION": {"attention": "FLASH_ATTENTION"},
    "CUDNN_ATTENTION": {"attention": "CUDNN_ATTENTION"},
    "loss compiled, in chunks": {"compiled": "blocks, chunks"},
    "batches moved a step ahead": {"ahead": True},
    "TF32": {"precision": "high"},
    "gradients clipped one by one": {"clip": "each"},
    "gradients not clipped": {"clip": "none"},
    "AdamW foreach": {"fused": False},
    "sums in float32": {"reduced": False},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "one graph, reduce-overhead": {"compiled": "step", "mode": "reduce-overhead"},
    "nothing compiled": {"compiled": "nothing"},
    TRAIN: {},  # only its waits, which bench/waits.py finds
    "max-autotune-no-cudagraphs": {"mode": "max-autotune-no-cudagraphs"},
}
CHANGES_RESULT = "gradients not clipped"  # not combined with others
NEEDS_GPU = {"CUDNN_ATTENTION", "batches moved a step ahead"}
HEAD = ["what changes", "tokens per second", "x base line", "MFU", "peak memory, GB"]
HEAD += ["to compile and warm up, s", "waits per step", "loss", "runs"]


class Sweep:
    """Runs rows within a time limit; keeps their results, in a file too."""

    def __init__(self, folder: Path, file: Path, seconds: float) -> None:
        self.seen: dict[str, list[dict[str, Any]]] = {}  # the results of each row
        self._notes: dict[str, str] = {}  # why a row has none
        self._file = file
        self._rows = Machine(folder, seconds - TOGETHER_S, ROW_S)
        self._last = Machine(folder, seconds, ROW_S)
        # This cache would ignore sdpa_kernel. Inductor's own is kept: its key has the kernel.
        for machine in (self._rows, self._last):
            machine.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")

    def has_time(self) -> bool:
        return self._last.left() >= LEAST_S

    def run(self, name: str, changes: Mapping[str, Any], *, is_last: bool = False) -> None:
        """Run a row if it has time; only with `is_last` may it use the reserved time."""
        machine = self._last if is_last else self._rows
        note = "left out: no time" if machine.left() < LEAST_S else ""
        note = "needs a GPU" if name in NEEDS_GPU and not HAS_GPU else note
        found = self.seen.setdefault(name, [])
        try:
            result = {} if note else run_row(machine, name, changes)
        except Failed as failure:
            result, note = {}, " ".join(str(failure).replace("|", "/").split())[:200]
        found.extend([result] if result else [])
        self._notes[name] = note

        line = json.dumps({"row": name, "changes": changes, **result, "note": note})
        with self._file.open("a") as file:
            print(line, file=file)
        print(line, flush=True)

    def speeds(self) -> dict[str, float]:
        """Return the median speed of each row that has one."""
        return {
            name: statistics.median(one["tokens_per_second"] for one in found)
            for name, found in self.seen.items()
            if found and name != TRAIN
        }

    def table(self) -> str:
        """Return the table of all rows so far."""
        speeds = self.speeds()
        rows = []
        for name, found in self.seen.items():
            if name in speeds:
                ratio = f"{speeds[name] / speeds[BASE]:.3f}" if BASE in speeds else ""
                rows.append([name, f"{speeds[name]:,.0f}", ratio, *cells_of(found)])
            elif found:
                rows.append([name, *[""] * 5, found[-1]["waits"], "", "1"])
            else:
                rows.append([name, self._notes[name], *[""] * (len(HEAD) - 3), "0"])
        return render(HEAD, rows)


def cells_of(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cells after the speed, from all results of a row."""
    first, last = found[0], found[-1]
    mfu = [one["mfu"] for one in found]
    return [
        f"{100 * statistics.median(mfu):.1f} %" if first["mfu"] else "not known",
        f"{max(one['memory_gb'] for one in found):.1f}",
        "no C++ compiler" if first["compile_s"] is None else f"{first['compile_s']:.1f}",
        "needs a GPU" if last["waits"] is None else f"{last['waits']:g}",
        f"{last['loss']:.3f}",
        str(len(found)),
    ]


def run_row(machine: Machine, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row's own process measures. Raises Failed."""
    settings = machine.gpt2_settings()
    if name == TRAIN:
        words = ["train.max_steps=8", "train.eval_every=0", "tracking=[]", *settings]
        words.append(f"checkpoint.dir={machine.folder / 'checkpoints'}")
        command = [sys.executable, str(ROOT / "bench/waits.py"), "--config", GPT2_CONFIG, *words]
        ended = machine.run(command, RUN_ID="waits")
        _, is_told, waits = ended.last().partition("waits ")
        return {"waits": waits.strip()} if is_told else {"waits": ended.expect().last()}
    script = str(ROOT / "bench/gpu_variants.py")
    command = [sys.executable, script, json.dumps(changes), *settings]
    lines = machine.run(command).expect().text.splitlines()
    found: dict[str, Any] = json.loads([one for one in lines if one.startswith("{")][-1])
    return found


def combine(speeds: Mapping[str, float]) -> dict[str, Any]:
    """Return the changes of the rows that helped; of two rows for one setting, the faster's."""
    changes: dict[str, Any] = {}
    for name in sorted(speeds, key=lambda one: -speeds[one]):
        own = ROWS.get(name, {}) if name != CHANGES_RESULT else {}
        has_helped = speeds[name] >= HELPED * speeds.get(BASE, math.inf)
        changes |= own if has_helped and not own.keys() & changes.keys() else {}
    return changes


def run_all(sweep: Sweep, names: Sequence[str]) -> None:
    """Run these rows, then what helped together, then both again in rounds."""
    for number, name in enumerate(names):
        if number % EVERY == 0:
            sweep.run(BASE, {})
        sweep.run(name, ROWS[name])
    changes = combine(sweep.speeds())
    helped = {name: ROWS[name] for name in names if ROWS[name].items() <= changes.items()}
    helped = {name: own for name, own in helped.items() if own}
    if len(helped) > 1:
        sweep.run(TOGETHER, changes, is_last=True)
        helped = {TOGETHER: changes, **helped}
    for _ in range(ROUNDS - 1):
        for name, own in {BASE: {}, **helped}.items():
            if sweep.has_time():
                sweep.run(name, own, is_last=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu_settings.py")
    parser.add_argument("--pretend", action="store_true", help="a tiny model, without a GPU")
    parser.add_argument("--json", type=Path, default=ROOT / "logs/gpu_settings.jsonl")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="for all rows")
    parser.add_argument("words", nargs="*", help="parts of the names of rows; none: all rows")
    args = parser.parse_args()
    if args.pretend and HAS_GPU:
        parser.error("--pretend is for machines without a GPU; set CUDA_VISIBLE_DEVICES=")
    if not (HAS_GPU or args.pretend):
        parser.error("torch sees no GPU here; --pretend (PRETEND=1) runs a tiny model")
    return args


def main() -> None:
    """Run the rows, print the table and, if it has all rows from a GPU, write it into the page."""
    args = parse()
    is_whole = HAS_GPU and not args.words
    names = [one for one in ROWS if not args.words or any(word in one for word in args.words)]
    with tempfile.TemporaryDirectory(prefix="bench-settings-", ignore_cleanup_errors=True) as name:
        sweep = Sweep(Path(name), args.json.resolve(), args.seconds)
        try:
            run_all(sweep, names)
        except KeyboardInterrupt:
            is_whole = False
    about = f", torch {torch.__version__}, {torch.cuda.get_device_name() if HAS_GPU else 'no GPU'}"
    if is_whole:
        write_section("settings", about, sweep.table())
    else:
        command = f"make bench-settings{' PRETEND=1' * args.pretend}"
        print(f"\n{describe_machine(command)}{about}\n\n{sweep.table()}")


if __name__ == "__main__":
    main()
