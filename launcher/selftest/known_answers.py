"""Collectives and a DDP step whose results are known beforehand."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.torch import device, setup_distributed_models
from distributed.torch_internals import default_store

NUMBERS = 1000  # in each rank's array


@dataclass(frozen=True)
class Check:
    """What one operation gave on this rank, and what it should have given."""

    name: str
    got: Tensor
    want: Tensor

    def find_error(self, here: str) -> str:
        """Return what is wrong on this rank, or an empty text."""
        is_bf16 = self.got.dtype == torch.bfloat16  # it has 8 significant bits
        got = self.got.double()
        want = self.want.double().expand_as(got)
        wrong = ~torch.isclose(got, want, rtol=2**-6 if is_bf16 else 1e-4, atol=1e-6)
        if not wrong.any():
            return ""

        dtype = " in bf16" if is_bf16 else ""
        numbers = f"gave {got[wrong][0]:g}, expected {want[wrong][0]:g}"
        return f"{self.name}{dtype} on {here} {numbers}"


def run_checks(rank: int, ranks: int) -> Iterator[Check]:
    """Yield every check; all ranks iterate together."""
    for dtype in torch.float32, torch.bfloat16:
        yield from _check_collectives(rank, ranks, dtype)

    store = default_store()  # counts without a collective
    store.add("selftest/entered", 1)
    dist.barrier()
    entered = store.add("selftest/entered", 0)
    yield Check("barrier", torch.tensor(entered), torch.tensor(ranks))

    yield _check_ddp_step(rank, ranks)


def _check_collectives(rank: int, ranks: int, dtype: torch.dtype) -> Iterator[Check]:
    """Yield the checks of the collectives. Rank r contributes the number r % 4 + 1 to each.

    Only rank 0 has the result of the reduce.
    """
    numbers = (torch.arange(ranks, device=device()) % 4 + 1).to(dtype)
    mine = numbers[rank].repeat(NUMBERS)
    total = numbers.sum()

    summed = mine.clone()
    dist.all_reduce(summed)
    yield Check("all-reduce sum", summed, total)
    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    yield Check("all-reduce max", largest, numbers.max())
    reduced = mine.clone()
    dist.reduce(reduced, dst=0)
    if rank == 0:
        yield Check("reduce", reduced, total)

    given = mine.clone()
    dist.broadcast(given, src=ranks - 1)
    yield Check("broadcast", given, numbers[-1])
    gathered = mine.new_empty(ranks * NUMBERS)
    dist.all_gather_into_tensor(gathered, mine)
    yield Check("all-gather", gathered, numbers.repeat_interleave(NUMBERS))
    shard = mine.new_empty(1)
    dist.reduce_scatter_tensor(shard, numbers * mine[0])
    yield Check("reduce-scatter", shard, mine[0] * total)

    exchanged = torch.empty_like(numbers)
    dist.all_to_all_single(exchanged, numbers * mine[0])
    yield Check("all-to-all", exchanged, numbers[rank] * numbers)
    if ranks > 1:
        received = torch.empty_like(mine)
        sending = dist.P2POp(dist.isend, mine, (rank + 1) % ranks)
        receiving = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
        for request in dist.batch_isend_irecv([sending, receiving]):
            request.wait()
        yield Check("ring of send and receive", received, numbers[rank - 1])


def _check_ddp_step(rank: int, ranks: int) -> Check:
    """Compare a DDP model's gradient with the average over all batches, computed on this rank.

    Seeds torch's generator, so that all ranks have the same model and batches.
    """
    torch.manual_seed(0)
    alone = nn.Linear(32, 8).to(device())
    batches = torch.randn(ranks, 16, 32, device=device())  # [rank, sample, feature]
    model = setup_distributed_models(copy.deepcopy(alone))
    model(batches[rank]).square().mean().backward()
    alone(batches).square().mean().backward()
    got = next(model.parameters()).grad
    want = alone.weight.grad
    assert got is not None and want is not None
    return Check("DDP gradient", got, want)
