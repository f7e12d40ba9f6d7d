"""What every bench does: measure in turn, compare, and write a table into bench/README.md."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import figures
import quoted

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "bench/README.md"
CONFIG = str(ROOT / "config/local3.yaml")
CLUSTER = str(ROOT / "tests/cluster/cluster.sh")
AGENT = [sys.executable, str(ROOT / "scripts/lib/agent.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# What the commands write that measure: changes there do not make a commit another one.
WRITTEN = ("bench/*.md", "bench/*.json", "bench/*.svg", "README.md", "docs/admin.md")
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or else torchrun often fails to restart

Name = TypeVar("Name")
Result = TypeVar("Result")


def times_or(default: int) -> int:
    """Return how many times to measure: the only argument of a bench."""
    return int(sys.argv[1]) if sys.argv[1:] else default


def run(*command: object, **environment: str) -> str:
    """Run a command with one thread per process; returns its output. Raises CalledProcessError."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    words = [str(word) for word in command]
    return subprocess.run(words, env=environ, check=True, capture_output=True, text=True).stdout


def in_turns(
    measures: Mapping[Name, Callable[[], Result]], times: int, *, warm_up: int = 0
) -> dict[Name, list[Result]]:
    """Measure each in turn, several times, so that a slow phase of the machine affects all alike.

    Args:
        warm_up: rounds before the first that counts; they warm the caches.
    """
    found: dict[Name, list[Result]] = {name: [] for name in measures}
    for number in range(warm_up + times):
        for name, measure in measures.items():
            result = measure()
            if number >= warm_up:
                found[name].append(result)
    return found


def spread(values: Sequence[float], digits: int = 2) -> list[str]:
    """Return two cells: the median, and the minimum and maximum."""
    least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return [f"{statistics.median(values):.{digits}f}", f"{least}-{most}"]


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(values) / statistics.median(others)


def beside(blocks: Sequence[float], around: Sequence[float]) -> list[float]:
    """Divide each block by the mean of the two around it; `around` has one more than `blocks`."""
    means = map(statistics.mean, itertools.pairwise(around))
    return [block / mean for block, mean in zip(blocks, means, strict=True)]


def quartiles(ratios: Sequence[float]) -> list[str]:
    """Return two cells: the median, and the range of the middle half."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [f"{middle:.3f}", f"{low:.3f}-{high:.3f}"]


def pair(
    first: Sequence[float], second: Sequence[float], ratios: Sequence[float], most: float
) -> list[str]:
    """Return the cells for two kinds of steps that were measured in turn, in seconds."""
    medians = [f"{1000 * statistics.median(steps):.1f}" for steps in (first, second)]
    return [*medians, *quartiles(ratios), f"{most:.2f}"]


def pair_head(first: str, second: str) -> list[str]:
    return [first, second, "ratio", "middle half of the ratios", "at most"]


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[bool]:
    """Provide a cluster in a box with this many nodes; yields False if it cannot run here."""
    if subprocess.run([CLUSTER, "check"]).returncode != 0:
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CLUSTER_DIR"] = f"{folder}/cluster"
        try:
            subprocess.run([CLUSTER, "up", str(nodes)], check=True)
            yield True
        finally:
            subprocess.run([CLUSTER, "down"], check=True)


def describe_machine(command: str) -> str:
    """Return when and where the figures were measured, of which commit, with which command."""
    words = [time.strftime("%Y-%m-%d"), name_machine(), f"Python {platform.python_version()}"]
    return f"{', '.join([*words, f'commit {name_commit()}'])}: `{command}`"


def name_commit() -> str:
    """Return the commit that is checked out, and whether a file differs from it."""
    commit = _git("rev-parse", "--short=8", "HEAD")
    if not commit:
        return "not recorded"
    left_out = [f":!{page}" for page in WRITTEN]
    changed = _git("status", "--porcelain", "--", ".", *left_out)
    return f"{commit}, changed" if changed else commit


def _git(*words: str) -> str:
    """Return what git prints; nothing if it fails or is missing."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def name_machine() -> str:
    """Return the number of cores that this process may use, and their model."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    name = model[1] if model else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores ({name})"


def render(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_section(name: str, about: str, *parts: str) -> None:
    """Put the parts between the markers of section `name` of bench/README.md, and print them.

    The first line gives the machine, the command and `about`. Also records the block, and updates
    the main README.
    """
    text = "\n\n".join([f"{describe_machine(f'make bench-{name}')}{about}", *parts])
    print(text)
    section = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    page = README.read_text(encoding="utf-8")
    README.write_text(section.sub(lambda at: f"{at[1]}{text}\n{at[2]}", page), encoding="utf-8")
    quoted.record(f"make bench-{name}")
    figures.write()
