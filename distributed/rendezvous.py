"""The rendezvous: all ranks meet at the master's store, then form a process group.

A rank that finds a fault reports it to all ranks. If ranks do not join in time, the error names
them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from . import network
from .collectives import broadcast, record_join
from .environment import Environment, LauncherError, check_run_id
from .errors import some_of, with_fault


def join_ranks(
    env: Environment,
    device: torch.device,
    backend: str,
    *,
    join_timeout_s: float,
    timeout_s: float,
) -> Environment:
    """Form the process group of all ranks, unless there is one; return `env` with rank 0's run id.

    Sets network variables of gloo and NCCL in os.environ (network.py). Waits up to `join_timeout_s`
    seconds for the other ranks; `timeout_s` is the time limit of each later collective. Raises the
    errors of rendezvous(), ValueError for an unknown NCCL_PROFILE, and LauncherError if rank 0's
    run id cannot name a folder.
    """
    if not dist.is_initialized():
        os.environ.update(network.choose_variables(env.master_addr, env.num_nodes, os.environ))
        # NCCL lets ranks share a GPU only if the user gives each its own host id.
        owns_gpu = backend == "nccl" and "NCCL_HOSTID" not in os.environ
        store = rendezvous(env, device, owns_gpu=owns_gpu, timeout_s=join_timeout_s)

        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        record_join()
    return replace(env, run_id=_share_run_id(env))


@cache
def _share_run_id(env: Environment) -> str:
    """Return rank 0's run id, and ask only once: later, rank 0 may be gone."""
    if env.agent_store and env.is_named:  # the launcher has set RUN_ID to the same on all ranks
        return env.run_id
    return check_run_id(broadcast(env.run_id))


def rendezvous(
    env: Environment, device: torch.device, *, owns_gpu: bool, timeout_s: float
) -> Store:
    """Wait until every rank has checked in; returns the store.

    With `owns_gpu`, `device` is a GPU that no other rank may use. `timeout_s` limits the connection
    to the store and, once more, the wait for the other ranks.

    All ranks wait for the key `gate`, which holds JSON. The last rank to check in sets it to an
    empty list. A rank that finds a fault sets the key to the fault's name and text instead.

    Raises that fault on every rank: a LauncherError or, if ranks are missing after `timeout_s`
    seconds, a TimeoutError. A rank that cannot reach the store raises TimeoutError, or
    ConnectionError if the store is lost later; rank 0 raises OSError if its port is in use.
    """
    # The prefix is needed because torchrun's store survives a restart.
    store = PrefixStore(f"launch/{env.restart_count}", _open_store(env, timeout_s=timeout_s))
    try:
        store.add("here", 1)
        if found := _check_in(store, env, device, owns_gpu=owns_gpu):
            store.set("gate", json.dumps(found))
        elif store.add("joined", 1) == env.world_size:
            store.set("gate", "[]")

        try:
            store.wait(["gate"], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            text = _describe_missing(store, env, timeout_s=timeout_s)
            store.set("gate", json.dumps(["node-missing", text]))
        answer = store.get("gate")
    except dist.DistNetworkError:
        raise with_fault(
            ConnectionError,
            "node-missing",
            f"lost rank 0's store ({env.master_addr}:{env.master_port}) before all ranks joined; "
            "rank 0's message says why",
        ) from None

    with contextlib.suppress(RecursionError, json.JSONDecodeError, UnicodeDecodeError):
        match json.loads(answer):
            case []:
                return store
            case [str(fault), str(text)]:
                _leave_store(store, env)
                if fault == "node-missing":
                    raise with_fault(TimeoutError, fault, text)
                raise LauncherError(text, fault)
    raise ConnectionError(f"{answer!r:.80} in the store is not from a rank of this run")


def _describe_missing(store: Store, env: Environment, *, timeout_s: float) -> str:
    """Return the message about the ranks that have not claimed their number in the store."""
    missing = [rank for rank in range(env.world_size) if not store.check([f"rank {rank} is used"])]
    return (
        f"{len(missing)} of {env.world_size} ranks did not join at "
        f"{env.master_addr}:{env.master_port} within {timeout_s:g} s: "
        f"rank {some_of(missing, 16)}; check whether they started, and read their nodes' logs"
    )


def _leave_store(store: Store, env: Environment) -> None:
    """Record that this rank has read the fault.

    Rank 0 waits up to 30 s for all others that have connected: it may serve the store.
    """
    with contextlib.suppress(RuntimeError):
        if store.add("told", 1) >= store.add("here", 0):
            store.set("over", "")
        if env.is_main:
            store.wait(["over"], timedelta(seconds=30))  # enough on a busy machine


def _open_store(env: Environment, *, timeout_s: float) -> TCPStore:
    """Connect to the store at the master's address; rank 0 serves it unless the node agent does.

    Raises TimeoutError if the store cannot be reached in `timeout_s` seconds, and OSError on rank 0
    if the port is in use.
    """
    is_server = env.is_main and not env.agent_store
    at = f"{env.master_addr}:{env.master_port}"
    unreachable = with_fault(
        TimeoutError,
        "node-missing",
        f"rank {env.rank} on {socket.gethostname()} could not connect to {at} within "
        f"{timeout_s:g} s; check that rank 0 starts there, and that this host can reach it",
    )
    if not is_server and not _is_served(env.master_addr, env.master_port, timeout_s=timeout_s):
        raise unreachable

    try:
        return TCPStore(
            # Behind NAT or a service, rank 0 may not reach the address that leads to it.
            "127.0.0.1" if is_server else env.master_addr,
            env.master_port,
            is_master=is_server,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=not env.agent_store,  # as torch's own env:// does
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):  # not a DistNetworkError before torch 2.5
            text = f"cannot listen on {at}; give each process its own RANK, or change MASTER_PORT"
            raise with_fault(OSError, "port-in-use", text) from None
        if not isinstance(error, dist.DistNetworkError):
            raise
        raise unreachable from None


def _is_served(address: str, port: int, *, timeout_s: float) -> bool:
    """Return whether a port accepts a connection within `timeout_s` seconds.

    This is asked first because TCPStore prints a stack trace if it cannot connect.
    """
    end = time.monotonic() + timeout_s
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((address, port), left):
            return True
        time.sleep(0.1)
    return False


def _check_in(
    store: Store, env: Environment, device: torch.device, *, owns_gpu: bool
) -> tuple[str, str] | None:
    """Claim this rank in the store and, if `owns_gpu`, its GPU, which no other rank may use.

    Returns a fault's name and text if another process has already claimed one of them.
    """
    host = socket.gethostname().encode(errors="replace").decode()  # the store takes only UTF-8
    me = f"{host} (rank {env.rank}, {device}, process {os.getpid()})"
    claims = {f"rank {env.rank} is used": ("duplicate-node-rank", "give each node its own rank")}
    if owns_gpu:
        gpu = torch.cuda.get_device_properties(device)
        cure = "start no more ranks than GPUs, or use the gloo backend"
        claims[f"GPU-{gpu.uuid} is used"] = ("duplicate-gpu", cure)

    for key, (fault, cure) in claims.items():
        other = store.compare_set(key, "", me).decode()  # returns the first claim
        if other != me:
            return fault, f"{key} twice, on {other} and on {me}; {cure}"
    return None
