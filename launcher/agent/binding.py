"""Where a rank runs: on the CPUs near its GPU (--numa-binding), with that GPU alone in view."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

from distributed.errors import Refused

try:
    from torch.numa import binding
except ImportError:  # before torch 2.9
    binding = None  # type: ignore[assignment]


def cpus_of_ranks(mode: str, nproc: int) -> Sequence[set[int] | None]:
    """Return the CPUs of each local rank as torchrun chooses them; None: those of the agent.

    Raises Refused where torch cannot tell. It asks CUDA, which the agent must not have used when it
    forks the ranks: a child does it.
    """
    if not mode:
        return [None] * nproc
    if binding is None:
        raise Refused("numa-unknown", "this torch cannot bind ranks; install torch 2.9 or newer")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        try:
            return child.submit(_choose, mode, nproc).result()
        except Exception as error:
            cause = f"cannot bind ranks to the CPUs near their GPUs: {error}"
            raise Refused("numa-unknown", f"{cause}; leave NUMA_BINDING out") from None


def _choose(mode: str, nproc: int) -> list[set[int]]:
    options = binding.NumaOptions(binding.AffinityMode(mode))
    return [
        binding._get_logical_cpus_to_bind_to(gpu_index=local_rank, numa_options=options)
        for local_rank in range(nproc)
    ]


def virtual_rank(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of --virtual-local-rank: each rank is local rank 0 of one GPU."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpu = str(local_rank) if visible is None else visible.split(",")[local_rank].strip()
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpu}
