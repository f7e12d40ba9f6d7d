"""How a run continues after the loss of a node: SPARES and MIN_NODES."""

from dataclasses import replace

from launcher.plan.plan import World
from launcher.plan.settings import read_number
from launcher.text import Environ, PlanError

NAMES = ("SPARES", "MIN_NODES")
FANOUTS = ("ssh", "srun")  # that survive the loss of a node


def set_aside(world: World, environ: Environ, fanout: str, engine: str, max_restarts: int) -> World:
    """Return the world with its last SPARES nodes as spares, no longer counted in `num_nodes`.

    `min_nodes` becomes MIN_NODES or, if that is unset, all other nodes. The world is unchanged if
    neither variable asks for anything, and outside the job that a script submits. Raises PlanError
    if the numbers are not valid, or if this launcher cannot replace a node.
    """
    given = {name: environ[name] for name in NAMES if environ.get(name)}
    spares = int(given.get("SPARES", 0))
    if (not spares and "MIN_NODES" not in given) or fanout in ("job_command", "check"):
        return world

    names = " ".join(f"{name}={value}" for name, value in given.items())
    if fanout not in FANOUTS or engine:
        raise PlanError(
            f"{names}: this launcher does not replace nodes; "
            "use launch_torchrun_auto.sh or a SLURM job, or unset them"
        )
    if not max_restarts:
        raise PlanError(
            f"{names} without MAX_RESTARTS; set it, say to 3 (each replacement is a restart)"
        )
    if spares >= world.num_nodes:
        raise PlanError(
            f"SPARES is {spares}, but there are only {world.num_nodes} nodes; "
            "name more nodes (the last ones are the spares)"
        )

    num_nodes = world.num_nodes - spares
    least = read_number("MIN_NODES", given.get("MIN_NODES", str(num_nodes)), 1, num_nodes)
    return replace(world, num_nodes=num_nodes, num_spares=spares, min_nodes=least)
