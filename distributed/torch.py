"""What a training script needs to run on one process or on many, unchanged.

    env = init_distributed()                            # join the others; a no-op when alone
    seed_everything(42, env.rank)
    model = setup_distributed_models(model)             # on the device, wrapped in DDP
    loader = get_dataloader_for_distributed(dataset, batch_size=32, shuffle=True)
    metrics = sync_metrics({"loss": loss}, weight=samples)

Needs torch alone. Holds no state of its own: the process group is torch's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import mmap
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from distributed.environment import Environment, LauncherError, detect

STRATEGIES = ("auto", "single", "dp", "ddp")
HEARTBEAT = struct.Struct("<qdq")  # step, unix time, newest committed checkpoint's step or -1


# --- joining the others -------------------------------------------------------------------------


def init_distributed(
    *,
    backend: str | None = None,
    join_timeout_s: float = 300,
    timeout_s: float = 1800,
    local_rank: int | None = None,
) -> Environment:
    """Choose this process's device and, where there are others, join them in a process group.

    Args:
        backend: "nccl" or "gloo"; None or "auto" takes $BACKEND, else nccl with GPUs, else gloo.
        join_timeout_s: how long every rank may take to show up.
        timeout_s: how long one collective may take.
        local_rank: the --local-rank argument of torch.distributed.launch.

    Returns:
        This process's place; `run_id` is rank 0's on every rank.

    Raises:
        LauncherError: the launcher's variables, two ranks or two ranks' GPUs contradict each other.
        TimeoutError: some ranks did not show up; the message names them.
        ValueError: nccl was asked for without GPUs, or the backend is unknown.
    """
    env = detect(local_rank=local_rank)
    backend = _choose_backend(backend, env)
    if torch.cuda.is_available():
        # A launcher may show each rank all GPUs of the node, or its own alone.
        torch.cuda.set_device(env.local_rank % torch.cuda.device_count())
    if env.world_size == 1:
        return env
    if backend == "gloo":
        _choose_gloo_interface(env)
    store = _open_store(env, join_timeout_s)
    prefix = f"launch/{env.restart_count}"  # a restart sees nothing of the attempt before
    gpu = _gpu_uuid() if backend == "nccl" else None
    run_id = _meet(PrefixStore(prefix, store), env, join_timeout_s, gpu)
    store.set_timeout(timedelta(seconds=timeout_s))
    dist.init_process_group(
        backend,
        store=PrefixStore(f"{prefix}/group", store),
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
    """Open the store at the master's address; rank 0 serves it unless the node agent does."""
    serves = env.rank == 0 and not env.agent_store
    at = f"{env.master_addr}:{env.master_port}"
    try:
        return TCPStore(
            env.master_addr,
            env.master_port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=not env.agent_store,  # as torch's own env:// does
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            text = f"port-in-use: cannot serve {at}; set MASTER_PORT to a free port"
            raise OSError(text) from error
        raise TimeoutError(
            f"node-missing: rank {env.rank} on {socket.gethostname()} found nobody at {at} within "
            f"{timeout_s:g} s; rank 0 did not start there, or this host cannot resolve or reach "
            "that address"
        ) from error


def _meet(store: Store, env: Environment, timeout_s: float, gpu: str | None) -> str:
    """Wait until every rank has checked in, and return rank 0's run id.

    The last to come opens the gate for all. Whoever finds a fault puts it on the gate instead,
    after a "!", so that every rank stops with the same message and none waits on.
    """
    try:
        gate = _check_in(store, env, timeout_s, gpu)
    except dist.DistNetworkError as error:
        text = f"lost the store at {env.master_addr}:{env.master_port} while ranks were joining"
        raise ConnectionError(f"{text}; rank 0's message says why") from error
    if not gate.startswith("!"):
        return gate
    fault, _, text = gate[1:].partition(": ")
    raise TimeoutError(gate[1:]) if fault == "node-missing" else LauncherError(text, fault)


def _check_in(store: Store, env: Environment, timeout_s: float, gpu: str | None) -> str:
    me = f"{socket.gethostname()} (process {os.getpid()})"
    if env.rank == 0:
        store.set("run_id", env.run_id)
    other = store.compare_set(f"join/{env.rank}", "", me).decode()
    if other != me:
        text = f"rank {env.rank} runs twice, on {other} and on {me}; give each node its own rank"
        store.set("gate", f"!duplicate-node-rank: {text}")
    elif gpu and (fault := _shared_gpu(store, env, gpu)):
        store.set("gate", f"!{fault}")
    elif store.add("joined", 1) == env.world_size:
        store.set("gate", store.get("run_id").decode())
    try:
        store.wait(["gate"], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        store.set("gate", f"!{_absent(store, env, timeout_s)}")
    return store.get("gate").decode()


def _absent(store: Store, env: Environment, timeout_s: float) -> str:
    missing = [r for r in range(env.world_size) if not store.check([f"join/{r}"])]
    named = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    return (
        f"node-missing: {len(missing)} of {env.world_size} ranks did not join at "
        f"{env.master_addr}:{env.master_port} within {timeout_s:g} s: rank {named}; "
        "see whether they started, and the log of their node"
    )


def _gpu_uuid() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _shared_gpu(store: Store, env: Environment, gpu: str) -> str | None:
    """Return the fault where another rank holds this rank's GPU, which NCCL cannot share."""
    other = store.compare_set(f"gpu/{gpu}", "", str(env.rank)).decode()
    if other == str(env.rank):
        return None
    host, index = socket.gethostname(), torch.cuda.current_device()
    return (
        f"duplicate-gpu: ranks {other} and {env.rank} both use GPU {index} ({gpu}) of {host}; "
        "start no more ranks than GPUs, or use the gloo backend"
    )


def _choose_gloo_interface(env: Environment) -> None:
    """Name gloo's interface where it would take the loopback, which no other node can reach.

    gloo binds to the address of the host's own name, 127.0.1.1 on many a Debian.
    """
    if env.num_nodes == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with contextlib.suppress(OSError):  # the host's own name has no address: as bad
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return
    with contextlib.suppress(OSError):  # no way to the master: joining says so
        address = _address_towards(env.master_addr)
        if not address.startswith("127.") and (name := _interface_of(address)):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the route to a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing, only picks the route
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this IPv4 address."""
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR, netdevice(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(any_socket.fileno(), get_address, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


# --- where am I ---------------------------------------------------------------------------------


def device() -> torch.device:
    """Return the device of this process: its GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_main_process() -> bool:
    """Return whether this is global rank 0."""
    return dist.get_rank() == 0 if dist.is_initialized() else detect().is_main


def barrier() -> None:
    """Wait for every rank; a no-op when alone."""
    if dist.is_initialized():
        dist.barrier()


# --- model, data, numbers -----------------------------------------------------------------------


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch, its GPUs, Python and, where it is loaded, NumPy.

    Call it with rank 0 on every rank before the model is made (same weights everywhere) and with
    the true rank after (different dropout). Neighbouring seeds and ranks do not meet.
    """
    own_seed = (seed + 1_000_003 * rank) % 2**32
    torch.manual_seed(own_seed)
    random.seed(own_seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own_seed)


def setup_distributed_models(
    model: nn.Module, *, strategy: str = "auto", find_unused_parameters: bool = False
) -> nn.Module:
    """Move the model to this process's device and wrap it as the strategy says.

    Args:
        model: the same on every rank in shape; rank 0's weights go to all.
        strategy: "ddp" one process per GPU; "dp" one process, all its GPUs; "single" neither;
            "auto" is "ddp" where there are several processes, else "single".
        find_unused_parameters: DDP's; for models that skip some parameters in some steps.

    Raises:
        ValueError: the strategy is unknown or not built, or does not fit the number of processes.
    """
    if strategy == "fsdp":
        raise ValueError("strategy fsdp is not built yet; use ddp")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; use {', '.join(STRATEGIES)}")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if strategy in ("single", "dp") and world_size > 1:
        raise LauncherError(
            f"strategy {strategy} runs in one process but the launcher started {world_size}; "
            "use strategy ddp, or start one process"
        )
    here = device()
    model = model.to(here)
    if world_size > 1:
        return DistributedDataParallel(
            model,
            device_ids=[here] if here.type == "cuda" else None,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=True,  # gradients live in the buckets: one copy less
        )
    if strategy == "dp" and torch.cuda.device_count() > 1:
        return DataParallel(model)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module from within its wrapper."""
    return model.module if isinstance(model, DistributedDataParallel | DataParallel) else model


@contextlib.contextmanager
def no_sync(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Keep gradients local while accumulating; the backward pass after it exchanges the sum."""
    if enabled and isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


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
    """Return a loader over this rank's share of a dataset that has a length.

    Every rank gets the same number of samples; without `drop_last` some are given out twice to
    make it so. Call `loader.sampler.set_epoch(n)` for another order in each epoch.

    Args:
        batch_size: samples per process.
    """
    joined = dist.is_initialized()
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset,
        num_replicas=dist.get_world_size() if joined else 1,
        rank=dist.get_rank() if joined else 0,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
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
    """Return each value's mean over the ranks, weighted exactly, in one all-reduce of float64.

    Args:
        values: the same names on every rank.
        weight: how much this rank's values count, such as its number of samples. The values of
            a rank that weighs 0 are ignored, whatever they are.

    Returns:
        The same numbers on every rank; NaN where all ranks weigh 0.
    """
    if not dist.is_initialized():
        return dict(values)
    names = sorted(values)
    parts = [values[name] * weight if weight else 0.0 for name in names]
    where = device() if dist.get_backend() == "nccl" else torch.device("cpu")
    sums = torch.tensor([*parts, weight], dtype=torch.float64, device=where)
    dist.all_reduce(sums)
    means = dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))
    return {name: means[name] for name in values}


# --- signs of life, and the end -----------------------------------------------------------------


def beat(step: int, saved: int | None = None) -> None:
    """Tell the node agent which step this rank has reached; a no-op without one.

    Args:
        step: optimizer steps done.
        saved: the step of the newest committed checkpoint, where that is news.
    """
    record = _heartbeat()
    if record is None:
        return
    view, offset = record
    struct.pack_into("<qd", view, offset, step, time.time())
    if saved is not None:
        struct.pack_into("<q", view, offset + 16, saved)


@functools.cache
def _heartbeat() -> tuple[mmap.mmap, int] | None:
    """Map the agent's file once; each local rank has a record of its own in it."""
    env = detect()
    if env.heartbeat_file is None:
        return None
    with Path(env.heartbeat_file).open("r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
    offset = HEARTBEAT.size * env.local_rank
    HEARTBEAT.pack_into(view, offset, 0, time.time(), -1)
    return view, offset


def finish(code: int = 0) -> NoReturn:
    """Flush everything and leave at once, without the 0.6 s that taking torch down costs."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
