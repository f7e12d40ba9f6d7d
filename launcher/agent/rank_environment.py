"""What each rank is given: its variables, its GPU and its CPUs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from torch.distributed import is_nccl_available

from distributed.errors import Refused
from launcher.agent.assignment import Assignment
from launcher.agent.rank.flight_recorder import DEFAULT_SIZE, SIZE
from launcher.agent.torchrun_arguments import Arguments

try:
    from torch.numa import binding
except ImportError:  # before torch 2.9
    binding = None  # type: ignore[assignment]


def rank_variables(
    args: Arguments, assignment: Assignment, local_rank: int, port: int, attempt: int
) -> dict[str, str]:
    """Return what torchrun adds to a rank's environment, and what is ours."""
    number = assignment.first_rank + local_rank
    variables = {
        "RANK": number,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": assignment.world_size,
        "LOCAL_WORLD_SIZE": args.nproc,
        "GROUP_RANK": args.node_rank,
        "GROUP_WORLD_SIZE": args.num_nodes,
        "ROLE_NAME": args.role,
        "ROLE_RANK": number,
        "ROLE_WORLD_SIZE": assignment.world_size,
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": assignment.run_id,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": args.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        "RUN_ID": assignment.run_id,
    }
    if args.log_dir is not None:
        variables["LOG_DIR"] = args.log_dir
    if args.nproc > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = 1  # torchrun's choice
    if is_nccl_available() and SIZE not in os.environ:
        variables[SIZE] = DEFAULT_SIZE
    if args.has_virtual_ranks:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpu = local_rank if visible is None else visible.split(",")[local_rank].strip()
        variables |= {"LOCAL_RANK": 0, "CUDA_VISIBLE_DEVICES": gpu}
    return {name: str(value) for name, value in variables.items()}


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
