"""Fork the ranks of one node, each with its streams, variables, GPU and CPUs."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import is_nccl_available

from distributed.errors import Refused
from distributed.stop_signals import handled_signals
from launcher import descriptors, processes
from launcher.agent.node_ranks import Rank
from launcher.agent.output.outputs import Outputs
from launcher.agent.rank.flight_recorder import DEFAULT_SIZE
from launcher.agent.rank.program import Program, run_and_exit
from launcher.agent.torch_internals import RECORDER_SIZE, cpus_near_gpu, has_numa_binding
from launcher.agent.torchrun_arguments import Arguments
from launcher.wire.messages import Assignment


def fork_ranks(
    program: Program,
    part: Assignment,
    outputs: Outputs,
    given: Iterable[tuple[Mapping[str, str], Set[int] | None]],
    held: Iterable[Any],
) -> list[Rank]:
    """Fork the ranks of an attempt. Each rank runs its program and raises SystemExit.

    `part` is this node's assignment; `given` has each rank's variables, and its CPUs if they are
    not the agent's. Each rank closes the agent's open objects, `held`, with their own close(), so
    that none is closed twice. Deletes error files of earlier attempts. Raises Refused if the files
    of --redirects and --tee cannot be written.
    """
    ranks = list[Rank]()
    agent = os.getpid()
    # Until a rank has reset its signals, they would reach the agent's handlers in it, and be lost.
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())

    for local_rank, (variables, cpus) in enumerate(given):
        number = int(variables["RANK"])
        error_file = Path(variables["TORCHELASTIC_ERROR_FILE"])
        with contextlib.suppress(OSError):  # it does not exist, or the disk is read-only
            error_file.unlink()
        (stdout, out), (stderr, err) = outputs.open_streams(part, local_rank)

        if (pid := os.fork()) == 0:
            processes.set_process_name(f"rank{number}")
            descriptors.give_back_limit()  # the agent has raised it
            for opened in *held, outputs, out, err, *ranks:
                opened.close()
            if cpus:
                os.sched_setaffinity(0, cpus)
            run_and_exit(program, variables, stdout=stdout, stderr=stderr, parent=agent)

        os.close(stdout)
        os.close(stderr)
        ranks.append(Rank(number, local_rank, pid, (out, err), error_file))

    signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
    return ranks


def variables_of(
    args: Arguments, assignment: Assignment, local_rank: int, error_files: Path
) -> dict[str, str]:
    """Return the variables that torchrun adds to a rank's environment, and our own, as text.

    Those in `proposed` are defaults, which do not replace variables that are already set.
    `error_files` is the folder for the ranks' error files.
    """
    number = assignment.first_rank + local_rank
    variables = {
        "RANK": number,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": assignment.world_size,
        "LOCAL_WORLD_SIZE": args.nproc,
        "GROUP_RANK": assignment.node_rank,
        "GROUP_WORLD_SIZE": len(assignment.hosts),
        "ROLE_NAME": args.role,
        "ROLE_RANK": number,
        "ROLE_WORLD_SIZE": assignment.world_size,
        "MASTER_ADDR": assignment.address,
        "MASTER_PORT": assignment.port,
        "TORCHELASTIC_ERROR_FILE": error_files / f"rank_{number}.json",
        "TORCHELASTIC_RUN_ID": assignment.run_id,
        "TORCHELASTIC_RESTART_COUNT": assignment.attempt,
        "TORCHELASTIC_MAX_RESTARTS": args.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "RUN_ID": assignment.run_id,
    }
    if args.log_dir:
        variables["LOG_DIR"] = args.log_dir

    proposed = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": 1}
    if args.nproc > 1:
        proposed["OMP_NUM_THREADS"] = 1
    if is_nccl_available():
        proposed[RECORDER_SIZE] = DEFAULT_SIZE
    variables |= {name: value for name, value in proposed.items() if name not in args.environ}

    if args.virtual_gpus:  # the rank sees only this GPU, which is then number 0
        gpu = args.virtual_gpus[local_rank]
        variables |= {"LOCAL_RANK": 0, "CUDA_VISIBLE_DEVICES": gpu}
        if args.virtual_gpus.count(gpu) > 1:  # NCCL rejects two ranks of one host on one GPU
            variables["NCCL_HOSTID"] = f"{assignment.node_rank}.{local_rank}"
    return {name: str(value) for name, value in variables.items()}


def cpus_of_ranks(mode: str, nproc: int) -> Sequence[set[int] | None]:
    """Return the CPUs of each local rank as torchrun chooses them; None means the agent's.

    `mode` is --numa-binding; empty means none. Raises Refused if torch is too old for it, or cannot
    find the CPUs. A child asks torch, because torch uses CUDA for this, and the agent must not have
    used CUDA when it forks the ranks.
    """
    if not mode:
        return [None] * nproc
    if not has_numa_binding:
        raise Refused("numa-unknown", "this torch cannot bind ranks; install torch 2.9 or newer")

    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        try:
            return [*child.map(partial(cpus_near_gpu, mode), range(nproc))]
        except Exception as error:
            cause = f"cannot bind ranks to the CPUs near their GPUs: {error}"
            raise Refused("numa-unknown", f"{cause}; unset NUMA_BINDING") from None
