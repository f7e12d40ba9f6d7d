"""After an attempt: whether another follows, and who takes part in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.agent.assignment import Assignment
from launcher.agent.control import Lineup, tell
from launcher.agent.nodes import checkin, successor
from launcher.agent.nodes.team import Team
from launcher.agent.output.stream import say
from launcher.agent.output.terminal import is_line_open
from launcher.agent.verdict import Facts, Verdict
from launcher.failure import Failure

if TYPE_CHECKING:
    from launcher.agent.agent import NodeAgent


def prepare(agent: NodeAgent, facts: Facts, verdict: Verdict, before: tuple[int, int]) -> bool:
    """Return whether another attempt follows one that has ended; the agent has its part in it then.

    `facts` are of the one that has ended, `before` is what Heartbeats.reached() said before it.
    """
    meeting = agent.meeting
    if meeting.team is not None:
        return _decide(agent, meeting.team, facts, verdict, before)
    if verdict.next is not None:
        agent.take_part(replace(meeting, assignment=verdict.next))
        return True
    is_last = agent.is_last or facts.signals or facts.verdict
    losses = [one for one in facts.failures if one.node_rank == 0 and one.rank < 0]
    if is_last or meeting.peers or not losses:
        return False
    followed = successor.follow(meeting, losses[0], agent.args)
    if followed is not None:
        with followed.ready():
            agent.take_part(followed)
            # Node rank 0 is not there to do it.
            saved, _ = agent.heartbeats.reached()
            agent.snapshots.save(saved, is_first_node=False, limit_s=agent.args.grace_s)
    return followed is not None


def find_parts(agent: NodeAgent, facts: Facts, verdict: Verdict) -> Verdict:
    """On node rank 0, note what all nodes are to lay together if no attempt follows."""
    team, may_shrink = agent.meeting.team, agent.args.min_nodes and not agent.is_last
    may_go_on_elsewhere = may_shrink and not (team and team.is_majority)
    if agent.args.node_rank != 0 or verdict.outcome.code == 0 or may_go_on_elsewhere:
        return verdict
    saved_step, _ = agent.heartbeats.reached()
    found = agent.snapshots.find_parts([*facts.nodes.values()], saved_step)
    return replace(verdict, parts=found)


def _decide(
    agent: NodeAgent, team: Team, facts: Facts, verdict: Verdict, before: tuple[int, int]
) -> bool:
    """On node rank 0: decide for all, and tell the others."""
    first = None if agent.is_last or facts.signals else verdict.outcome.failure
    parts: Mapping[int, Assignment] = {}
    if first is not None:
        busy = team.peers.keys() - facts.nodes.keys()  # their ranks have not ended
        for node_rank in busy if team.min_nodes else ():
            team.peers.pop(node_rank).close()
        why = team.why_not(are_all_quiet=not busy)
        if not why and not team.lost:
            held_step = agent.snapshots.step()
            why = agent.restarts.why_not(first, agent.heartbeats, before, held_step)
        if why:
            say(why)
        else:
            parts = _restart(agent, team, first)
    team.tell(parts, verdict)
    if parts:
        own, listener = parts[agent.args.node_id], agent.listener
        agent.take_part(replace(agent.meeting, assignment=own, listener=listener, lost=None))
    return bool(parts)


def _restart(agent: NodeAgent, team: Team, first: Failure) -> Mapping[int, Assignment]:
    """Refill the team; returns all assignments in the next attempt, by node id.

    The keys of the old store, and whoever is still on the way to it, would mislead the new ranks:
    they have a fresh one.
    """
    agent.store = None
    lost = [team.members[node_rank].host for node_rank in team.lost]
    told = team.refill() if lost else []
    agent.listener = checkin.listen(agent.args.master_addr, 0)
    port = agent.listener.getsockname()[1]
    held_step = agent.snapshots.step()
    line = agent.restarts.note(first, agent.heartbeats, held_step, lost=lost, replaced=told)
    agent.say(f"{line}; now on port {port}")
    number = agent.assignment.attempt + 1
    parts = team.assign(number, agent.args.master_addr, port)
    if told:
        tell_lineup(agent, number)
        if (record := agent.restarts.record) is not None:
            own = parts[agent.args.node_id]
            record.note(hosts=own.hosts, world_size=own.world_size)
    return parts


def note_lost_spare(agent: NodeAgent, loss: Failure) -> None:
    """Tell that a spare is gone."""
    agent.say(f"warning: spare {loss.host}: {loss.cause}; the run goes on [{loss.fault}]")
    tell_lineup(agent, agent.assignment.attempt)


def tell_lineup(agent: NodeAgent, attempt: int) -> None:
    """Tell the launcher which nodes the run goes on with."""
    team, control = agent.meeting.team, agent.guardian.control
    if team is not None and control is not None:
        lineup = Lineup(attempt, [member.node_id for member in team.members], [*team.spares])
        tell(lineup, control, is_line_open=is_line_open(agent.terminals))
