"""The self-test on real ranks: it passes if all is well, and names what is not."""

import contextlib
import io
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from agents import execute
from ports import free_port
from test_torch_helper import own_environment, run_ranks
from torch.distributed import HashStore  # type: ignore[attr-defined]

from distributed.environment import Environment
from launcher.selftest import bandwidth, main
from launcher.selftest.barrier import Barrier, StuckError
from launcher.selftest.report import Fault
from launcher.wire import limits

pytestmark = pytest.mark.slow  # real process groups take seconds each


def _selftest(*options: str) -> tuple[int, str]:
    """Run one rank's part, with a fixed compute speed: the real one varies on a busy machine."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        patch.object(main, "measure_speed", lambda seconds: 1e10),
        patch.object(limits, "COLLECTIVES_S", 0.1),
    ):
        try:
            code = main.main(options)
        except SystemExit as leave:
            code = int(leave.code or 0)
    return code, printed.getvalue()


@pytest.mark.another_torch("self-test")
@pytest.mark.long
def test_passes_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    words = [f"--master-port={free_port()}", "-m", "distributed.selftest", "--test=basic"]
    done = execute(tmp_path, *torchrun, *words, code=0, **own_environment())
    assert done.stdout.splitlines()[-1].startswith("PASS  2 ranks on 1 node, gloo: 19 checks, ")
    assert done.stdout.count("PASS") == 1, "more ranks than rank 0 print"


def test_bandwidth_follows_its_definition() -> None:
    (code, printed), *others = run_ranks(_selftest, ranks=range(4), world_size=4)
    assert code == 0 and others == [(0, "")] * 3
    row = r"^(\S+) +([\d.]+) (KiB|MiB) +([\d.]+) ms +([\d.]+ [GM]B/s) +([\d.]+ [GM]B/s)$"
    rows = re.findall(row, printed, re.MULTILINE)
    assert list(dict.fromkeys(row[0] for row in rows)) == [*bandwidth.COLLECTIVES]
    texts = [*map(bandwidth.size_text, bandwidth.SIZES)]
    for collective in bandwidth.COLLECTIVES:  # on a busy machine, the largest two may take too long
        sizes = [f"{row[1]} {row[2]}" for row in rows if row[0] == collective]
        assert len(sizes) > 1 and sizes == texts[: len(sizes)]
    factors = {"all-reduce": 1.5, "broadcast": 1.0, "reduce": 1.0}  # 0.75 for the others
    for name, size, unit, took_ms, algbw, busbw in rows:
        num_bytes = int(size) * {"KiB": 2**10, "MiB": 2**20}[unit]
        wanted = num_bytes / float(took_ms) * 1e3
        assert _bytes_per_second(algbw) == pytest.approx(wanted, rel=0.1, abs=1e7)
        assert _bytes_per_second(busbw) == pytest.approx(
            factors.get(name, 0.75) * wanted, rel=0.1, abs=1e7
        )
    last = next(row for row in reversed(rows) if row[0] == "all-reduce")
    largest = f"all-reduce {last[-1]} busbw at {last[1]} {last[2]}"
    verdict = rf"PASS  4 ranks on 1 node, gloo: 19 checks, {largest}, \S+ s"
    assert re.fullmatch(verdict, printed.splitlines()[-1])


def _bytes_per_second(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"GB/s": 1e9, "MB/s": 1e6}[unit]


@pytest.mark.parametrize(("ranks", "turns"), [(1, 1), (4, 4), (16, 16), (64, 16)])
def test_ranks_that_may_share_cpus_take_turns_for_a_limited_time(ranks: int, turns: int) -> None:
    env = Environment("plain", 0, 0, ranks, ranks, 0, 1, "127.0.0.1", 0)
    barrier = Mock()
    took: list[float] = []
    with (
        patch.object(main, "device", lambda: torch.device("cpu")),
        patch.object(main, "measure_speed", took.append),
        patch.object(main, "gather_json", lambda speed: [speed]),
    ):
        main.compute_together(main.Test(env, Namespace(quick=False), barrier))
    assert barrier.wait_for_all.call_count == turns
    assert sum(took) * turns <= 4 * limits.COMPUTE_S


def test_a_rank_that_gives_up_tells_those_who_wait() -> None:
    store = HashStore()
    first, second = (Barrier(store, "two", 2) for _ in range(2))
    fault = Fault("slow-link", "no data from a to b")
    raised = second.give_up(fault)
    assert isinstance(raised, StuckError)
    with pytest.raises(StuckError, match=r"^no data from a to b \[slow-link\]$") as waiting:
        first.wait_for_all("a round")
    assert waiting.value.args == (fault,)


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    barrier = Barrier(HashStore(), "two", 2)
    with pytest.raises(StuckError, match=r"1 rank did not finish a round \[rank-stuck\]"):
        barrier.wait_for_all("a round", limit_s=0.05)


def test_one_rank_alone_has_no_bandwidth() -> None:
    ((code, printed),) = run_ranks(_selftest, ranks=[0], world_size=1)
    assert code == 0
    assert re.fullmatch(
        r"PASS  1 rank on 1 node, gloo: 17 checks, \d+\.\d s", printed.split("\n")[-2]
    )


def _selftest_with_broken(collective: str) -> tuple[int, str]:
    """Run the self-test with a collective that gives rank 1 a wrong last element in float32."""
    whole = getattr(dist, collective)

    def broken(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        result = whole(tensor, *arguments, **options)
        if dist.get_rank() == 1 and tensor.dtype == torch.float32:
            tensor[-1] += 1
        return result

    setattr(dist, collective, broken)
    return _selftest("--test", "basic")  # no speeds: on a busy machine, low ones count as a fault


@pytest.mark.parametrize(
    ("collective", "named"),
    [
        ("broadcast", r"broadcast on rank 1 \(\S+\) gave 4, expected 3 \[wrong-result\]"),
        (
            "all_reduce",
            r"all-reduce sum on rank 1 \(\S+\) gave 7, expected 6 \[wrong-result\] "
            r"\(and 1 more.*\)",
        ),
    ],
)
def test_wrong_result_is_named_with_its_rank(collective: str, named: str) -> None:
    results = run_ranks(_selftest_with_broken, collective, ranks=range(3), world_size=3)
    assert [code for code, _ in results] == [1, 0, 0]
    verdict = results[0][1].splitlines()[-1]
    assert re.fullmatch(rf"FAIL  3 ranks on 1 node, gloo: {named}", verdict)


def _selftest_half_set() -> tuple[int, str]:
    del os.environ["WORLD_SIZE"]
    return _selftest()


def test_what_cannot_begin_is_a_failure_in_one_line(tmp_path: Path) -> None:
    ((code, printed),) = run_ranks(_selftest_half_set, ranks=[0], world_size=2)
    assert code == 1
    assert re.fullmatch(r"FAIL  WORLD_SIZE is not set; .* \[wrong-world\]\n", printed)
    file = str(tmp_path / "none" / "found.json")
    ((code, printed),) = run_ranks(_selftest, "--json", file, ranks=[0], world_size=1)
    assert (code, printed) == (2, f"FAIL  [Errno 2] No such file or directory: '{file}'\n")
