"""One attempt at running this node's ranks, from the fork until the last one exits.

The attempt handles events (output, exits, signals, messages from other nodes' agents, time) and
ends with one verdict, the same on every node. It records facts and acts on them; what they mean is
decided in launcher/agent/facts.py, launcher/outcome.py and launcher/agent/diagnosis/stuck.py.
"""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distributed.stop_signals import QUERY, Interrupts, handled_signals, notices, stop_signals
from launcher import own_time, processes
from launcher.agent.diagnosis.stuck import find_straggler
from launcher.agent.facts import Facts
from launcher.agent.node_ranks import NodeRanks, Rank
from launcher.agent.notice import Notice
from launcher.agent.output.outputs import Outputs
from launcher.agent.output.stream import Stream
from launcher.agent.query import Query
from launcher.agent.savers import Savers
from launcher.agent.snapshots.memory import Snapshots
from launcher.failure import Failure
from launcher.own_time import Deadline
from launcher.processes import KILLED
from launcher.wire import limits
from launcher.wire.messages import (
    EndRanks,
    NodeBeat,
    NodeStacks,
    RanksSave,
    SnapshotData,
    StackRequest,
    StopRequest,
    Verdict,
)
from launcher.wire.node_link import Link, Peers, Pulse


@dataclass(repr=False)  # signal.getsignal() would write out all that the handler's object holds
class Attempt:
    """The ranks of this node, and the connections to the other nodes' agents."""

    ranks: NodeRanks
    peers: dict[int, Link]  # without those lost so far
    spares: Callable[[], Sequence[Link]]
    supervisor: socket.socket  # its other end closes when the supervisor dies
    earlier: Sequence[int]  # stop signals that were received before
    facts: Facts
    grace_s: float  # for the ranks to save, after a request to stop
    is_last: bool  # no restart follows a failure
    query: Query
    snapshots: Snapshots
    on_beat: Callable[[Peers], None]  # what the agent does every BEAT_S

    def __post_init__(self) -> None:
        self.is_first_node = self.ranks.node_rank == 0  # whose agent decides for all
        self.interrupts = Interrupts()
        self.selector = selectors.DefaultSelector()
        self.term = Deadline()  # when to send SIGTERM to the ranks here
        self.kill = Deadline()  # when to send SIGKILL to all descendants
        self.is_trickle = False  # output arrives in small pieces: pause before the next iteration
        self.partial = Deadline()  # when to show unfinished lines
        self.over = Deadline()  # when to stop waiting for the other nodes
        self.notice = Notice(self.ranks, self.facts, self.query.show)
        self.savers = Savers(self.ranks, self.grace_s, self.query.show)

    def watch(self, outputs: Outputs) -> Verdict:
        """Handle events until this node's part is over. Returns the verdict.

        Then also ends this agent's descendants, shows their last output, and closes the streams.
        """
        wake, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        self._listen_to(wake, lambda: wake.recv(4096))
        self._listen_to_all()
        processes.outlive_parent()  # the loop notices the supervisor's death, and ends the ranks

        pulse = Pulse(lambda: [*self.peers.values(), *self.spares()])
        beat = Deadline()
        beat.set_within(0.0)
        while not self._limit_wait():
            before_read = time.monotonic()  # for show_held()
            due = beat.at, self.partial.at, self.term.at, self.kill.at, self.over.at
            next_at = min(*due, self.query.next_at, self.snapshots.outgoing.next_at)
            for key, _ in self.selector.select(max(0.0, next_at - own_time.now())):
                key.data()  # the handler
            if self.is_trickle:
                time.sleep(limits.TRICKLE_S)

            if self.partial.expire() and self.ranks.show_held(before_read, self.facts.is_ending):
                self.partial.set_within(limits.PARTIAL_LOOK_S)
            for each in self.ranks.reap():
                self._on_death(each)
            self._on_time()
            self.snapshots.outgoing.on_time(self.peers)
            if beat.expire():
                beat.set_within(limits.BEAT_S)
                self._beat(pulse)

        pulse.end()
        signal.set_wakeup_fd(-1)
        for opened in wake, waker, self.selector:
            opened.close()

        saved_step = self.ranks.heartbeats.saved()
        left = processes.end_descendants(term_s=limits.RANK_TERM_S)
        verdict = self.facts.reach_verdict(saved_step, len(left))
        for each in self.ranks.all:  # tracebacks of consequences go only to the log
            follows = self.facts.is_consequence(verdict.outcome.failure, each.rank)
            for stream in each.streams:
                stream.end(is_consequence=follows)
        outputs.drain()
        return verdict

    def _listen_to_all(self) -> None:
        """Handle signals, also those that came earlier, and register everything that is read."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
        for signum in handled_signals():
            signal.signal(signum, self._on_signal)
        if QUERY not in stop_signals():  # --signals-to-handle can make it one
            signal.signal(QUERY, lambda *_: self.query.ask())
        for earlier in self.earlier:
            self._request_stop(earlier)
        self._listen_to(self.supervisor, _end_with_supervisor)
        for node, peer in self.peers.items():
            self._listen_to(peer.socket, partial(self._on_peer, node, peer))
        for each in self.ranks.all:
            for stream in each.streams:
                self._listen_to(stream.fd, partial(self._on_output, stream))

    def _listen_to(self, source: Any, handle: Callable[[], object]) -> None:
        self.selector.register(source, selectors.EVENT_READ, handle)

    def _on_time(self) -> None:
        """Do what is due: terminate or kill the ranks, collect stacks, or end a stuck run."""
        if self.term.expire():
            self._terminate_ranks()
        if self.kill.expire():
            self._kill_ranks()
        suspect = self.query.on_time(self.peers)
        if suspect is not None and not self.facts.failures:
            self.send_all(EndRanks(suspect))
            _end_stuck(self, suspect)

    def _terminate_ranks(self) -> None:
        """Send SIGTERM to the ranks, because one has failed; record which fail too, or may save."""
        recorded = {failure.rank for failure in self.facts.failures}
        for each in self.ranks.living():
            if os.path.exists(each.error_file) and each.rank not in recorded:
                self._record_failure(self.ranks.describe_end(each))
        self.facts.stopped.update(each.rank for each in self.ranks.living())
        if self.savers.record_handlers():  # waits for their stacks
            self.send_all(RanksSave())
        self.ranks.send(signal.SIGTERM)
        self.kill.set_within(limits.RANK_TERM_S)

    def _kill_ranks(self) -> None:
        """Send SIGKILL to all descendants, except ranks that save after another one's failure."""
        self.facts.stopped.update(each.rank for each in self.ranks.living())
        if working := self.savers.grant_grace():
            processes.kill_others([each.pid for each in working])
            self.kill.set_within(self.grace_s - limits.RANK_TERM_S)  # GRACE after SIGTERM
        else:
            processes.end_descendants()

    def _limit_wait(self) -> bool:
        """Limit the wait for other nodes once all ranks here have exited; return if it is over."""
        if self.ranks.living():
            return False
        has_all = self.is_first_node and self.peers.keys() <= self.facts.nodes.keys()
        if has_all or not self.peers or self.facts.verdict:
            return True
        if self.facts.is_ending:  # otherwise, ranks of the other nodes may still be working
            save_s = self.grace_s if self.facts.signals_sent else self.savers.others_s
            verdict_s = limits.for_nodes(limits.VERDICT_S, len(self.query.hosts))
            limit_s = verdict_s if self.is_last or self.facts.stops else limits.RANKS_END_S
            times = 1 if self.is_first_node else 2  # node rank 0 waits as well
            self.over.set_within(times * limit_s + save_s)
        return self.over.expire()

    # --- this node's ranks, and stop requests ---------------------------------------------------
    def _on_output(self, stream: Stream) -> None:
        self.partial.set_within(limits.PARTIAL_LOOK_S)
        if not stream.pump():
            self.selector.unregister(stream.fd)
        self.is_trickle = stream.is_trickle

    def _on_death(self, each: Rank) -> None:
        """Record a rank's exit, and act on an error; report to node rank 0 after the last exit."""
        code = self.facts.codes[each.rank] = each.code or 0
        if code != 0 and each.rank not in self.facts.stopped:  # otherwise, this agent ended it
            self._on_error(each)
        if not self.is_first_node and not self.ranks.living():
            end = self.facts.describe_end(self.ranks.heartbeats.saved())
            parts, copies = self.snapshots.parts()
            self.send_all(replace(end, parts=parts, copies=copies))

    def _on_error(self, each: Rank) -> None:
        """End the ranks, because one has failed or hangs; in GRACE, if it stopped on request."""
        end = self.ranks.describe_end(each)
        if self.facts.is_requested_stop(end, has_saved=self.ranks.heartbeats.saved() >= 0):
            self.kill.set_within(self.grace_s)  # the others must stop as well
        else:
            self._fail(end)

    def _fail(self, first: Failure) -> None:
        """Record a failure, and end the ranks of all nodes; after a stop request, let them save."""
        self._record_failure(first)
        if self.facts.stops:  # they have what is left of GRACE
            return
        if self.is_first_node and self.facts.failures == [first]:
            self.send_all(EndRanks())  # once: in a large run, thousands of failures may follow
        self._end_within(limits.SETTLE_S if first.is_consequence else 0.0)

    def _end_within(self, seconds: float) -> None:
        """Arrange for SIGTERM to the ranks here. They get it once: they may be saving."""
        if not self.facts.stopped:
            self.term.set_within(seconds)

    def _record_failure(self, first: Failure) -> None:
        self.facts.failures.append(first)
        if not self.is_first_node and first.node_rank == self.ranks.node_rank:
            self.send_all(first)

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Forward a stop signal, so that the ranks can save; a second Ctrl-C kills them."""
        if signum == signal.SIGINT and self.interrupts.record_and_check():
            self.facts.signals.append(signum)
            self.savers.refuse_all()
            self.kill.set_within(0.0)
        else:
            self._request_stop(signum)

    def _request_stop(self, signum: int, source: Link | None = None) -> None:
        """Send a stop signal to the ranks here, and to all nodes except `source`, its sender."""
        is_notice = signum in notices()
        if signum in self.facts.signals and not is_notice:  # other nodes forward it too
            return
        self.facts.signals.append(signum)
        if is_notice and not self.notice.accept(signum):
            return
        self.send_all(StopRequest(signum), but=source)
        if not is_notice:  # after a notice, the ranks still have minutes
            self.kill.set_within(self.grace_s)
            self.ranks.send(signum)
        self.notice.deliver()

    # --- the other nodes ------------------------------------------------------------------------

    def _on_peer(self, node: int, peer: Link) -> None:
        received = peer.receive()
        if received is None:
            self._drop_peer(node)
        for message in received or ():
            _handle_message(self, node, peer, message)

    def send_all(self, message: object, *, but: Link | None = None) -> None:
        """On node rank 0, send to every other agent; elsewhere, to node rank 0's."""
        for peer in self.peers.values():
            if peer is not but:
                peer.send(message)

    def _drop_peer(self, node: int) -> None:
        """Close the connection to a lost node. The attempt fails unless that node had finished."""
        peer = self.peers.pop(node)
        self.selector.unregister(peer.socket)
        if node not in self.facts.nodes and self.facts.verdict is None:
            self._fail(peer.loss(node, self.query.hosts[node]))
        peer.close()

    def _beat(self, pulse: Pulse) -> None:
        """Do what is due every BEAT_S: send a heartbeat; check for hung ranks and silent nodes."""
        self.on_beat(self.peers)
        self.notice.deliver()
        if not (self.facts.is_ending or self.facts.stops):  # otherwise, ranks may be saving
            for each in self.ranks.time_exits(self.grace_s):
                self._on_error(each)
        here = self.ranks.straggler()
        pulse.send_beat(NodeBeat(here))
        for node, peer in list(self.peers.items()):
            if peer.is_silent:
                self._drop_peer(node)
        if self.is_first_node and not self.facts.failures:
            running = self.peers.keys() - self.facts.nodes.keys()  # nodes whose ranks live
            there = [self.facts.stragglers.get(node) for node in running]  # None if not yet known
            suspect = find_straggler(there if here is None else [here, *there])
            if suspect and suspect.is_stuck:
                self.query.ask_about(suspect)


def _end_with_supervisor() -> None:
    """End the ranks and this process, because the supervisor is dead."""
    processes.end_descendants()
    os._exit(KILLED)


def _end_stuck(attempt: Attempt, suspect: int) -> None:
    """Kill the ranks here, because `suspect` holds up the run. First collect their stacks."""
    if failure := attempt.ranks.examine_stuck(suspect):
        attempt._fail(failure)
        attempt.savers.refuse_all()
        attempt.kill.set_within(0.0)  # a resumed rank must not save


def _handle_message(attempt: Attempt, node: int, peer: Link, message: object) -> None:
    """Act on a message from another node's agent."""
    match message:
        case EndRanks() | Verdict() if attempt.is_first_node:
            pass  # node rank 0 only sends these
        case StopRequest() if message.signum in stop_signals():
            attempt._request_stop(message.signum, peer)
        case Failure():
            attempt._fail(message)
        case StackRequest() | NodeStacks():
            attempt.query.receive(node, message, attempt.peers)
        case SnapshotData():
            attempt.snapshots.incoming.store_piece(message)
        case EndRanks() if message.stuck < 0:
            attempt._end_within(0.0)
        case EndRanks():
            _end_stuck(attempt, message.stuck)
        case RanksSave():
            attempt.savers.others_s = attempt.grace_s
            attempt.over = Deadline()  # until _limit_wait() sets it with that time
            if attempt.is_first_node:
                attempt.send_all(message, but=peer)
        case _:
            attempt.facts.record_report(node, message)
