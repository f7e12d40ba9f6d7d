"""The place of this node in a SLURM step that has one task on each node."""

import re
import socket
from collections.abc import Mapping

from distributed.environment import LauncherError, Variables, slurm
from distributed.job import ask_scheduler, is_task


def slurm_node(environ: Mapping[str, str], master: str = "") -> tuple[int, int, str] | None:
    """Return the node count, node rank and master of a step with one task per node.

    None if this is not a task of a step. On several nodes, the master is the first of these that is
    set: `master`, MASTER_ADDR, node rank 0. Asks scontrol if its name cannot be resolved. Raises
    LauncherError if the step has several tasks per node, or if its variables are not valid.
    """
    if not is_task(environ):
        return None

    # slurm() needs a port, which is not used here, and would compare a WORLD_SIZE with the step's.
    v = Variables({**environ, "MASTER_PORT": "1", "WORLD_SIZE": ""})
    is_alone = v["SLURM_STEP_NUM_NODES"] == "1"
    v["MASTER_ADDR"] = "" if is_alone else master or v["MASTER_ADDR"]
    env = slurm(v)
    if env.world_size != env.num_nodes:
        cause = f"srun started {env.world_size} tasks on {env.num_nodes} nodes"
        raise LauncherError(f"{cause}; give it --ntasks={env.num_nodes} --ntasks-per-node=1")

    address = find_address(env.master_addr) if env.num_nodes > 1 else env.master_addr
    return env.num_nodes, env.node_rank, address


def find_address(node: str) -> str:
    """Return a node's name, or its address if only SLURM knows it, as in some clouds.

    Asks scontrol if the name cannot be resolved; returns the name if scontrol does not answer.
    """
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        record = ask_scheduler("scontrol", "show", "node", node) or ""
        found = re.search(r" NodeAddr=(\S+)", record)
        return found[1] if found else node
    return node
