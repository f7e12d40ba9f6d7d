"""Derives the number of ranks, the number of nodes and the master from torchrun's options."""

from __future__ import annotations

import os
from typing import Any

from launcher.command_line import RANGE_CURE
from launcher.plan.settings import find_value
from launcher.text import Environ, PlanError


def read_like_torchrun(values: dict[str, Any], environ: Environ) -> None:
    """Complete the values that were typed, by field of Typed. Raises PlanError."""
    if not (rest := values.get("rest")) or not rest[0]:
        cause = "SCRIPT is empty" if rest else "no SCRIPT"
        raise PlanError(f"{cause}; usage: {values['usage']}")

    rendezvous = {name: values.pop(f"rdzv_{name}", "") for name in ("backend", "endpoint")}
    is_alone = values.pop("standalone", False)
    if not values.get("hosts"):
        values.setdefault("nproc", find_value("NPROC_PER_NODE", environ) or "1")
        nodes = "1" if is_alone else values.get("nnodes", "")
        find_master(values, nodes, **rendezvous, in_step=bool(environ.get("SLURM_STEP_ID")))

    cpus = os.sysconf("SC_NPROCESSORS_ONLN")
    nproc = values.get("nproc")
    if nproc == "cpu":
        values["nproc"] = str(cpus)
    elif nproc == "auto":
        values["cpu_nproc"] = cpus
    elif nproc == "gpu":
        values |= {"nproc": "auto", "cpu_nproc": 0}


def find_master(
    values: dict[str, Any], nodes: str, *, backend: str, endpoint: str, in_step: bool
) -> None:
    """Read the number of nodes, this node's rank and the master from torchrun's rendezvous."""
    least, is_range, most = nodes.partition(":")
    if is_range and least != most:
        leave_to_torch(values, {"--nnodes": nodes, "--rdzv-backend": backend}, endpoint)
        return
    if backend not in ("", "static", "c10d"):
        raise PlanError(f"--rdzv-backend {backend}: not supported; omit it, and give --master-addr")

    nodes = least or ("1" if endpoint == "localhost:0" else "")  # torchrun's default
    if nodes:
        values["nnodes"] = nodes
    if nodes in ("", "1") and not in_step:
        return

    if backend == "c10d" and not values.get("node_rank") and not in_step:
        values["node_rank"] = "auto"
    if endpoint and nodes != "1":
        address, has_port, port = endpoint.rpartition(":")
        if has_port:
            values.setdefault("port", port)
        address = address if has_port else endpoint
        values.setdefault("master", address.removeprefix("[").removesuffix("]"))


def leave_to_torch(values: dict[str, Any], given: dict[str, str], endpoint: str) -> None:
    """Pass a range of nodes on: the node agent hands it to torch's elastic agent.

    Raises PlanError where torch's agent would wait for the largest number of nodes.
    """
    if given["--rdzv-backend"] in ("", "static"):
        raise PlanError(f"--nnodes {given['--nnodes']}: {RANGE_CURE}")

    if endpoint:
        given |= {"--rdzv-endpoint": endpoint}
    # The same on every node, unlike this project's run ids; torchrun's default is none.
    given |= {"--rdzv-id": values.get("run_id") or "none"}
    words = [word for option in given.items() for word in option]
    values["passed"] = (*values.get("passed", ()), *words)
    values["nnodes"] = "1"  # this one; torch's agents find the others
