"""hostlist.py, alone and compared with `scontrol show hostnames`: both expand lists alike."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.hostlist import HostlistError, expand, first

PATH = "/usr/bin:/bin"  # the system's, because the tests' PATH omits schedulers


def brackets(draw: random.Random, most: int) -> str:
    """Return brackets of up to three parts, each a number or a range of up to `most`."""
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
    items += draw.choices(items, k=draw.randint(0, 2))  # some twice
    return draw.choice([",", ",", ",", ",,"]).join(items)


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("scontrol", path=PATH),
    reason="scontrol: not installed; run make cluster-deps as root",
)
@pytest.mark.parametrize("lists", [100, pytest.param(2000, marks=pytest.mark.long)])
def test_generated_lists_expand_alike(tmp_path: Path, lists: int) -> None:
    conf = tmp_path / "slurm.conf"  # any content will do: no daemon is asked
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


# --- host lists in SLURM's format -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[001-2]", ["n001", "n002"]),
        ("n[3,1,3]", ["n3", "n1", "n3"]),
        ("n[1-2,07]", ["n1", "n2", "n07"]),
        ("b,a,b", ["b", "a", "b"]),
        (
            "[1-2]r[3,5]n[1-2]",
            ["1r3n1", "1r3n2", "2r3n1", "2r3n2", "1r5n1", "1r5n2", "2r5n1", "2r5n2"],
        ),
        ("n[1-2]-ib,gpu-a.example.org", ["n1-ib", "n2-ib", "gpu-a.example.org"]),
        (" a b\n,c\t", ["a", "b", "c"]),
        ("n[1, 2]", ["n1", "n2"]),
    ],
)
def test_expands_in_order(text: str, names: list[str]) -> None:
    assert expand(text) == names
    assert first(text) == names[0]


@pytest.mark.parametrize(
    ("text", "problem", "position"),
    [
        ("n[2-1]", "the range '2-1' is reversed", 1),
        ("ok,n[1-2", "unmatched '['", 5),
        ("n[1]]", "unmatched ']'", 5),
        ("n[[1]]", "unmatched '['", 2),
        ("a,n[]", "'' is neither a number nor a range", 3),
        ("n[1-2-3]", "'1-2-3' is neither a number nor a range", 1),
        ("n[\u0661]", "'\u0661' is neither a number nor a range", 1),
    ],
)
def test_what_it_cannot_read_is_named_with_its_place(
    text: str, problem: str, position: int
) -> None:
    with pytest.raises(HostlistError) as raised:
        expand(text)
    message = str(raised.value)
    assert message.endswith(f": {problem}, at position {position}")
    assert "\n" not in message and text in message


@pytest.mark.parametrize("text", ["", "  ", ",", "\n"])
def test_empty_list_is_an_error(text: str) -> None:
    with pytest.raises(HostlistError, match="empty"):
        expand(text)


def test_error_in_a_long_list_stays_short() -> None:
    text = ",".join(f"node{i}" for i in range(10_000)) + ",n[3-1]"
    with pytest.raises(HostlistError) as raised:
        expand(text)
    assert len(str(raised.value)) < 150


@given(st.text("ab[],-019 \n"))
def test_any_text_is_names_or_an_error(text: str) -> None:
    try:
        names = expand(text)
    except HostlistError as error:
        assert "\n" not in str(error)
    else:
        assert names and not any(set("[], \n") & set(name) for name in names)


@pytest.mark.slow
def test_a_list_without_end_is_refused() -> None:
    assert first("n[1-99999999999]") == "n1"
    with pytest.raises(HostlistError, match="more than 1000000 names"):
        expand("n[1-99999999999]")
