"""When node rank 0 is lost, the remaining agents check in with its successor (no torch).

Each tries the same agents in the same order, spares first (Assignment.successors). The first one
that is reachable waits at its failover port for those after it. If fewer than a majority check in,
the run ends, because node rank 0 may still be alive and connected to the rest.
"""

import contextlib
import dataclasses

from distributed.errors import Refused
from launcher import own_time
from launcher.agent.nodes import checkin
from launcher.agent.nodes.checkin import Meeting
from launcher.agent.nodes.team import Team
from launcher.agent.output.stream import say
from launcher.agent.torchrun_arguments import Arguments
from launcher.handshake import Acceptor
from launcher.text import count
from launcher.wire import limits, meeting
from launcher.wire.meeting import Wait
from launcher.wire.messages import Member, NodeReport


def follow_or_lead(before: Meeting, args: Arguments) -> Meeting | None:
    """Check in with the new node rank 0, or become it. Returns None if the run cannot continue.

    Tries the successors in order, and begins no try after SUCCESSOR_S. One that answers may first
    save a snapshot, for up to GRACE seconds. If the run is refused, prints why.
    """
    old = before.assignment
    if not old.members:  # without MIN_NODES, a lost node is not replaced
        return None
    until = own_time.now() + limits.SUCCESSOR_S
    everyone = [*old.members, *old.spares]
    own = next(member for member in everyone if member.node_id == args.node_rank)
    me = NodeReport(
        own.node_id, len(everyone), own.nproc, own.host, old.run_id, attempt=old.attempt
    )

    try:
        for successor in old.successors:
            if successor == own:
                return _become_first(before, own, args)
            if own_time.now() > until:
                break

            wait = Wait(2 * limits.LOSS_SPREAD_S + args.grace_s)  # it may save a snapshot first
            with contextlib.suppress(OSError):
                new = checkin.check_in(
                    successor.address,
                    successor.failover_port,
                    me,
                    args.access.secret,
                    wait,
                    connect_s=limits.LOSS_SPREAD_S,
                )
                return dataclasses.replace(before, assignment=new.assignment, links=new.links)
    except Refused as refused:
        say(refused.message)
    return None


def _become_first(before: Meeting, me: Member, args: Arguments) -> Meeting:
    """Become node rank 0 of all agents that check in within LOSS_SPREAD_S.

    Without a majority, or if too few nodes are left, raises Refused and sends it to them. Closes
    this agent's failover port.
    """
    old = before.assignment
    failover = before.failover
    assert failover is not None  # a candidate to replace node rank 0 keeps its port open

    behind = old.successors[old.successors.index(me) + 1 :]
    awaited = {member.node_id for member in behind}
    wait = Wait(limits.LOSS_SPREAD_S)
    with failover, contextlib.closing(Acceptor(failover, args.access, say)) as acceptor:
        here = meeting.gather(
            acceptor, awaited, wait, lambda _, report: report.attempt == old.attempt
        )

    peers = {member.node_id: peer for member, peer in here.items()}
    is_spare = me in old.spares
    rest = old.members[1:] if is_spare else [member for member in old.members if member != me]
    members = [me, *rest]  # without a spare, refill() removes the lost node
    peers_by_rank = {
        rank: peers[member.node_id]
        for rank, member in enumerate(members)
        if member.node_id in peers
    }
    spares = {member: peers[member.node_id] for member in old.spares if member.node_id in peers}
    team = Team(old.run_id, members, peers_by_rank, spares, args.min_nodes)

    why = team.why_stop()
    others = len(old.successors)
    is_majority = 2 * (1 + len(peers)) > 1 + others  # of all agents, with the lost one
    if not is_majority:
        why = f"{me.host} reaches only {len(peers)} of {count(others, 'other agent')}: the run ends"
    if why:
        refused = Refused("link-lost", why)
        checkin.refuse(peers.values(), refused)
        raise refused

    took_over = [f"{me.host} replaces {old.hosts[0]}"] if is_spare else []
    took_over += team.refill()
    listener = checkin.listen(me.address, 0)
    own = team.assign(old.attempt + 1, me.address, listener.getsockname()[1])[me.node_id]
    return Meeting(own, listener, team, took_over=took_over)
