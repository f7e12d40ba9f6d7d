"""The self-test, on real ranks: passes where all is well, and names what is not."""

import contextlib
import io
import re
import subprocess
import sys

import pytest
import torch.distributed as dist
from ports import free_port
from test_torch_helper import own_environment, run_ranks

from launcher import selftest

pytestmark = pytest.mark.slow  # real process groups, seconds each


def _selftest() -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = selftest.main(["--seconds", "0.1"])
    return code, printed.getvalue()


def test_passes_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    launcher.append(f"--master-port={free_port()}")
    done = subprocess.run(
        [*launcher, "-m", "distributed.selftest", "--seconds=0.1"],
        capture_output=True,
        text=True,
        timeout=60,
        env=own_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS  2 ranks on 1 node, gloo: 9 checks, ")
    assert done.stdout.count("PASS") == 1, "more ranks than rank 0 print"


def test_bandwidth_follows_its_definition() -> None:
    (code, printed), *others = run_ranks(_selftest, ranks=range(4), world_size=4)
    assert code == 0 and others == [(0, "")] * 3
    row = r"^ +(64 KiB|1 MiB|16 MiB) +([\d.]+) ms +([\d.]+) GB/s +([\d.]+) GB/s$"
    rows = re.findall(row, printed, re.MULTILINE)
    assert [size for size, *_ in rows] == ["64 KiB", "1 MiB", "16 MiB"]
    for (_, took_ms, algbw, busbw), size_bytes in zip(rows, (2**16, 2**20, 2**24), strict=True):
        assert float(algbw) == pytest.approx(size_bytes / float(took_ms) / 1e6, abs=0.006, rel=0.01)
        assert float(busbw) == pytest.approx(float(algbw) * 2 * 3 / 4, abs=0.014)
    verdict = (
        r"PASS  4 ranks on 1 node, gloo: 9 checks, all-reduce (\S+) GB/s busbw at 16 MiB, \S+ s"
    )
    match = re.fullmatch(verdict, printed.splitlines()[-1])
    assert match and match[1] == rows[-1][-1]


def test_one_rank_alone_has_no_bandwidth() -> None:
    ((code, printed),) = run_ranks(_selftest, ranks=[0], world_size=1)
    assert code == 0
    assert re.fullmatch(
        r"PASS  1 rank on 1 node, gloo: 8 checks, \d+\.\d s", printed.split("\n")[-2]
    )


def _selftest_with_broken(collective: str) -> tuple[int, str]:
    """Run the self-test where one collective gives rank 1 a wrong last element."""
    whole = getattr(dist, collective)

    def broken(tensor: object, *arguments: object, **options: object) -> object:
        result = whole(tensor, *arguments, **options)
        if dist.get_rank() == 1:
            tensor[-1] += 1  # type: ignore[index]
        return result

    setattr(dist, collective, broken)
    return _selftest()


@pytest.mark.parametrize(
    ("collective", "named"),
    [
        ("broadcast", r"broadcast on rank 1 \(\S+\) gave 4 where 3 is right \[wrong-result\]"),
        (
            "reduce_scatter_tensor",
            r"reduce-scatter on rank 1 \(\S+\) gave 13 where 12 is right \[wrong-result\]",
        ),
        (
            "all_reduce",
            r"all-reduce sum on rank 1 \(\S+\) gave 7 where 6 is right \[wrong-result\] "
            r"\(and 1 more.*\)",
        ),
    ],
)
def test_wrong_result_is_named_with_its_rank(collective: str, named: str) -> None:
    results = run_ranks(_selftest_with_broken, collective, ranks=range(3), world_size=3)
    assert [code for code, _ in results] == [1, 1, 1]
    verdict = results[0][1].splitlines()[-1]
    assert re.fullmatch(rf"FAIL  3 ranks on 1 node, gloo: {named}", verdict)


def _selftest_half_set() -> tuple[int, str]:
    import os

    del os.environ["WORLD_SIZE"]
    return _selftest()


def test_ranks_that_cannot_join_are_a_failure_in_one_line() -> None:
    ((code, printed),) = run_ranks(_selftest_half_set, ranks=[0], world_size=2)
    assert code == 1
    assert re.fullmatch(r"FAIL  WORLD_SIZE is not set; .* \[wrong-world\]\n", printed)
