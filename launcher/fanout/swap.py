"""Before the start: which node is the master."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from distributed.errors import Refused
from launcher import handshake
from launcher.fanout.protocol import Hello
from launcher.plan.plan import Plan


def choose_master(plan: Plan, hellos: Sequence[Hello | None]) -> Plan:
    """Take the address at which ssh reached node 0, whatever an alias or a jump host is called.

    Raises Refused where the other nodes cannot reach it.
    """
    first, address = plan.nodes[0].name, hellos[0].address if hellos[0] else ""
    given = os.environ.get("MASTER_ADDR")
    if given not in (None, "", first, first.rpartition("@")[2]) or plan.num_agents == 1:
        return plan
    for node, hello in zip(plan.nodes, hellos, strict=True):
        if handshake.is_loopback(address) and hello and hello.address != address:
            cause = f"{first}, the master, is {address}, which {node.name} cannot reach"
            raise Refused("loopback-address", f"{cause}; give its name on the network")
    return replace(plan, master_addr=address or plan.master_addr)
