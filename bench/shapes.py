"""Run scripts modelled on public ones under torchrun and our launchers: `make bench-shapes`, or
python bench/shapes.py [NAME...].

The scripts of tests/shapes/ and three of examples/ run with two ranks: on this machine under
torchrun and under scripts/launch.sh; and, if a cluster in a box can run here (as root), on two of
its nodes under torchrun on each node, under scripts/ssh/launch_torchrun_auto.sh, and as a SLURM
job. Our launchers are compared with torchrun on the same nodes:

- the exit code;
- what all ranks print on stdout, line by line in any order, and whether all of stderr appears (with
  our launchers, on the terminal or in the node logs);
- the files that they leave, with their content.

torchrun runs each script once in each place. If our result differs, torchrun runs the script again
on this machine. If stdout differs between torchrun's own runs (in times, say), numbers are not
compared, and neither is the content of files that differ.
With names or --check, bench/README.md is not changed. With --here, only this machine is used. Exits
with 1 if something differs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import others
from harness import ROOT, cluster, render, write_section
from shape_runs import Launchers, Outcome, Shape, Way, differences

SCRIPTS = ROOT / "tests/shapes", ROOT / "examples"
PACKAGES = ("accelerate", "transformers", "lightning", "hydra-core", "tqdm", "deepspeed")
TRIES = 4

SHAPES = (
    Shape("plain DDP, PyTorch's tutorial", ("ddp.py", "--epochs", "3")),
    Shape("the same, crashes once, restarts from its snapshot", ("ddp.py", "--crash"), restarts=1),
    Shape("a model that outlives its process group", ("ordinary.py",)),
    Shape("nanoGPT", ("nano/train.py", "nano/small.py", "--learning_rate=1e-2")),
    Shape("minGPT with Hydra", ("mingpt_hydra.py", "train.lr=0.2", "+train.seed=3"), "hydra-core"),
    Shape("accelerate", ("accelerate_loop.py", "--gradient_accumulation_steps=2"), "accelerate"),
    Shape(
        "Hugging Face's Trainer",
        (
            *("hf_trainer.py", "--output_dir", "out", "--max_steps", "4", "--use_cpu"),
            *("--report_to", "none", "--logging_steps", "2", "--save_steps", "2"),
        ),
        "transformers",
    ),
    Shape("Lightning", ("lightning_fit.py",), "lightning"),
    Shape(
        "DeepSpeed's init_distributed",
        ("deepspeed_init.py", "--steps", "2"),
        "deepspeed",
        limit_s=180,  # it compiles at its first start
    ),
    Shape("FSDP2 and DCP", ("fsdp2.py",)),
    Shape("tensor parallelism on a device mesh", ("tensor_parallel.py",)),
    Shape("torch.compile", ("compiled.py",)),
    Shape("spawned workers", ("workers.py", "spawn")),
    Shape("workers of a fork server", ("workers.py", "forkserver")),
    Shape("pdb in rank 0", ("debugged.py",), typed="answer += 1\np answer\ncontinue\n"),
    Shape("tqdm", ("bars.py",), "tqdm"),
    Shape("-m with relative imports", ("-m", "package.train", "--width=3", "--", "-a b")),
    Shape("torchvision's references", ("references.py",)),
    Shape("variables set before import torch", ("early_variables.py",)),
    Shape("@record, and rank 1 raises", ("raises.py",), code=1),
    Shape("rank 1 exits with 33", ("raises.py", "33"), code=33),
)


def main() -> None:
    words = sys.argv[1:]
    names = [word for word in words if not word.startswith("--")]
    shapes = [one for one in SHAPES if not names or any(n in " ".join(one.words) for n in names)]
    python = others.environment("shapes", PACKAGES)
    rows, wrong = [], 0
    with contextlib.nullcontext(False) if "--here" in words else cluster(2) as is_up:
        launchers = Launchers(python, has_cluster=is_up)
        for shape in shapes:
            cells = [""] * len(launchers.ways())
            if shape.needs and not others.version(python, shape.needs):
                cells[0] = f"not run: {shape.needs} cannot be installed here"
            else:
                cells = look(shape, launchers)
            wrong += sum(cell.startswith("differs") for cell in cells)
            rows.append([shape.name, f"`{' '.join(shape.words)}`", *cells])
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = ["like", "script", *launchers.ways()]
    if words:
        print(render(head, rows))
    else:
        write_section("shapes", "", render(head, rows))
    sys.exit(wrong > 0)


def look(shape: Shape, launchers: Launchers) -> list[str]:
    """Return a shape's cells: each of our ways compared with torchrun's."""
    cells = []
    references: dict[Way, list[Outcome]] = {}  # each run once: two of our ways share one
    for way in launchers.ways().values():
        if way is None:
            cells.append("not run: no cluster here")
            continue
        theirs, ours = way
        if shape.typed and ours != launchers.launch:
            cells.append("not run: on several nodes, ranks have no standard input")
            continue
        if theirs not in references:
            references[theirs] = run_torchrun(theirs, shape)
        mine = run_once(ours, shape)
        once = references[theirs][-1]
        if once.code != min(shape.code, 1):  # nothing to compare with
            once = mine
        found = differences(mine, once, once, shape.code)
        if found and theirs == launchers.torchrun:
            references[theirs] += run_torchrun(theirs, shape)
        if found:
            found = differences(mine, once, references[launchers.torchrun][-1], shape.code)
        cells.append(describe(mine, once, found))
        bad = sum(run.code != min(shape.code, 1) for run in references[theirs])
        if bad:
            cells[-1] += f"; torchrun failed in {bad} of {len(references[theirs])} runs"
        if found and "SHAPES_DEBUG" in os.environ:
            print(*(f"{one.raw}\n=====" for one in (once, mine)), sep="\n", file=sys.stderr)
    return cells


def describe(mine: Outcome, once: Outcome, found: Sequence[str]) -> str:
    """Return a cell: what differs from torchrun's run, or that nothing does."""
    same = [f"exit code {mine.code}"] if once is mine else ["same", f"exit code {mine.code}"]
    cell = "; ".join(["differs", *found]) if found else ", ".join(same)
    return cell if mine.code == once.code else f"{cell} (torchrun: {once.code})"


def run_torchrun(way: Way, shape: Shape) -> list[Outcome]:
    """Run a shape until it exits as it should, because torch sometimes aborts at exit."""
    runs: list[Outcome] = []
    while len(runs) < TRIES and (not runs or runs[-1].code != min(shape.code, 1)):
        runs.append(run_once(way, shape))
    return runs


def run_once(way: Way, shape: Shape) -> Outcome:
    """Run a shape in a fresh copy of the scripts, which has the same path each time."""
    place = Path(tempfile.gettempdir(), f"bench-shapes-{os.getpid()}")
    place.mkdir()
    try:
        for folder in SCRIPTS:
            shutil.copytree(folder, place / "own", dirs_exist_ok=True)
        return way(shape, place / "own")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
