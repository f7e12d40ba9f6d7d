"""Node rank 0 is lost: the agents that are left meet at another, which takes its place (no torch).

Each tries the same agents in the same order, the spares first (Assignment.heirs). The first that
is there waits for the others at its door. Where less than a majority comes, the run ends: node rank
0 may be there for the rest of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Mapping

from distributed.errors import Refused
from launcher import own_time
from launcher.agent.assignment import Assignment, Seat
from launcher.agent.nodes import checkin
from launcher.agent.nodes.checkin import Meeting
from launcher.agent.nodes.protocol import Peer, Refusal
from launcher.agent.nodes.team import Team
from launcher.agent.output.stream import say
from launcher.agent.torchrun_arguments import Arguments
from launcher.failure import Failure
from launcher.handshake import Access, Entrance, connect
from launcher.preflight.must_match import NodeReport
from launcher.text import count
from launcher.wire import limits


def follow(meeting: Meeting, lost: Failure, args: Arguments) -> Meeting | None:
    """Meet the others where node rank 0's place is taken; None where the run cannot go on."""
    part, until, access = meeting.assignment, own_time.now() + limits.SUCCESSOR_S, args.access
    for heir in part.heirs:
        if heir.place == args.place:
            return _lead(meeting, heir, lost, args)
        if own_time.now() > until:
            break
        try:
            peer = Peer(connect(heir.address, heir.door, access.secret, limits.LOSS_SPREAD_S))
        except OSError:
            continue
        peer.send(_report(part, args.place))
        wait_s = 2 * limits.LOSS_SPREAD_S + args.grace_s  # it may save first
        answer = peer.wait(own_time.now() + wait_s)
        if isinstance(answer, Assignment):
            return dataclasses.replace(meeting, assignment=answer, peers={0: peer})
        peer.close()
        if isinstance(answer, Refusal):
            say(answer.message)
            return None
    return None


def _report(part: Assignment, place: int) -> NodeReport:
    me = next(seat for seat in (*part.seats, *part.spares) if seat.place == place)
    agents = len(part.seats) + len(part.spares)
    return NodeReport(place, agents, me.nproc, me.host, part.run_id, {}, {}, attempt=part.attempt)


def _lead(meeting: Meeting, me: Seat, lost: Failure, args: Arguments) -> Meeting | None:
    """Take node rank 0's place, with all that come."""
    part = meeting.assignment
    assert meeting.door is not None
    peers = _gather(meeting.door, part, me, args.access)
    meeting.door.close()
    seats = list(part.seats)
    told = [] if me in seats else [f"{me.host} takes {seats[0].host}'s place"]
    if me in seats:  # the place of a node without a spare: the one that is lost
        seats[seats.index(me)] = seats[0]
    seats[0] = me
    there = {rank: peers[seat.place] for rank, seat in enumerate(seats) if seat.place in peers}
    spares = {seat.place: peers[seat.place] for seat in part.spares if seat.place in peers}
    waiting = {seat.place: seat for seat in part.spares}
    team = Team(part.run_id, seats, there, waiting, spares, args.min_nodes)
    known = len(part.heirs) + 1
    why = team.why_not()
    if 2 * (1 + len(peers)) <= known:
        why = f"{me.host} reaches {count(len(peers), 'agent')} of {known - 1} others: the run ends"
    if why:
        say(why)
        checkin.refuse(peers.values(), Refused("link-lost", why))
        return None
    told += team.refill() if team.lost else []
    listener = checkin.listen(me.address, 0)
    own = team.assign(part.attempt + 1, me.address, listener.getsockname()[1])[me.place]
    return Meeting(own, team.peers, listener, team, lost=lost, told=told)


def _gather(door: socket.socket, part: Assignment, me: Seat, access: Access) -> Mapping[int, Peer]:
    """Return the agents that come to the door, by place."""
    heirs = part.heirs
    awaited = {seat.place for seat in heirs[heirs.index(me) + 1 :]}
    peers: dict[int, Peer] = {}
    until = own_time.now() + limits.LOSS_SPREAD_S
    with contextlib.closing(Entrance(door, access, say)) as entrance:
        while awaited - peers.keys() and (left_s := until - own_time.now()) > 0:
            for connection, received in entrance.wait(min(left_s, limits.SUCCESSOR_LOOK_S)):
                peer = Peer(connection, received)
                told = peer.wait(until)
                is_ours = isinstance(told, NodeReport) and told.attempt == part.attempt
                if isinstance(told, NodeReport) and is_ours and told.node_rank in awaited:
                    peers[told.node_rank] = peer
                else:
                    peer.close()
    return peers
