"""hostlist.py beside `scontrol show hostnames`: they expand alike."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from distributed.hostlist import expand, first

PATH = "/usr/bin:/bin"  # the packages' own, for the tests' PATH leaves out schedulers


def brackets(draw: random.Random, most: int) -> str:
    """Return brackets of up to three parts, each a number or a range of so many."""
    parts = []
    for _ in range(draw.randint(1, 3)):
        low = draw.randint(0, draw.choice((12, 1200)))
        part = f"{low:0{draw.randint(0, 6)}}"
        if draw.randrange(2):
            part += f"-{low + draw.randrange(most):0{draw.choice((0, len(part)))}}"
        parts.append(part)
    return f"[{','.join(parts)}]"


def hosts(draw: random.Random) -> str:
    words = ["".join(draw.choices("abgnpuxz019-.", k=draw.randint(1, 6))) for _ in range(3)]
    many = "".join(f"{word}{brackets(draw, 2)}" for word in words[: draw.randint(2, 3)])
    plain, long, two = words[0], words[0] + brackets(draw, 40), brackets(draw, 5)
    kinds = [plain, long, f"{plain}{two}{brackets(draw, 5)}", brackets(draw, 10), many]
    return draw.choice(kinds)


def host_list(draw: random.Random) -> str:
    items = [hosts(draw) for _ in range(draw.randint(1, 4))]
    items += draw.choices(items, k=draw.randint(0, 2))  # some again
    return draw.choice([",", ",", ",", ",,"]).join(items)


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("scontrol", path=PATH),
    reason="scontrol: not installed; run make cluster-deps as root",
)
@pytest.mark.parametrize("lists", [100, pytest.param(2000, marks=pytest.mark.long)])
def test_generated_lists_expand_alike(tmp_path: Path, lists: int) -> None:
    conf = tmp_path / "slurm.conf"  # any will do, no daemon is asked
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    draw = random.Random(1)
    for text in (host_list(draw) for _ in range(lists)):
        theirs = subprocess.check_output(
            ["scontrol", "--", "show", "hostnames", text],
            text=True,
            env={"PATH": PATH, "SLURM_CONF": str(conf)},
        ).splitlines()
        assert theirs and expand(text) == theirs
        assert first(text) == theirs[0]
