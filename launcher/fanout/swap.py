"""Before the start: which node is the master, and which nodes are replaced by spares."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from distributed import hostlist
from distributed.errors import Refused
from launcher.master_port import is_loopback
from launcher.plan.plan import NodePlan, Plan
from launcher.record import run_json
from launcher.slurm_node import find_address
from launcher.wire.messages import Hello, Report

TWICE = 2  # losses of one node in a run, after which it is not used again


def find_ill(plan: Plan, reports: Sequence[Report | None]) -> set[int]:
    """Return the node ranks of the nodes that do not answer, have a fault, or were lost twice.

    With a strict preflight, a warning counts as a fault. `reports` are by node rank, None for no
    answer. Reads run.json for the losses. Empty if the run has no spares.
    """
    if not plan.num_spares:
        return set()

    record = run_json.read(plan.folder) or run_json.Record()
    losses = Counter(host for restart in record.restarts for host in restart.lost)
    bad = {host.partition(".")[0] for host, times in losses.items() if times >= TWICE}

    def is_ill(report: Report | None) -> bool:
        """Return whether the node with this report must not be used."""
        if report is None or report.host in bad:
            return True
        return any(plan.is_strict or not fault.warns for fault in report.faults)

    return {node_rank for node_rank, report in enumerate(reports) if is_ill(report)}


def replace_ill(plan: Plan, ill: Collection[int]) -> tuple[Plan, list[str]] | None:
    """Return the plan with these nodes replaced by spares, and the changes in words.

    `ill` are node ranks; ill spares are removed. None if `ill` is empty, if a node has no healthy
    spare with the same number of ranks, or if node rank 0 is ill and MASTER_ADDR is set.
    """
    if not ill or (0 in ill and plan.environ.get("MASTER_ADDR")):
        return None

    nodes = list(plan.nodes[: plan.num_nodes])
    spare_places = range(plan.num_nodes, plan.num_agents)
    spares = [plan.nodes[place] for place in spare_places if place not in ill]
    changes = [
        f"{plan.nodes[place].name} cannot be a spare" for place in spare_places if place in ill
    ]

    for place in sorted({*ill} - {*spare_places}):
        spare = next((node for node in spares if node.nproc == nodes[place].nproc), None)
        if not spare:
            return None
        changes.append(f"{spare.name} replaces {nodes[place].name}")
        spares.remove(spare)
        nodes[place] = spare

    master = nodes[0].host if 0 in ill else plan.master_addr
    return replace(
        plan, nodes=[*nodes, *spares], num_spares=len(spares), master_addr=master
    ), changes


def exclude_ill(plan: Plan, ill: Collection[int]) -> tuple[Plan, list[str]] | None:
    """Do what replace_ill() does for a SLURM job's plan, which has SLURM's list instead of `nodes`.

    The step excludes the nodes in `ill`, and node ranks follow the order of the list: each later
    node moves up. All nodes of a step are alike, so any spare can replace any node.
    """
    hosts = hostlist.expand(plan.hosts)
    replaced = replace_ill(replace(plan, nodes=[*map(NodePlan, hosts)]), ill)
    if not replaced:
        return None

    swapped, changes = replaced
    remaining = [host for node_rank, host in enumerate(hosts) if node_rank not in ill]
    return replace(
        swapped,
        nodes=(),
        hosts=",".join(remaining),
        left_out=[*plan.left_out, *(hosts[node_rank] for node_rank in sorted(ill))],
        master_addr=find_address(remaining[0]) if 0 in ill else plan.master_addr,
    ), changes


def choose_master(plan: Plan, hellos: Sequence[Hello | None]) -> Plan:
    """Return the plan with the address at which ssh reached node rank 0 as its master address.

    Other nodes may not know the name for ssh, which may be an alias. The plan stays as it is if
    MASTER_ADDR is set, if there is only one node, or if node rank 0 has not answered. Raises
    Refused if the address is a loopback address, but ssh reached another node elsewhere.
    """
    first = plan.nodes[0]
    address = hellos[0].address if hellos[0] else ""
    if plan.master_addr not in (first.name, first.host):  # MASTER_ADDR, or a single node
        return plan

    for node, hello in zip(plan.nodes, hellos, strict=True):
        is_elsewhere = hello and hello.address != address
        if is_elsewhere and is_loopback(address):
            cause = f"{first.name}, the master, is {address}, which {node.name} cannot reach"
            raise Refused("loopback-address", f"{cause}; give the master's name on the network")
    return replace(plan, master_addr=address or plan.master_addr)
