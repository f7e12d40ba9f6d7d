"""Derives the number of ranks, the number of nodes and the master from torchrun's options."""

import os

from launcher.command_line import RANGE_CURE
from launcher.plan.settings import find_nproc
from launcher.plan.typed import Values
from launcher.text import Environ, PlanError


def read_like_torchrun(values: Values, environ: Environ) -> None:
    """Replace torchrun's rendezvous options in `values` by nodes, a node rank and a master.

    Also sets `nproc` and `cpu_nproc`: torchrun's default is one rank, and its --nproc-per-node may
    be cpu, gpu or auto. With --hosts, the nodes and their ranks are left to the plan. Raises
    PlanError if there is no script, or if the options do not describe a valid run.
    """
    if not (rest := values.get("rest")) or not rest[0]:
        cause = "SCRIPT is empty" if rest else "no SCRIPT"
        raise PlanError(f"{cause}; usage: {values['usage']}")

    backend = values.pop("rdzv_backend", "")
    endpoint = values.pop("rdzv_endpoint", "")
    is_alone = values.pop("standalone", False)
    hosts = values.get("hosts")
    default = None if hosts else "1"  # torchrun's; of --hosts, one per GPU
    values.setdefault("nproc", find_nproc(environ) or default)
    if not hosts:
        nodes = "1" if is_alone else values.get("nnodes", "")
        set_nodes(values, nodes, backend, endpoint, in_step=bool(environ.get("SLURM_STEP_ID")))

    cpus = os.sysconf("SC_NPROCESSORS_ONLN")
    nproc = values["nproc"]
    if nproc == "cpu":
        values["nproc"] = str(cpus)
    elif nproc == "auto":
        values["cpu_nproc"] = cpus  # if there is no GPU
    elif nproc == "gpu":
        values |= {"nproc": "auto", "cpu_nproc": 0}  # 0: GPUs are needed


def set_nodes(values: Values, nodes: str, backend: str, endpoint: str, *, in_step: bool) -> None:
    """Set `nnodes`, `node_rank`, `master` and `port` in `values`, as torchrun's options say.

    A range of nodes is left to torch. `nodes` is empty if no number was given: one node, unless
    this is a step of SLURM, which has its own number. `backend` and `endpoint` are those of the
    rendezvous. Raises PlanError if the backend cannot be replaced by this project's.
    """
    least, is_range, most = nodes.partition(":")
    if is_range and least != most:
        leave_to_torch(values, nodes, backend, endpoint)
        return
    if backend not in ("", "static", "c10d"):
        raise PlanError(f"--rdzv-backend {backend}: not supported; omit it, and give --master-addr")

    # torch's guides use this endpoint for a run on one node, whatever the size of the step.
    number = least or ("1" if endpoint == "localhost:0" else "")
    if number:
        values["nnodes"] = number
    if number in ("", "1") and not in_step:
        return

    # With c10d, no node is given its rank by hand.
    if backend == "c10d" and not values.get("node_rank") and not in_step:
        values["node_rank"] = "auto"
    if endpoint and number != "1":
        address = endpoint
        if ":" in endpoint:
            address, _, port = endpoint.rpartition(":")
            values.setdefault("port", port)
        values.setdefault("master", address.strip("[]"))


def leave_to_torch(values: Values, nodes: str, backend: str, endpoint: str) -> None:
    """Have the node agent hand a range of nodes, such as 1:4, to torch's elastic agent.

    Adds torchrun's options to `passed`, and sets `nnodes` to 1: this launcher starts one node.
    Raises PlanError where torch's agent would wait for the largest number of nodes.
    """
    if backend in ("", "static"):
        raise PlanError(f"--nnodes {nodes}: {RANGE_CURE}")

    words = ["--nnodes", nodes, "--rdzv-backend", backend]
    if endpoint:
        words += ["--rdzv-endpoint", endpoint]
    # All nodes need the same id, and new run ids differ; torchrun's default is "none".
    words += ["--rdzv-id", values.get("run_id") or "none"]
    values["passed"] = (*values.get("passed", ()), *words)
    values["nnodes"] = "1"  # this one; torch's agents find the others
