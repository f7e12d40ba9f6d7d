"""How scripts modelled on public ones are compared with torchrun; a sample of them is compared."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import shapes
from ports import free_port
from shape_runs import Launchers, Outcome, Shape, differences

TORCHS = {
    *("ddp.py", "ordinary.py", "nano/train.py", "fsdp2.py", "tensor_parallel.py", "compiled.py"),
    *("early_variables.py", "raises.py"),
}
LIKE = Outcome(0, ["a 1", "b"], ["warned"], {"out/x": "hash", "time": "1"})


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        (LIKE, []),
        (replace(LIKE, code=3), ["exit code 3"]),
        (replace(LIKE, stdout=["a 2", "b"]), ["stdout lacks 1 lines", "stdout has 1 more lines"]),
        (replace(LIKE, stdout=["a 1", "b", "b"]), ["stdout has 1 more lines"]),
        (replace(LIKE, stderr=["run  7", "warned"]), []),
        (replace(LIKE, stderr=[]), ["stderr lacks 1 lines"]),
        (replace(LIKE, files={"out/x": "other", "time": "3"}), ["content of out/x"]),
        (replace(LIKE, files={"time": "3"}), ["file out/x"]),
    ],
)
def test_what_counts_as_different(ours: Outcome, found: list[str]) -> None:
    told = differences(ours, LIKE, replace(LIKE, files={"out/x": "hash", "time": "2"}), 0)
    assert [one.partition(", such as")[0] for one in told] == found


def test_a_rate_that_two_runs_share_by_chance_does_not_count() -> None:
    bar = "Writing: 100%|##########| 1/1 [00:00<00:00, 1797.82it/s]"
    once = replace(LIKE, stderr=[bar, "warned"])
    assert differences(LIKE, once, once, 0) == []
    assert differences(replace(LIKE, stderr=[bar]), once, once, 0) != []


def test_numbers_that_differ_under_torchrun_itself_do_not_count() -> None:
    again = replace(LIKE, stdout=["a 7", "b"])
    assert differences(replace(LIKE, stdout=["a 3", "b"]), LIKE, again, 0) == []
    assert differences(replace(LIKE, stdout=["c 3", "b"]), LIKE, again, 0) != []


def cases() -> Iterator[object]:
    """Yield a sample for make test, and the cases that another torch can break."""
    for shape in shapes.SHAPES:
        script = shape.words[0]
        if script == "ordinary.py":
            yield pytest.param(shape, id=script, marks=pytest.mark.another_torch("shapes"))
        elif script in TORCHS and not shape.restarts:  # torchrun often fails to restart
            row = pytest.mark.another_torch("launch" if script == "ddp.py" else "shapes")
            marks = [pytest.mark.long, pytest.mark.in_shapes, row]
            yield pytest.param(shape, id=shape.name, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*cases()])
def test_a_shape_is_as_under_torchrun(shape: Shape) -> None:
    launchers = Launchers(Path(sys.executable), has_cluster=False, port=free_port())
    (cell, *_) = shapes.look(replace(shape, limit_s=250.0), launchers)
    if re.search(r"torchrun failed in (\d+) of \1 runs", cell):
        pytest.skip("torchrun itself fails with this torch")
    assert not cell.startswith("differs"), cell
