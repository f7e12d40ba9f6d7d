"""Proves that the ranks of a launch can work together, and measures how fast they talk.

    torchrun --nproc-per-node 2 -m distributed.selftest [--seconds S]

Every rank runs it. Collectives and a DDP step with known answers, then the bandwidth of all-reduce
as nccl-tests defines it; the last line is the verdict, and the exit code is 0 only for PASS.
"""

from __future__ import annotations

import argparse
import copy
import socket
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from distributed.environment import Environment
from distributed.torch import device, finish, init_distributed, setup_distributed_models

Check = tuple[str, Tensor, Tensor]  # name, what came, what should have come


def collectives(rank: int, ranks: int) -> Iterator[Check]:
    """Yield every collective's result on this rank and the answer known beforehand."""
    every = torch.arange(1.0, ranks + 1, device=device())  # rank r gives r + 1
    mine = every[rank].repeat(1000)
    ones = torch.ones_like(mine)

    total = mine.clone()
    dist.all_reduce(total)
    yield "all-reduce sum", total, ones * every.sum()

    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    yield "all-reduce max", largest, ones * ranks

    given = mine.clone()
    dist.broadcast(given, src=ranks - 1)
    yield "broadcast", given, ones * ranks

    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(gathered, mine)
    yield "all-gather", torch.stack(gathered), every[:, None].expand(ranks, 1000)

    shard = torch.empty(1, device=device())
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
    entered = torch.tensor(store.add("selftest/entered", 0))
    yield "barrier", entered, torch.tensor(ranks)


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


def find_fault(check: Check, env: Environment) -> str | None:
    """Return the wrong-result line of a check on this rank, or None where it holds."""
    name, got, want = check
    if torch.allclose(got, want.to(got.dtype), rtol=1e-4, atol=1e-6):
        return None
    worst = int((got - want).abs().argmax())
    return (
        f"wrong-result: {name} on rank {env.rank} ({socket.gethostname()}) gave "
        f"{got.flatten()[worst].item():g} where {want.flatten()[worst].item():g} is right"
    )


def all_reduce_seconds(size_bytes: int, budget_s: float) -> float:
    """Return the time of one all-reduce of that many bytes, on the slowest rank."""
    array = torch.ones(size_bytes // 4, device=device())
    once = _slowest_seconds(array, 2)  # the first is not like the others
    return _slowest_seconds(array, max(3, min(1000, int(budget_s / once))))


def _slowest_seconds(array: Tensor, repeats: int) -> float:
    dist.barrier()
    _finish_queue()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(array, dist.ReduceOp.MAX)
    _finish_queue()
    took = torch.tensor((time.perf_counter() - start) / repeats, device=device())
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def _finish_queue() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def measure_all_reduce(env: Environment, seconds: float) -> str:
    """Measure a few sizes within the time given, print a table, and return its last row in words.

    algbw is bytes / time and busbw algbw * 2(n-1)/n, in GB/s (1e9 bytes a second).
    """
    ranks = env.world_size
    sizes_kib = (64, 1024, 16 * 1024, *((256 * 1024,) if device().type == "cuda" else ()))
    tell(env, "", f"{'all-reduce':>12}{'time':>12}{'algbw':>12}{'busbw':>12}")
    for size_kib in sizes_kib:
        took = all_reduce_seconds(size_kib * 1024, seconds / len(sizes_kib))
        algbw = size_kib * 1024 / took / 1e9
        busbw = algbw * 2 * (ranks - 1) / ranks
        size = f"{size_kib // 1024} MiB" if size_kib >= 1024 else f"{size_kib} KiB"
        tell(env, f"{size:>12}{took * 1e3:>9.3f} ms{algbw:>7.2f} GB/s{busbw:>7.2f} GB/s")
    tell(env, "")
    return f"all-reduce {busbw:.2f} GB/s busbw at {size}"


def show_ranks(env: Environment) -> str | None:
    """Print on rank 0 who takes part; return the fault where versions of torch differ."""
    gpu = f" {torch.cuda.get_device_name()}" if device().type == "cuda" else ""
    row = (socket.gethostname(), str(env.rank), f"{device()}{gpu}", torch.__version__)
    rows: list[tuple[str, ...]] = [row] * env.world_size
    dist.all_gather_object(rows, row)
    for host, rank, where, version in [("host", "rank", "device", "torch"), *rows]:
        tell(env, f"{host:<20}{rank:>6}  {where:<30}  {version}")
    versions = sorted({f"torch {version} on {host}" for host, _, _, version in rows})
    differ = len({version for *_, version in rows}) > 1
    return f"version-mismatch: {', '.join(versions)}; install one everywhere" if differ else None


def tell(env: Environment, *lines: str) -> None:
    """Print on rank 0 alone."""
    if env.is_main:
        print(*lines, sep="\n", flush=True)


def run(seconds: float) -> int:
    started = time.monotonic()
    env = init_distributed(timeout_s=60)
    if env.world_size == 1:
        backend = "nccl" if device().type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    faults = [show_ranks(env)]
    for check in collectives(env.rank, env.world_size):
        faults.append(find_fault(check, env))
    faults.append(find_fault(ddp_step(env.rank, env.world_size), env))
    of_all = [faults] * env.world_size
    dist.all_gather_object(of_all, faults)
    found = [fault for of_rank in of_all for fault in of_rank if fault]
    verdict = (
        f"{env.world_size} rank{'s' * (env.world_size > 1)} on "
        f"{env.num_nodes} node{'s' * (env.num_nodes > 1)}, {dist.get_backend()}: "
    )
    if found:
        verdict = f"FAIL  {verdict}{found[0]}"
        if len(found) > 1:
            verdict += f" (and {len(found) - 1} more, above)"
            tell(env, *found[1:])
    else:
        verdict = f"PASS  {verdict}{len(faults)} checks, "
        if env.world_size > 1:
            verdict += measure_all_reduce(env, seconds) + ", "
        verdict += f"{time.monotonic() - started:.1f} s"
    tell(env, verdict)
    return 1 if found else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m distributed.selftest")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the bandwidth (1)")
    try:
        return run(parser.parse_args(arguments).seconds)
    except (OSError, ValueError) as error:  # could not join; the text names the fault
        print(f"FAIL  {error}")
        return 1


if __name__ == "__main__":
    finish(main())
