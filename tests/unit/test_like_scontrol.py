"""hostlist.py beside `scontrol show hostnames`: they expand alike."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed.hostlist import expand, first

PATH = "/usr/bin:/bin"  # the packages' own, for the tests' PATH leaves out schedulers
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("scontrol", path=PATH),
        reason="scontrol: not installed; run make cluster-deps as root",
    ),
]


class Scontrol:
    """scontrol, asked many times: it reads commands from its standard input."""

    def __init__(self, folder: Path) -> None:
        conf = folder / "slurm.conf"  # any will do, no daemon is asked
        conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
        # Its prompt shows each command again, and must not break it into lines.
        environ = {"PATH": PATH, "SLURM_CONF": str(conf), "COLUMNS": "10000"}
        self.process = subprocess.Popen(
            ["stdbuf", "-oL", "scontrol"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
        )

    def hostnames(self, text: str) -> list[str]:
        """Return the names it prints for a list without blanks."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"show hostnames {text}\nversion\n")
        self.process.stdin.flush()
        said = []
        for line in self.process.stdout:
            if line.startswith("slurm"):  # its version, so this is the end
                break
            if not line.startswith("scontrol: "):  # its prompt
                said.append(line)
        return "".join(said).splitlines()


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scontrol]:
    scontrol = Scontrol(tmp_path_factory.mktemp("slurm"))
    yield scontrol
    scontrol.process.kill()
    scontrol.process.communicate()


# --- what is generated --------------------------------------------------------------------------


def brackets(most: int) -> st.SearchStrategy[str]:
    """Brackets of up to three parts, each a number or a range of so many."""

    @st.composite
    def part(draw: st.DrawFn) -> str:
        low = draw(st.one_of(st.integers(0, 12), st.integers(0, 1200)))
        text = f"{low:0{draw(st.integers(0, 6))}}"
        if draw(st.booleans()):
            high = low + draw(st.integers(0, most - 1))
            text += f"-{high:0{draw(st.sampled_from([0, len(text)]))}}"
        return text

    return st.lists(part(), min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")


SETTINGS = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
words = st.text("abgnpuxz019-.", min_size=1, max_size=6)
joined = "".join
hosts = st.one_of(
    words,
    st.tuples(words, brackets(40)).map(joined),
    st.lists(st.tuples(words, brackets(2)).map(joined), min_size=2, max_size=3).map(joined),
    st.tuples(words, brackets(5), brackets(5)).map(joined),
    brackets(10),
)


@st.composite
def lists(draw: st.DrawFn) -> str:
    items = draw(st.lists(hosts, min_size=1, max_size=4))
    items += draw(st.lists(st.sampled_from(items), max_size=2))  # some again
    return draw(st.sampled_from([",", ",", ",", ",,"])).join(items)


@pytest.mark.parametrize("lists_asked", [100, pytest.param(2000, marks=pytest.mark.long)])
def test_generated_lists_expand_alike(scontrol: Scontrol, lists_asked: int) -> None:
    asked = set()

    @settings(SETTINGS, max_examples=2 * lists_asked)
    @given(lists())
    def alike(text: str) -> None:
        asked.add(text)
        theirs = scontrol.hostnames(text)
        assert theirs and expand(text) == theirs
        assert first(text) == theirs[0]

    alike()
    assert len(asked) >= lists_asked
