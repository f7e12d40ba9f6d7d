"""Proves that the ranks of a launch can work together, and measures how fast they talk.

    torchrun --nproc-per-node 2 -m distributed.selftest [--seconds S] [--test basic|all]

Every rank runs it. Collectives and a DDP step with known answers, then the bandwidth of all-reduce
as nccl-tests defines it; the last line is the verdict, and the exit code is 0 only for PASS.
"""

from __future__ import annotations

import argparse
import copy
import json
import socket
import time
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from distributed.environment import Environment
from distributed.torch import device, gather_bytes, init_distributed, setup_distributed_models
from launcher.text import count

Check = tuple[str, Tensor, Tensor]  # name, what came, what should have come


def collectives(rank: int, ranks: int) -> Iterator[Check]:
    """Yield every collective's result on this rank and the answer known beforehand."""
    every = torch.arange(1.0, ranks + 1, device=device())  # rank r gives r + 1
    mine = every[rank].repeat(1000)
    ones = torch.ones_like(mine)

    dist.all_reduce(total := mine.clone())
    yield "all-reduce sum", total, ones * every.sum()
    dist.all_reduce(largest := mine.clone(), dist.ReduceOp.MAX)
    yield "all-reduce max", largest, ones * ranks
    dist.broadcast(given := mine.clone(), src=ranks - 1)
    yield "broadcast", given, ones * ranks
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(gathered, mine)
    yield "all-gather", torch.stack(gathered), every[:, None].expand(ranks, 1000)
    shard = torch.empty(1, device=device())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its new name is not in older torch
        dist.reduce_scatter_tensor(shard, every * mine[0])
    yield "reduce-scatter", shard, every[rank : rank + 1] * every.sum()

    if ranks > 1:
        received = torch.empty_like(mine)
        sending = dist.P2POp(dist.isend, mine, (rank + 1) % ranks)
        receiving = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
        for request in dist.batch_isend_irecv([sending, receiving]):
            request.wait()
        yield "ring of send and receive", received, ones * every[rank - 1]

    store = dist.distributed_c10d._get_default_store()  # counts without a collective
    store.add("selftest/entered", 1)
    dist.barrier()
    yield "barrier", torch.tensor(store.add("selftest/entered", 0)), torch.tensor(ranks)


def ddp_step(rank: int, ranks: int) -> Check:
    """Return a DDP model's gradient beside the average over all ranks' batches, made here alone."""
    torch.manual_seed(0)
    alone = nn.Linear(32, 8).to(device())
    batches = torch.randn(ranks, 16, 32, device=device())  # [rank, sample, feature]
    model = setup_distributed_models(copy.deepcopy(alone))
    model(batches[rank]).square().mean().backward()
    alone(batches).square().mean().backward()
    got, want = next(model.parameters()).grad, alone.weight.grad
    assert got is not None and want is not None
    return "DDP gradient", got, want


def find_fault(check: Check, here: str) -> str | None:
    """Return what is wrong with a check's result on this rank, or None where it holds."""
    name, got, want = check
    if torch.allclose(got, want.to(got.dtype), rtol=1e-4, atol=1e-6):
        return None
    worst = int((got - want).abs().argmax())
    gave, right = got.flatten()[worst].item(), want.flatten()[worst].item()
    return f"{name} on {here} gave {gave:g} where {right:g} is right [wrong-result]"


def all_reduce_seconds(array: Tensor, repeats: int) -> float:
    """Return the time of one all-reduce of the array, on the slowest rank."""
    dist.barrier()
    array.sum().item()  # a GPU has done all that was asked of it
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(array)  # a sum: NCCL has its fastest way for that alone
    array[0].item()
    took = torch.tensor((time.perf_counter() - start) / repeats, device=device())
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure_all_reduce(env: Environment, seconds: float) -> str:
    """Measure a few sizes within the time given, print a table, and return its last row in words.

    algbw is bytes / time and busbw algbw * 2(n-1)/n, in GB/s (1e9 bytes a second).
    """
    share = 2 * (env.world_size - 1) / env.world_size
    sizes_mib = (1 / 16, 1, 16, *((256,) if device().type == "cuda" else ()))
    tell(env, "", f"{'all-reduce':>12}{'time':>12}{'algbw':>12}{'busbw':>12}")
    for size_mib in sizes_mib:
        array = torch.zeros(int(size_mib * 2**18), device=device())  # float32
        once = all_reduce_seconds(array, 2)  # the first is not like the others
        repeats = max(3, min(1000, int(seconds / len(sizes_mib) / once)))
        took = all_reduce_seconds(array, repeats)
        algbw = array.nbytes / took / 1e9
        size = f"{size_mib} MiB" if size_mib >= 1 else f"{size_mib * 1024:g} KiB"
        tell(env, f"{size:>12}{took * 1e3:>9.3f} ms{algbw:>7.2f} GB/s{algbw * share:>7.2f} GB/s")
    tell(env, "")
    return f"all-reduce {algbw * share:.2f} GB/s busbw at {size}"


def tell(env: Environment, *lines: str) -> None:
    """Print on rank 0 alone."""
    if env.is_main:
        print(*lines, sep="\n", flush=True)


def check_all(env: Environment) -> tuple[int, list[str]]:
    """Show who takes part; return the number of checks and what any rank found wrong."""
    checks = [*collectives(env.rank, env.world_size), ddp_step(env.rank, env.world_size)]
    host = socket.gethostname()
    found = [find_fault(check, f"rank {env.rank} ({host})") for check in checks]
    where = f"{device()} {torch.cuda.get_device_name()}" if device().type == "cuda" else "cpu"
    row = json.dumps([host, where, torch.__version__, found]).encode()
    rows = [json.loads(told) for told in gather_bytes(row)]
    tell(env, f"{'host':<20}{'rank':>6}  {'device':<30}  torch")
    for rank, (host, where, version, _) in enumerate(rows):
        tell(env, f"{host:<20}{rank:>6}  {where:<30}  {version}")
    faults = [fault for *_, of_rank in rows for fault in of_rank if fault]
    versions = {version: f"torch {version} on {host}" for host, _, version, _ in rows}
    if len(versions) > 1:
        cause = ", ".join(versions.values())
        faults.insert(0, f"{cause}; install one everywhere [version-mismatch]")
    return len(checks) + 1, faults


def run(seconds: float, *, measures: bool = True) -> int:
    started = time.monotonic()
    env = init_distributed(timeout_s=60)
    if env.world_size == 1:
        backend = "nccl" if device().type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    number, faults = check_all(env)
    ranks, nodes = count(env.world_size, "rank"), count(env.num_nodes, "node")
    world = f"{ranks} on {nodes}, {dist.get_backend()}"
    if faults:
        more = f" (and {len(faults) - 1} more, above)" if len(faults) > 1 else ""
        tell(env, *faults[1:], f"FAIL  {world}: {faults[0]}{more}")
        return 1
    is_measured = measures and env.world_size > 1
    speed = f"{measure_all_reduce(env, seconds)}, " if is_measured else ""
    tell(env, f"PASS  {world}: {number} checks, {speed}{time.monotonic() - started:.1f} s")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m distributed.selftest")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the bandwidth (1)")
    parser.add_argument(
        "--test", choices=("basic", "all"), default="all", help="basic: no bandwidth"
    )
    words = parser.parse_args(arguments)
    try:
        return run(words.seconds, measures=words.test == "all")
    except (OSError, ValueError) as error:  # could not join; the text names the fault
        print(f"FAIL  {error}")
        return 1
