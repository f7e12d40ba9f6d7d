"""One attempt at running this node's ranks, from the fork to the last of them (no torch).

Events come in (output, deaths, signals, messages of other nodes' agents, time); one verdict comes
out, the same on every node.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from distributed.errors import STOPPED
from distributed.heartbeat import STACK_SIGNAL, Beat, stack_file_of
from launcher import failure, link, processes
from launcher.failure import Failure
from launcher.heartbeats import Heartbeats
from launcher.output import Stream, Terminal

SETTLE_S = 0.3  # after an end that looks like a consequence: the time for its cause to show
TERM_S = 1.0  # after a failure: from SIGTERM to SIGKILL
DRAIN_S = 2.0  # at the end: for a terminal or pipe that is slow to take the last output
SECOND_INTERRUPT_S = 0.3  # two SIGINTs closer than this are one
STACKS_S = 1.0  # for stuck ranks to write their stacks
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NEVER = float("inf")


@dataclass
class Rank:
    """One forked rank of this node."""

    rank: int
    local_rank: int
    pid: int
    pidfd: int
    streams: tuple[Stream, Stream]  # of stdout and stderr
    error_file: Path
    code: int | None = None  # as a shell shows it; None while it runs

    @property
    def stack_file(self) -> Path:
        return stack_file_of(self.error_file)

    def close(self) -> None:
        os.close(self.pidfd)
        for stream in self.streams:
            stream.close()


@dataclass(frozen=True)
class Verdict:
    """What all nodes agree on at the end: the exit code, and the first failure if there was one."""

    code: int
    failure: Failure | None = None
    lost_peer: int = 0  # ranks that ended as a consequence
    stopped: int = 0  # ranks that their agent had to stop
    left: int = 0  # processes here that no signal ended
    restart_port: int = 0  # of the store with which all nodes start their ranks again
    is_told: bool = False  # by node rank 0, to this one


@dataclass(frozen=True)
class Straggler:
    """The rank of a node that is furthest behind; the others wait for such a one."""

    rank: int
    progress: list[int]  # Beat.progress
    is_stuck: bool  # it and all that are as far have been silent for longer than their limits
    is_stopped: bool
    silence_s: float


class Attempt:
    """The ranks of this node and what is known of the others'. All deadlines are monotonic."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        node_rank: int,
        hosts: Sequence[str],
        peers: dict[int, link.Peer],
        guardian: socket.socket,
        heartbeats: Heartbeats,
        signals: list[int],
        grace_s: float,
        verdict_s: float,
    ) -> None:
        """
        Args:
            hosts: host names by node rank.
            peers: on node rank 0 every other agent by node rank, elsewhere node rank 0's.
            guardian: its other end closes when the guardian dies.
            heartbeats: the ranks' records; the caller closes them.
            signals: stop signals that came from outside, also since the attempt before.
            verdict_s: after a failure, when all is over here: for the other nodes' last words.
        """
        self.ranks = ranks
        self.node_rank = node_rank
        self.hosts = hosts
        self.peers = peers
        self.guardian = guardian
        self.heartbeats = heartbeats
        self.signals = signals
        self.grace_s = grace_s
        self.verdict_s = verdict_s
        self.selector = selectors.DefaultSelector()
        self.memory_kills = failure.count_memory_kills()
        self.failures: list[Failure] = []
        self.stop_codes: list[int] = []  # of ranks that stopped on request
        self.ended: set[int] = set()  # ranks that the agent itself had to stop
        self.behind: dict[int, Straggler] = {}  # each node's ranks furthest behind, on node rank 0
        self.done: dict[int, dict[str, Any]] = {}  # other nodes' last words, on node rank 0
        self.verdict: Verdict | None = None  # node rank 0's
        self.is_told = False  # node rank 0 knows that all is over here
        self.term_at = self.kill_at = self.over_by = self.interrupted_at = _NEVER

    def watch(self, terminals: Sequence[Terminal]) -> Verdict:
        """Handle events until every rank here has ended and all nodes agree on how."""
        wake, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        for signum in (*_STOP_SIGNALS, signal.SIGUSR1):
            if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup has it
                signal.signal(signum, self._on_signal)
        for earlier in self.signals:
            self._pass_on(earlier)
        self._listen_to(wake, lambda: wake.recv(4096))
        self._listen_to(self.guardian, self._on_guardian_death)
        processes.outlive_parent()  # the loop sees the guardian's death, and ends more than itself
        for node, peer in self.peers.items():
            self._listen_to(peer.socket, partial(self._on_peer, node, peer))
        for each in self.ranks:
            self._listen_to(each.pidfd, partial(self._on_death, each))
            for stream in each.streams:
                self._listen_to(stream.fd, partial(self._on_output, stream))
        for terminal in terminals:
            terminal.attach(self.selector)
        beat_at = time.monotonic()
        while not self._is_over():
            wanted = min(beat_at, self.term_at, self.kill_at, self.over_by)
            for key, _ in self.selector.select(max(0.0, wanted - time.monotonic())):
                key.data()
            self._on_time()
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + link.BEAT_S
                self._beat()
        signal.set_wakeup_fd(-1)
        for source in (wake, waker):
            source.close()
        saved_step = self.heartbeats.read(0).saved
        left = processes.end_descendants(term_s=TERM_S)
        for each in self.ranks:
            for stream in each.streams:
                stream.drain()
                stream.close()
        for terminal in terminals:
            terminal.detach(DRAIN_S)
        self.selector.close()
        return self._reach_verdict(saved_step, len(left))

    def _listen_to(self, source: Any, handle: Callable[[], object]) -> None:
        self.selector.register(source, selectors.EVENT_READ, handle)

    def _on_guardian_death(self) -> None:
        processes.end_descendants()
        os._exit(128 + signal.SIGKILL)

    def _on_output(self, stream: Stream) -> None:
        if not stream.pump():
            self.selector.unregister(stream.fd)

    def _on_death(self, each: Rank) -> None:
        self.selector.unregister(each.pidfd)
        os.close(each.pidfd)
        each.code = processes.exit_code(os.waitpid(each.pid, 0)[1])
        for stream in each.streams:
            stream.drain()
        if each.code == 0 or each.rank in self.ended:
            return
        asked = each.code == STOPPED or (self.signals and not each.error_file.exists())
        if asked:
            self.stop_codes.append(each.code)
            self.kill_at = min(self.kill_at, time.monotonic() + self.grace_s)
        else:
            self._fail(self._describe(each))

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Pass a stop signal on, so that the ranks may save first; a second Ctrl-C kills."""
        now = time.monotonic()
        if signum == signal.SIGINT and now - self.interrupted_at > SECOND_INTERRUPT_S:
            self.kill_at = now
            return
        if signum == signal.SIGINT:
            self.interrupted_at = now
        if signum not in self.signals:  # schedulers send one signal to several processes
            self._stop(signum)
            for peer in self.peers.values():
                peer.send("signal", number=signum)

    def _stop(self, signum: int) -> None:
        self.signals.append(signum)
        self._pass_on(signum)

    def _pass_on(self, signum: int) -> None:
        if signum in _STOP_SIGNALS:  # SIGUSR1 comes minutes ahead: no hurry
            self.kill_at = min(self.kill_at, time.monotonic() + self.grace_s)
        processes.send(self._living(), signum)

    def _living(self) -> list[int]:
        return [each.pid for each in self.ranks if each.code is None]

    def _on_peer(self, node: int, peer: link.Peer) -> None:
        messages = peer.receive()
        if messages is None:
            self._drop_peer(node, "agent-killed", "its node agent is gone")
            return
        for message in messages:
            kind = message["kind"]
            if kind == "signal" and message["number"] not in self.signals:
                self._stop(message["number"])
                for other in self.peers.values():
                    if other is not peer:
                        other.send("signal", number=message["number"])
            elif kind == "failure":
                self._fail(Failure(**message["failure"]))
            elif kind == "beat" and message["behind"]:
                self.behind[node] = Straggler(**message["behind"])
            elif kind == "end" and "stuck" in message:
                self._end_stuck(message["stuck"])
            elif kind == "end":
                self._end_ranks(0.0)
            elif kind == "done":
                self.done[node] = message
            elif kind == "verdict":
                told = message["verdict"]
                first = told["failure"]
                self.verdict = Verdict(**{**told, "failure": Failure(**first) if first else None})

    def _drop_peer(self, node: int, fault: str, cause: str) -> None:
        """A node is gone before its work was done: that ends the run."""
        peer = self.peers.pop(node)
        self.selector.unregister(peer.socket)
        peer.close()
        if node in self.done or self.verdict is not None:
            return
        host = self.hosts[node]
        code = 128 + signal.SIGKILL
        self._fail(Failure(fault, cause, code, host, node, time.time()))

    def _beat(self) -> None:
        here = self._find_behind()
        for node, peer in list(self.peers.items()):
            peer.send("beat", behind=asdict(here) if here else None)
            if peer.is_silent:
                self._drop_peer(
                    node, "link-lost", f"no sign of life for {link.SILENCE_S:g} s: network cut?"
                )
        if self.node_rank == 0 and here and not self.failures:
            known = [here, *(self.behind[node] for node in self.peers if node in self.behind)]
            last = [one for one in known if one.progress == min(one.progress for one in known)]
            if len(known) == len(self.peers) + 1 and all(one.is_stuck for one in last):
                suspect = max(last, key=lambda one: (one.is_stopped, one.silence_s)).rank
                for peer in self.peers.values():
                    peer.send("end", stuck=suspect)
                self._end_stuck(suspect)

    def _find_behind(self) -> Straggler | None:
        """The rank furthest behind on this node, and whether it and its likes are all silent."""
        living = [each for each in self.ranks if each.code is None]
        if not living:
            return None
        beats = {each.rank: self.heartbeats.read(each.local_rank) for each in living}
        progress = min(beat.progress for beat in beats.values())
        last = [each for each in living if beats[each.rank].progress == progress]
        stopped = {each.rank: processes.is_stopped(each.pid) for each in last}
        rank = max(stopped, key=lambda rank: (stopped[rank], beats[rank].silence_s))
        silences = [beats[each.rank].silence_s > beats[each.rank].limit_s for each in last]
        return Straggler(rank, list(progress), all(silences), stopped[rank], beats[rank].silence_s)

    def _end_stuck(self, suspect: int) -> None:
        """Collect the stacks of all ranks here, and kill them in the name of the suspect."""
        living = [each for each in self.ranks if each.code is None]
        if not living:
            return
        named = next((each for each in living if each.rank == suspect), living[0])
        beat = self.heartbeats.read(named.local_rank)
        silence = f"no sign of life for {beat.silence_s:.0f} s"
        if processes.is_stopped(named.pid):
            silence += ", its process is stopped (SIGSTOP)"
        beating = [each for each in living if self.heartbeats.read(each.local_rank).step >= 0]
        stopped = [each for each in beating if processes.is_stopped(each.pid)]
        processes.send([each.pid for each in beating], STACK_SIGNAL)
        failure.wait_for_stacks([e.stack_file for e in beating if e not in stopped], STACKS_S)
        processes.send([each.pid for each in stopped], signal.SIGCONT)  # they are to speak, too
        failure.wait_for_stacks([each.stack_file for each in stopped], STACKS_S)
        stacks = {each.rank: failure.read_stack(each.stack_file) for each in living}
        self._fail(
            replace(
                self._failure_of(named, beat),
                fault="rank-stuck",
                cause=f"{silence}; the limit, distributed.hang_seconds, is {beat.limit_s:.0f} s",
                code=128 + signal.SIGKILL,
                frames=stacks[named.rank],
                stacks=failure.group_stacks(stacks),
                is_consequence=named.rank != suspect,
                log=failure.short_path(str(named.stack_file)),
            )
        )
        self.kill_at = time.monotonic()  # one that goes on now is not to save

    def _fail(self, first: Failure) -> None:
        """Note a failure, tell the other nodes, and end the ranks here."""
        self.failures.append(first)
        for peer in self.peers.values():
            if self.node_rank == 0:
                peer.send("end")
            elif first.node_rank == self.node_rank:
                peer.send("failure", failure=asdict(first))
        self._end_ranks(SETTLE_S if first.is_consequence else 0.0)

    def _end_ranks(self, delay_s: float) -> None:
        self.term_at = min(self.term_at, time.monotonic() + delay_s)

    def _on_time(self) -> None:
        """Do what is due: SIGTERM, then SIGKILL to all that descends from here."""
        now = time.monotonic()
        if now >= self.term_at:
            self.term_at = _NEVER
            self.kill_at = min(self.kill_at, now + TERM_S)
            living = [each for each in self.ranks if each.code is None]
            for each in living:
                if each.error_file.exists():  # it raised, and is on its way out
                    self._fail(self._describe(each))
            self.term_at = _NEVER
            self.ended.update(each.rank for each in living)
            processes.send(self._living(), signal.SIGTERM)
        if now >= self.kill_at:
            self.kill_at = _NEVER
            self.ended.update(each.rank for each in self.ranks if each.code is None)
            processes.end_descendants()

    def _is_over(self) -> bool:
        """True when every rank here has ended and nothing more is to be heard from other nodes."""
        if self._living():
            return False
        if not self.is_told:
            self.is_told = True
            for peer in self.peers.values() if self.node_rank != 0 else ():
                peer.send("done", **self._last_words())
        if not self.peers:
            return True
        if self.verdict is not None or (
            self.node_rank == 0 and self.peers.keys() <= self.done.keys()
        ):
            return True
        if self.failures or self.ended:
            self.over_by = min(self.over_by, time.monotonic() + self.verdict_s)
        return time.monotonic() >= self.over_by

    # --- how it ended -------------------------------------------------------------------------

    def _describe(self, each: Rank) -> Failure:
        """Why a rank ended: from its error file, else from its exit code."""
        error = failure.read_error(each.error_file)
        if error is not None:
            cause, stack, code, when = error
            cause, fault = failure.name_fault(cause)
            frames = failure.user_frames(stack)
        else:
            code, when, frames = each.code or 1, time.time(), []
            killed = failure.count_memory_kills() > self.memory_kills
            fault, cause = failure.explain(code, out_of_memory=killed)
        out, err = each.streams
        if cause.startswith("SystemExit") and err.last_text:
            cause += f", after: {err.last_text}"
        line = err.traceback_line or err.last_line or out.last_line
        log = failure.short_path(str(out.log.path)) if out.log.path else ""
        return replace(
            self._failure_of(each, self.heartbeats.read(each.local_rank)),
            fault=fault,
            cause=failure.one_line(cause),
            code=code,
            time=when,
            frames=frames,
            is_consequence=failure.is_peer_lost(cause),
            log=f"{log}:{line}" if log and line else log,
        )

    def _failure_of(self, each: Rank, beat: Beat) -> Failure:
        """What holds for any failure of a rank here."""
        return Failure(
            fault="rank-error",
            cause="",
            code=1,
            host=self.hosts[self.node_rank],
            node_rank=self.node_rank,
            time=time.time(),
            rank=each.rank,
            local_rank=each.local_rank,
            step=beat.step,
            saved_step=beat.saved,
        )

    def _last_words(self) -> dict[str, list[int]]:
        """Ranks here that lost their peer, ranks that were stopped, codes of asked-for stops."""
        here = {each.rank for each in self.ranks}
        lost = {one.rank for one in self.failures if one.is_consequence} & here
        gone = [each.rank for each in self.ranks if each.code == 0]
        words = {"lost": list(lost), "ended": list(self.ended), "codes": self.stop_codes}
        return {**words, "gone": gone}

    def _reach_verdict(self, saved_step: int, left: int) -> Verdict:
        """How the run ended, as node rank 0 says; what is known here, where it is that or gone."""
        if self.verdict is not None:
            return replace(self.verdict, left=left, is_told=True)
        words = [self._last_words(), *self.done.values()]
        first = failure.first(self.failures) if self.failures else None
        if first is None:
            verdict = Verdict(self._stop_code([code for word in words for code in word["codes"]]))
        else:
            lost = {rank for word in words for rank in word["lost"]} - {first.rank}
            ended = {rank for word in words for rank in word["ended"]} - lost - {first.rank}
            if self.node_rank == 0:
                stacks = [line for one in self.failures for line in one.stacks]
                first = replace(first, saved_step=saved_step, stacks=stacks)
                gone = sorted(rank for word in words for rank in word["gone"])
                if first.is_consequence and gone:
                    before = f"before it rank {gone[0]} left with exit code 0"
                    first = replace(first, cause=f"{first.cause} ({before})")
            verdict = Verdict(first.code, first, lost_peer=len(lost), stopped=len(ended))
        return replace(verdict, left=left)

    def tell(self, verdict: Verdict) -> None:
        """From node rank 0, to the others: they wait for it."""
        for peer in self.peers.values():
            peer.send("verdict", verdict=asdict(verdict))

    def _stop_code(self, codes: Sequence[int]) -> int:
        """The code of a run that did not fail: 0, 75 when all saved, or that of a signal."""
        if self.ended and not codes:  # they did not heed the signal
            return 128 + (self.signals[0] if self.signals else signal.SIGKILL)
        return next((code for code in codes if code != STOPPED), STOPPED if codes else 0)
