"""Check that the ranks of a launch can work together, and measure how fast they are.

    torchrun --nproc-per-node 2 -m distributed.selftest [--test basic|all] [--quick] [--json FILE]

Every rank runs this. It first measures the links between the nodes, with transfers sized to fit
each link. Then it measures how fast each rank computes, checks operations with known answers, and
times the collectives by size. The verdict is one line; rank 0's exit code is 0 only for PASS.
"""

import argparse
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from distributed.environment import Environment
from distributed.errors import BAD_INPUT, Leave
from distributed.torch import device, gather_json, init_distributed, print_main
from distributed.torch_internals import default_store
from launcher.selftest import bandwidth, judge, known_answers, links, report
from launcher.selftest.barrier import Barrier, StuckError
from launcher.selftest.report import Fault, Findings, Member
from launcher.text import count
from launcher.typed_json import encode, parse
from launcher.wire import limits

CPU_TURNS = 16  # ranks may share CPUs, so they take turns; ranks on GPUs all compute at once
_MATRIX = {"cpu": (256, torch.float32), "cuda": (8192, torch.bfloat16)}  # the side, and the type


@dataclass
class Test:
    """One rank's part in the test."""

    env: Environment
    options: argparse.Namespace  # of main()
    barrier: Barrier
    findings: Findings = field(default_factory=Findings)


def run_test(options: argparse.Namespace) -> None:
    """Run the whole test on this rank; on rank 0, print the verdict and write the JSON file.

    Raises Leave on rank 0 after FAIL, and OSError or ValueError if the ranks cannot join or the
    JSON file cannot be written.
    """
    started = time.monotonic()
    warnings.simplefilter("ignore", FutureWarning)  # older torch lacks the collectives' new names
    env = init_distributed(timeout_s=60)
    if options.json and env.is_main:
        Path(options.json).touch()  # fail now, not at the end
    if env.world_size == 1:  # init_distributed() has made no process group
        gpu = device() if device().type == "cuda" else None
        backend = "nccl" if gpu else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=gpu)

    ranks = f"{count(env.world_size, 'rank')} on {count(env.num_nodes, 'node')}"
    world = f"{ranks}, {dist.get_backend()}"
    test = Test(env, options, Barrier(default_store(), "all", env.world_size))
    findings = test.findings
    try:
        num_checks = measure_all(test)
        faults = findings.faults()
    except StuckError as stuck:
        faults = [*stuck.args]

    if faults:
        more = f" (and {len(faults) - 1} more, above)" if len(faults) > 1 else ""
        verdict = f"FAIL  {world}: {faults[0]}{more}{describe_excluded(findings)}"
    else:
        took = time.monotonic() - started
        verdict = (
            f"PASS  {world}: {count(num_checks, 'check')}, "
            f"{describe_all_reduce(findings)}{took:.1f} s"
        )

    print_main(*faults[1:], verdict, sep="\n")
    if options.json and env.is_main:
        Path(options.json).write_text(report.as_json(findings, verdict, passed=not faults))
    if faults and env.is_main:
        raise Leave(1, faults[0].name, faults[0].cause)


def measure_all(test: Test) -> int:
    """Measure everything, and print results on the way. Returns the number of checks.

    All ranks call this. The results are in `test.findings`. Raises StuckError if a rank is stuck.
    """
    env = test.env
    findings = test.findings
    with_speeds = test.options.test == "all"

    model = f"{device()} {torch.cuda.get_device_name()}" if device().type == "cuda" else "cpu"
    mine = Member(socket.gethostname(), env.node_rank, env.local_rank, model, torch.__version__)
    findings.members = gather_members(mine)
    nodes = [rank for rank, member in enumerate(findings.members) if member.local_rank == 0]

    if with_speeds:
        if len(nodes) > 1:
            measure_links(test, nodes)
        kinds = [member.kind for member in findings.members]
        speeds, findings.slow_ranks = judge.find_slow_ranks(partial(compute_together, test), kinds)
        mine = replace(mine, speed=speeds[env.rank])

    checks = [*known_answers.run_checks(env.rank, env.world_size)]
    num_checks = len(checks) + 1  # and that of torch's versions
    here = f"rank {env.rank} ({mine.host})"
    errors = [error for check in checks if (error := check.find_error(here))]
    mine = replace(mine, faults=[Fault("wrong-result", error, mine.host) for error in errors])
    findings.members = gather_members(mine)
    print_main(*report.show_members(findings.members), sep="\n")
    if linked := findings.links.values():
        print_main(
            f"\nlinks     {bandwidth.rate(min(linked))} to {bandwidth.rate(max(linked))} "
            "between nodes"
        )

    if with_speeds and env.world_size > 1:
        measure_collectives(test)
    return num_checks


def gather_members(mine: Member) -> list[Member]:
    """Return the members of all ranks, which all call this."""
    return [parse(Member, row) for row in gather_json(encode(mine))]


def measure_collectives(test: Test) -> None:
    """Measure the collectives by size, and print each result at once. All ranks call this."""
    names = ["all-reduce"] if test.options.quick else [*bandwidth.COLLECTIVES]
    print_main(f"\n{bandwidth.HEAD}")
    for measured in bandwidth.measure(names):
        print_main(measured)
        test.findings.collectives.append(measured)
    print_main()


def measure_links(test: Test, nodes: Sequence[int]) -> None:
    """Measure pairs of nodes; then measure each pair that seems slow again, by itself.

    All ranks call this; `nodes` has one of each node, which measures its links. The results are in
    `test.findings`.
    """
    started = time.monotonic()
    findings = test.findings
    me = test.env.rank
    hosts = [member.host for member in findings.members]  # of all ranks
    barrier = Barrier(default_store(), "links", len(nodes))
    # If there are many rounds, each is shorter, to limit the total time.
    seconds = max(limits.LEAST_ROUND_S, limits.ROUND_S * min(1.0, 3 / (len(nodes) - 1)))

    def measure(rounds: judge.Rounds) -> judge.Links:
        """Return the bandwidths of these rounds, in bytes/s. Adds latencies to the findings."""
        mine = [*links.measure(rounds, me, hosts, barrier, seconds)] if me in nodes else []
        limit_s = limits.SELFTEST_S + 2 * limits.TRANSFER_S * len(rounds)
        test.barrier.wait_for_all("the links", limit_s)
        rows = gather_json([encode(link) for link in mine])
        measured = [parse(links.Link, text) for row in rows for text in row]
        findings.latencies |= {link.pair: link.latency for link in measured}
        return {link.pair: link.bandwidth for link in measured}

    rounds = links.rounds(nodes)
    findings.links, findings.slow_links = judge.find_slow_links(measure, rounds)
    findings.links_s = time.monotonic() - started


def compute_together(test: Test) -> list[float]:
    """Return the FLOP/s of all ranks, which all call this."""
    turns = min(test.env.world_size, CPU_TURNS) if device().type == "cpu" else 1
    # More than four turns are shorter, to limit the total time.
    seconds = limits.COMPUTE_S * min(1.0, 4 / turns)
    speed = 0.0
    for turn in range(turns):
        if test.env.rank % turns == turn:
            speed = measure_speed(seconds)
        test.barrier.wait_for_all("the matrix products")
    return gather_json(speed)


def measure_speed(seconds: float) -> float:
    """Return the FLOP/s of products of two square matrices, measured over `seconds`.

    On a CPU, torch has only one thread from then on.
    """
    torch.set_num_threads(1)  # several threads would wait for each other if one CPU were busy
    side, dtype = _MATRIX[device().type]
    matrix = torch.ones(side, side, dtype=dtype, device=device())
    result = matrix @ matrix
    result[0, 0].item()

    products = 0
    start = time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
        torch.matmul(matrix, matrix, out=result)
        result[0, 0].item()  # wait for the GPU
        products += 1

    return 2 * side**3 * products / took


def describe_all_reduce(findings: Findings) -> str:
    """Return the speed of the largest all-reduce in words, for the verdict."""
    rows = [row for row in findings.collectives if row.name == "all-reduce"]
    if not rows:
        return ""
    return (
        f"all-reduce {bandwidth.rate(rows[-1].busbw)} busbw "
        f"at {bandwidth.size_text(rows[-1].num_bytes)}, "
    )


def describe_excluded(findings: Findings) -> str:
    """Return which nodes to exclude, in words, for the verdict."""
    names = ",".join(host.partition(".")[0] for host in findings.excluded())
    return f"; exclude {names} (SLURM: --exclude={names})" if names else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test according to the arguments. Returns the exit code.

    It is 1 if the ranks cannot join, and BAD_INPUT if the JSON file cannot be written. Raises Leave
    on rank 0 after FAIL.
    """
    parser = argparse.ArgumentParser(prog="python -m distributed.selftest")
    parser.add_argument("--test", choices=("basic", "all"), default="all", help="basic: no speeds")
    parser.add_argument("--quick", action="store_true", help="run only the all-reduce")
    parser.add_argument("--json", default="", help="write all results to this file")
    options = parser.parse_args(arguments)
    try:
        run_test(options)
        return 0
    except (OSError, ValueError) as error:  # could not join; the text names the fault
        print(f"FAIL  {error}")
        return BAD_INPUT if getattr(error, "filename", None) else 1  # of --json
