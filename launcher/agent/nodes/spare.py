"""The agent of a spare node: torch is imported, and it waits for the place of a lost node."""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import replace

from distributed.stop_signals import QUERY, handled_signals
from launcher import own_time
from launcher.agent.assignment import Assignment
from launcher.agent.control import Control, Done, report_outcome, tell
from launcher.agent.nodes import successor
from launcher.agent.nodes.checkin import Meeting
from launcher.agent.nodes.protocol import NodeBeat, Peer
from launcher.agent.torchrun_arguments import Arguments
from launcher.agent.verdict import Verdict
from launcher.failure_block import Outcome
from launcher.wire import limits


def wait(meeting: Meeting, args: Arguments, control: Control | None) -> Meeting:
    """Wait until this node is given ranks; ends the process with the run."""
    for signum in (*handled_signals(), QUERY):
        signal.signal(signum, lambda *_: None)  # the nodes act on it, and tell how the run ended
    started = time.time()
    while meeting.assignment.node_rank < 0:
        peer, host = meeting.peers[0], meeting.assignment.hosts[0]
        told = _hear(peer)
        if told is None:
            peer.close()
            lost = peer.loss(0, host)
            may_follow = meeting.assignment.attempt < args.max_restarts
            followed = successor.follow(meeting, lost, args) if may_follow else None
            if followed is None:
                run_id = meeting.assignment.run_id
                outcome = Outcome(lost.code, lost, started=started, run_id=run_id)
                report_outcome(outcome, control, is_line_open=False)
                os._exit(lost.code)
            meeting = followed
        elif isinstance(told, Assignment):
            meeting = replace(meeting, assignment=told)
        elif told.next is not None:
            meeting = replace(meeting, assignment=told.next)
        else:
            if told.outcome.code:  # node rank 0 may still save a snapshot
                peer.wait_for_end(own_time.now() + args.grace_s)
            if control is not None:
                tell(Done(), control, is_line_open=False)
            os._exit(told.outcome.code)
    return meeting


def _hear(peer: Peer) -> Assignment | Verdict | None:
    """Wait for this node's part, or the run's end; None where node rank 0 is lost."""
    peer.heard = time.monotonic()
    while not peer.is_silent:
        peer.send(NodeBeat(None))
        if not select.select([peer.socket], [], [], limits.BEAT_S)[0]:
            continue
        received = peer.receive()
        if received is None:
            return None
        for message in received:
            if isinstance(message, Assignment | Verdict):
                return message
    return None
