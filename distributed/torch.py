"""What a training script needs to run unchanged on one process or on many.

    env = init_distributed()                            # join the others; does nothing when alone
    seed_everything(42, env.rank)
    model = setup_distributed_models(model)             # on the device, wrapped in DDP
    loader = get_dataloader_for_distributed(dataset, batch_size=32, shuffle=True)
    metrics = sync_metrics({"loss": loss}, weight=samples)

Needs torch alone. It has no state of its own: the process group is torch's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import json
import os
import random
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, library, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from . import network
from .environment import Environment, LauncherError, check_run_id, detect
from .errors import with_fault
from .heartbeat import beat as beat
from .strategy import check_strategy

EXIT_LIMIT_S = 30.0  # for threads and exit handlers


def init_distributed(
    *,
    backend: str | None = None,
    join_timeout_s: float = 300,
    timeout_s: float = 1800,
    local_rank: int | None = None,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
) -> Environment:
    """Choose this process's device and, if there are other ranks, join them in a process group.

    Args:
        backend: "nccl" or "gloo"; None or "auto": $BACKEND, else nccl with GPUs, else gloo.
        join_timeout_s: limit until all ranks have joined.
        timeout_s: limit for one collective.
        local_rank: the --local-rank argument of torch.distributed.launch.
        nodes, ranks_per_node: refuse any other number.

    Returns this process's environment, with rank 0's run id. Raises LauncherError if variables,
    ranks or GPUs contradict each other, TimeoutError with the ranks that did not join, and
    ValueError for nccl without a GPU.
    """
    env = detect(local_rank=local_rank)
    for name, asked, given in (
        ("--nodes", nodes, env.num_nodes),
        ("--gpus-per-node", ranks_per_node, env.local_world_size),
    ):
        if asked not in (None, given):
            raise LauncherError(
                f"{name} is {asked} but {env.launcher} started {given}; make them agree"
            )
    backend = _choose_backend(backend, env)
    if torch.cuda.is_available():
        # Some launchers show each rank all GPUs of the node, others only its own.
        torch.cuda.set_device(env.local_rank % torch.cuda.device_count())
    if env.world_size == 1:
        return env
    os.environ.update(network.choose_variables(env.master_addr, env.num_nodes))
    # The prefix, because torchrun's store survives a restart.
    store = PrefixStore(f"launch/{env.restart_count}", _open_store(env, join_timeout_s))
    run_id = _meet(store, env, join_timeout_s, backend)
    store.set_timeout(timedelta(seconds=timeout_s))
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device() if backend == "nccl" else None,
    )
    return dataclasses.replace(env, run_id=run_id)


def _choose_backend(asked: str | None, env: Environment) -> str:
    cuda = torch.cuda.is_available()
    chosen = asked if asked not in (None, "auto") else env.backend or ("nccl" if cuda else "gloo")
    if chosen not in ("nccl", "gloo"):
        raise ValueError(f"backend {chosen!r} is unknown; use nccl, gloo or auto")
    if chosen == "nccl" and not cuda:
        raise ValueError(f"backend nccl needs a GPU and {socket.gethostname()} has none; use gloo")
    return chosen


def _open_store(env: Environment, timeout_s: float) -> TCPStore:
    """Connect to the store at the master's address; rank 0 serves it unless the node agent does."""
    at = f"{env.master_addr}:{env.master_port}"
    try:
        return TCPStore(
            env.master_addr,
            env.master_port,
            is_master=env.rank == 0 and not env.agent_store,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=not env.agent_store,  # as torch's own env:// does
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            cause = f"cannot serve {at}; set another MASTER_PORT"
            raise with_fault(OSError, "port-in-use", cause) from error
        me = f"rank {env.rank} on {socket.gethostname()}"
        cause = f"{me} found nobody at {at} within {timeout_s:g} s"
        cure = "check that rank 0 starts there and that this host can reach it"
        raise with_fault(TimeoutError, "node-missing", f"{cause}; {cure}") from error


def _meet(store: Store, env: Environment, timeout_s: float, backend: str) -> str:
    """Wait until every rank has checked in, and return rank 0's run id.

    All ranks wait for the key `gate`, which holds JSON. The last to check in puts the run id there.
    A rank that finds a fault puts its name and text there instead, and every rank raises that.
    """
    try:
        if env.rank == 0:
            store.set("run_id", env.run_id)
        if found := _check_in(store, env, backend):
            store.set("gate", json.dumps(found))
        elif store.add("joined", 1) == env.world_size:
            store.set("gate", json.dumps([store.get("run_id").decode()]))
        try:
            store.wait(["gate"], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            store.set("gate", json.dumps(["node-missing", _absent(store, env, timeout_s)]))
        told = store.get("gate")
    except dist.DistNetworkError as error:
        cause = f"lost the store at {env.master_addr}:{env.master_port} while ranks were joining"
        cause = f"{cause}; rank 0's message says why"
        raise with_fault(ConnectionError, "node-missing", cause) from error
    with contextlib.suppress(RecursionError, json.JSONDecodeError, UnicodeDecodeError):
        match json.loads(told):
            case [str(run_id)]:  # the store has no password: an agent's ranks know their run id
                return env.run_id if env.agent_store and env.is_named else check_run_id(run_id)
            case ["node-missing", str(text)]:
                raise with_fault(TimeoutError, "node-missing", text)
            case [str(fault), str(text)]:
                raise LauncherError(text, fault)
    raise ConnectionError(f"{told!r:.80} at the store is not from a rank of this run")


def _check_in(store: Store, env: Environment, backend: str) -> tuple[str, str] | None:
    """Take this rank and, for NCCL, its GPU; return fault and text if another process has them."""
    me = f"{socket.gethostname()} (rank {env.rank}, {device()}, process {os.getpid()})"
    taken = {f"rank {env.rank} runs": ("duplicate-node-rank", "give each node its own rank")}
    if backend == "nccl":
        uuid = torch.cuda.get_device_properties(device()).uuid
        cure = "start no more ranks than GPUs, or use the gloo backend"
        taken[f"GPU-{uuid} is used"] = ("duplicate-gpu", cure)
    for key, (fault, cure) in taken.items():
        other = store.compare_set(key, "", me).decode()
        if other != me:
            return fault, f"{key} twice, on {other} and on {me}; {cure}"
    return None


def _absent(store: Store, env: Environment, timeout_s: float) -> str:
    missing = [r for r in range(env.world_size) if not store.check([f"rank {r} runs"])]
    named = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    meeting = f"at {env.master_addr}:{env.master_port} within {timeout_s:g} s"
    cause = f"{len(missing)} of {env.world_size} ranks did not join {meeting}: rank {named}"
    return f"{cause}; check whether they started, and read their node's log"


def device() -> torch.device:
    """Return the device of this process: its GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_main_process() -> bool:
    """Return whether this is global rank 0."""
    return dist.get_rank() == 0 if dist.is_initialized() else detect().is_main


def barrier() -> None:
    """Wait for every rank; do nothing when alone."""
    if dist.is_initialized():
        dist.barrier()


def gather_bytes(data: bytes) -> list[bytes]:
    """Return every rank's bytes, by rank, on every rank.

    torch's own all_gather_object would unpickle what the others send.
    """
    if not dist.is_initialized():
        return [data]
    where = device() if dist.get_backend() == "nccl" else "cpu"
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=where)
    sizes[dist.get_rank()] = len(data)
    dist.all_reduce(sizes)
    mine = torch.frombuffer(bytearray(data.ljust(int(sizes.max()) + 1)), dtype=torch.uint8)
    everyone = [torch.empty_like(mine, device=where) for _ in sizes]
    dist.all_gather(everyone, mine.to(where))
    return [to_bytes(one.cpu())[:size] for one, size in zip(everyone, sizes.tolist(), strict=True)]


def to_bytes(tensor: Tensor) -> bytes:
    """Return a copy of a contiguous CPU tensor's memory, without NumPy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch, its GPUs, Python and NumPy (if it is imported), differently for each rank.

    Call it without a rank before the model is created, for the same weights on every rank.
    """
    own_seed = (seed + 1_000_003 * rank) % 2**32
    torch.manual_seed(own_seed)
    random.seed(own_seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own_seed)


def setup_distributed_models(
    model: nn.Module, *, strategy: str = "auto", find_unused_parameters: bool = False
) -> nn.Module:
    """Move the model to this process's device and wrap it; every rank gets rank 0's weights.

    `strategy` is "ddp": one process per GPU; "dp": one process, all its GPUs; "single": neither; or
    "auto": ddp if there are several processes. A model that skips parameters in some steps needs
    `find_unused_parameters`. Raises ValueError for a strategy that is unknown or does not fit.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    check_strategy(strategy, world_size)
    model = model.to(device())
    if world_size > 1:
        return DistributedDataParallel(
            model,
            device_ids=[device()] if device().type == "cuda" else None,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=True,  # saves a copy of the gradients
        )
    if strategy == "dp" and torch.cuda.device_count() > 1:
        return DataParallel(model)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module without its wrapper."""
    return model.module if isinstance(model, DistributedDataParallel | DataParallel) else model


def no_sync(model: nn.Module, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Do not exchange gradients in the body; the next backward pass exchanges their sum."""
    if enabled and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return contextlib.nullcontext()


def get_dataloader_for_distributed(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    shuffle: bool,
    seed: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """Return a loader over this rank's share of a dataset, `batch_size` samples per process.

    All ranks get the same number of samples. Unless `drop_last`, some samples repeat for that. Call
    `loader.sampler.set_epoch(n)` for another order in each epoch.
    """
    alone = {} if dist.is_initialized() else {"num_replicas": 1, "rank": 0}
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, shuffle=shuffle, seed=seed, drop_last=drop_last, **alone
    )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        drop_last=drop_last,
        persistent_workers=num_workers > 0,
    )


def sync_metrics(values: Mapping[str, float], *, weight: float = 1.0) -> dict[str, float]:
    """Return each value's weighted mean over the ranks, with one all-reduce in float64.

    Every rank passes the same names and gets the same numbers. `weight` is what this rank's values
    count, such as its samples. Values of weight 0 are ignored; if all weights are 0, means are NaN.
    """
    if not dist.is_initialized():
        return dict(values)
    names = sorted(values)
    parts = [values[name] * weight if weight else 0.0 for name in names]
    sums = torch.tensor([*parts, weight], dtype=torch.float64, device=device())
    dist.all_reduce(sums)
    means = dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))
    return {name: means[name] for name in values}


def finish(code: int = 0) -> NoReturn:
    """Join threads, run exit handlers, and exit without tearing down torch, which takes 0.6 s.

    After 30 s of threads and handlers the process prints a line and exits without them.
    """
    atexit.unregister(finish)  # it can be a handler itself
    sys.stdout.flush()
    sys.stderr.flush()
    threading.Thread(target=_exit_late, args=(code,), daemon=True).start()
    for finalizer, info in getattr(weakref.finalize, "_registry", {}).items():
        if info.func.__module__ == library.__name__:
            finalizer.atexit = False  # part of tearing down torch: 0.03 s
    threading._shutdown()  # type: ignore[attr-defined]  # then handlers, as Python does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_late(code: int) -> None:
    end = time.monotonic() + EXIT_LIMIT_S
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
        with contextlib.suppress(ValueError):  # an incomplete environment, refused elsewhere
            beat()
    text = f"threads or exit handlers still run after {EXIT_LIMIT_S:g} s; exiting without them"
    os.write(2, f"process {os.getpid()}: {text}\n".encode())  # another thread may hold sys.stderr
    os._exit(code)
