"""The agent of one node: fork the ranks from one import of torch, watch them, end them together.

It takes torchrun's parser, error files, store and environment variables from torch. Rendezvous is
static: node rank 0 serves the store, and ranks follow node ranks. What needs more than that
(elastic node counts, etcd, ...) is handed to torch's own elastic agent.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed.run as torchrun
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import errors

from distributed.errors import BAD_INPUT, REFUSED, Refused
from distributed.torch_internals import load_dynamo, serve_store
from launcher import typed_json
from launcher.agent.assignment import Assignment
from launcher.agent.attempt import Attempt
from launcher.agent.command_line import read_for_torch
from launcher.agent.control import Done, Lineup, report_outcome, tell
from launcher.agent.diagnosis import nccl_network
from launcher.agent.fork import cpus_of_ranks, fork_ranks, variables_of
from launcher.agent.join import begin_record, join
from launcher.agent.link import AgentNote, GuardianLink
from launcher.agent.node_ranks import Heartbeats, NodeRanks
from launcher.agent.nodes import checkin, spare, successor
from launcher.agent.nodes.team import Team
from launcher.agent.output.noise import without_noise
from launcher.agent.output.outputs import Outputs
from launcher.agent.output.stream import say
from launcher.agent.query import Query
from launcher.agent.restarts import Restarts
from launcher.agent.snapshots.memory import Snapshots
from launcher.agent.torchrun_arguments import Arguments, parse
from launcher.agent.verdict import Facts, Verdict
from launcher.failure import Failure
from launcher.failure_block import Outcome
from launcher.record.run_json import LauncherProcess, RunFolder
from launcher.wire import limits

load_dynamo()  # here once, not in each rank
TRAIN = str(Path(__file__).resolve().parents[2] / "train.py")


def run_agent(arguments: list[str], guardian: GuardianLink) -> int:
    """Be the agent process; returns its exit code where no rank was started, else ends it.

    Each forked rank leaves this function by SystemExit (launcher/agent/rank/program.py).
    """
    try:
        args, beyond_static = parse(arguments)
    except ValueError as error:
        say(str(error))
        return BAD_INPUT
    os.environ.pop("RUN_SECRET", None)  # no rank needs it
    if beyond_static is not None:
        say(f"{beyond_static}: started by torch's own elastic agent, one import per rank")
        errors.record(torchrun.run)(read_for_torch(torchrun.parse_args, arguments))
        return 0
    try:
        meeting = join(args, is_by_hand=guardian.control is None)
        if meeting.assignment.node_rank < 0:
            meeting = spare.wait(meeting, args, guardian.control)
        with meeting.ready():
            agent = NodeAgent(args, arguments, meeting, guardian)
        code = agent.run()
    except Refused as refused:
        say(str(refused))
        code = REFUSED
    os._exit(code)  # nothing of torch's needs its 0.6 s of taking down here


class NodeAgent:
    """This node's part of a run, once all nodes have checked in."""

    def __init__(
        self, args: Arguments, typed: list[str], meeting: checkin.Meeting, guardian: GuardianLink
    ) -> None:
        """Raises Refused where the run's folder cannot be written, or a live process has it."""
        part = meeting.assignment
        self.args, self.typed, self.guardian = args, typed, guardian
        self.cpus = cpus_of_ranks(args.numa_binding, args.nproc)
        self.heartbeats = Heartbeats(args.nproc)
        self.snapshots = Snapshots(args.nproc)
        self.started = time.time()
        self.folder = RunFolder(args.log_dir, part.run_id, part.node_rank) if args.log_dir else None
        if self.folder is not None:
            self.folder.create()
        self.path = self.folder.path if self.folder else None
        self.network = nccl_network.prepare(self.folder, part.node_rank, len(part.hosts))
        self.error_files = self.folder.failures if self.folder else Path(tempfile.mkdtemp())
        self.restarts = Restarts(args.max_restarts, self.heartbeats)
        self.outputs = Outputs(args, self.folder)
        self._take_part(meeting)
        folder = str(self.path) if self.path and self.restarts.record else ""
        command = self._resume_command(has_saved=False)
        note = AgentNote(part.run_id, part.node_rank, self.started, args.nproc, folder, command)
        guardian.socket.sendall(typed_json.encode(note).encode())

    def _take_part(self, meeting: checkin.Meeting) -> None:
        """Take the part in the next attempt that this agent was given; raises Refused."""
        part, args = meeting.assignment, self.args
        self.meeting = meeting
        self.store: TCPStore | None = None  # a fresh one: the old one's keys would mislead ranks
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(part.attempt)  # for locks (RunLock)
        master, number = part.address or args.master_addr, len(part.hosts)
        self.args = replace(args, node_rank=part.node_rank, num_nodes=number, master_addr=master)
        own_port = meeting.listener.getsockname()[1] if meeting.listener else args.master_port
        self.port = part.port or own_port
        if part.node_rank == 0 and number > 1:
            self.snapshots.outgoing.begin()
        if self.path is not None and part.node_rank == 0 and self.restarts.record is None:
            launcher = None if self.guardian.control else LauncherProcess.of(os.getppid())
            record = begin_record(self.path, part, self.typed, args.grace_s, launcher)
            self.restarts.record = record
        if self.folder is not None and part.seats and part.attempt:  # a lost node may still write
            self.error_files = self.folder.failures / f"attempt_{part.attempt}"
            self.error_files.mkdir(exist_ok=True)
        if meeting.lost is not None:
            self.restarts.take_over(part.attempt - 1)
            self._note_restart(meeting.lost, -1, [meeting.lost.host], meeting.told)

    # --- one attempt after another ------------------------------------------------------------

    def run(self) -> int:
        """Run the ranks to their end; returns the run's exit code."""
        signals: list[int] = []  # that came from outside
        while True:
            attempt = self._begin_attempt(signals)
            facts = attempt.facts
            verdict = self._find_parts(facts, attempt.watch(self.outputs))
            if not self._go_on(facts, verdict):
                break
        is_told = facts.verdict is not None
        self._report(self._keep_snapshot(verdict, is_told=is_told), is_told=is_told)
        return verdict.outcome.code

    @property
    def is_last(self) -> bool:
        return self.meeting.assignment.attempt >= self.args.max_restarts

    @property
    def may_go_on_elsewhere(self) -> bool:
        """Whether other agents may make another attempt without this one."""
        team = self.meeting.team
        return self.args.min_nodes > 0 and not (self.is_last or (team and team.is_majority))

    def _begin_attempt(self, signals: list[int]) -> Attempt:
        """Fork the ranks."""
        self.restarts.begin_attempt()
        args, meeting = self.args, self.meeting
        hosts, peers, team = meeting.assignment.hosts, meeting.peers, meeting.team
        ports = filter(None, (meeting.listener, meeting.door))
        held = [self.guardian, *ports, *peers.values(), *(team.spares.values() if team else ())]
        given = zip(map(self._variables, range(args.nproc)), self.cpus, strict=True)
        ranks = fork_ranks(args.program, meeting.assignment, self.outputs, given, held)
        if meeting.listener is not None:  # on the very same socket as the agents met
            with without_noise(2):
                self.store = serve_store(args.master_addr, self.port, meeting.listener.detach())
        here = NodeRanks(ranks, self.heartbeats, args.node_rank, hosts[args.node_rank])
        for peer in peers.values():
            # It may have waited long for the others, and be about to save the lost node's snapshot.
            peer.heard = time.monotonic() + (args.grace_s if meeting.lost else 0)
        attempt = Attempt(
            here,
            hosts=hosts,
            peers=peers,
            guardian=self.guardian.socket,
            facts=Facts(signals=signals),
            grace_s=args.grace_s,
            verdict_s=limits.VERDICT_S if self.is_last else limits.SILENCE_S,
            query=Query(here, hosts, peers, self.outputs.say, self.path),
            snapshots=self.snapshots,
            on_beat=self._on_beat,
        )
        if team is not None:
            team.listen(attempt.selector, self._on_lost_spare)
        return attempt

    def _variables(self, local_rank: int) -> dict[str, str]:
        """Return what a rank is given."""
        part = self.meeting.assignment
        error_file = f"{self.error_files}/rank_{part.first_rank + local_rank}.json"
        return {
            **variables_of(self.args, part, local_rank, self.port),
            **self.snapshots.variables(local_rank),
            **(self.network.variables if local_rank == 0 else {}),  # none but on node rank 0
            "HEARTBEAT_FILE": self.heartbeats.name(local_rank),
            "TORCHELASTIC_ERROR_FILE": error_file,
        }

    def _on_beat(self) -> None:
        if self.meeting.team is not None:
            self.meeting.team.beat()
        self.network.look(self.outputs.say)
        self.restarts.look()

    # --- after an attempt ---------------------------------------------------------------------

    def _find_parts(self, facts: Facts, verdict: Verdict) -> Verdict:
        """On node rank 0, note what all nodes are to lay together if no attempt follows."""
        if self.args.node_rank or verdict.outcome.code == 0 or self.may_go_on_elsewhere:
            return verdict
        nodes, saved_step = [*facts.nodes.values()], self.heartbeats.reached()[0]
        return replace(verdict, parts=self.snapshots.find_parts(nodes, saved_step))

    def _go_on(self, facts: Facts, verdict: Verdict) -> bool:
        """Take part in the attempt that follows one that has ended; False: none does."""
        team, first = self.meeting.team, verdict.outcome.failure
        can_follow = not (self.is_last or facts.signals)
        if team is not None:  # it decides for all
            parts = self._restart(team, facts, first) if first and can_follow else {}
            team.tell(parts, verdict)
            return bool(parts)
        if verdict.next is not None:
            self._take_part(replace(self.meeting, assignment=verdict.next))
            return True
        losses = [one for one in facts.failures if one.node_rank == 0 and one.rank < 0]
        if not can_follow or facts.verdict or self.meeting.peers or not losses:
            return False
        if followed := successor.follow(self.meeting, losses[0], self.args):
            with followed.ready():
                self._take_part(followed)
                # Node rank 0 is not there to do it.
                saved = self.heartbeats.reached()[0]
                self.snapshots.save(saved, is_first_node=False, limit_s=self.args.grace_s)
        return followed is not None

    def _restart(self, team: Team, facts: Facts, first: Failure) -> Mapping[int, Assignment]:
        """On node rank 0, take part in another attempt; returns all parts, none if it ends here."""
        busy = team.peers.keys() - facts.nodes.keys()  # their ranks have not ended
        for node_rank in busy if team.min_nodes else ():
            team.peers.pop(node_rank).close()
        why, held_step = team.why_not(are_all_quiet=not busy), self.snapshots.step()
        if not why and not team.lost:
            why = self.restarts.why_not(first, held_step)
        if why:
            say(why)
            return {}
        lost = [team.seats[node_rank].host for node_rank in team.lost]
        replaced = team.refill() if lost else []
        # Another port: whoever is still on the way to the old store would mislead the new ranks.
        address, listener = self.args.master_addr, checkin.listen(self.args.master_addr, 0)
        number = self.meeting.assignment.attempt + 1
        parts = team.assign(number, address, listener.getsockname()[1])
        part = parts[self.args.place]
        self._take_part(replace(self.meeting, assignment=part, listener=listener, lost=None))
        self._note_restart(first, held_step, lost, replaced)
        return parts

    def _note_restart(
        self, first: Failure, held_step: int, lost: Sequence[str], replaced: Sequence[str]
    ) -> None:
        """On node rank 0, record and tell why the ranks start again, and on which nodes."""
        line = self.restarts.note(first, held_step, lost=lost, replaced=replaced)
        self.outputs.say(f"{line}; now on port {self.port}")
        if replaced:
            self._tell_lineup()
            part = self.meeting.assignment
            self.restarts.write(hosts=part.hosts, world_size=part.world_size)

    def _on_lost_spare(self, loss: Failure) -> None:
        text = f"spare {loss.host}: {loss.cause}; the run goes on [{loss.fault}]"
        self.outputs.say(f"warning: {text}")
        self._tell_lineup()

    def _tell_lineup(self) -> None:
        """Tell the launcher which nodes the run goes on with."""
        if (team := self.meeting.team) is not None:
            places = [seat.place for seat in team.seats]
            self._tell(Lineup(self.meeting.assignment.attempt, places, [*team.spares]))

    def _tell(self, message: Lineup | Done) -> None:
        """Tell a launcher elsewhere, if there is one."""
        if (control := self.guardian.control) is not None:
            self.outputs.drain()  # a message begins a line
            tell(message, control, is_line_open=self.outputs.is_line_open)

    # --- the end ------------------------------------------------------------------------------

    def _keep_snapshot(self, verdict: Verdict, *, is_told: bool) -> Outcome:
        """Write what is newer in memory than on the disk as a checkpoint, for a later start."""
        outcome, limit_s = verdict.outcome, self.args.grace_s
        if outcome.signum:  # the ranks have had GRACE: the guardian and launchers wait a bit longer
            limit_s = min(limit_s, limits.STOP_SNAPSHOT_S)
        if outcome.code != 0 and is_told:
            self.snapshots.leave_to(self.meeting.peers.get(0), verdict.parts, limit_s)
        if outcome.code == 0 or is_told or self.may_go_on_elsewhere:
            return outcome
        if verdict.parts is not None:
            step = self.snapshots.save_parts(verdict.parts, self.meeting.peers, limit_s)
        else:
            saved, is_first_node = self.heartbeats.reached()[0], self.args.node_rank == 0
            step = self.snapshots.save(saved, is_first_node=is_first_node, limit_s=limit_s)
        if step < 0:
            return outcome
        first = outcome.failure and replace(outcome.failure, saved_step=step)
        return replace(outcome, failure=first, has_saved=True)

    def _report(self, outcome: Outcome, *, is_told: bool) -> None:
        """Complete run.json, and tell how the run ended, unless node rank 0 tells it for all."""
        if self.folder is None:
            shutil.rmtree(self.error_files, ignore_errors=True)
        self.restarts.end(outcome.code)
        control, is_open = self.guardian.control, self.outputs.is_line_open
        if is_told and (control is not None or self.args.is_in_step):  # to the same terminal
            self._tell(Done())
            return
        command = "" if outcome.code == BAD_INPUT else self._resume_command(outcome.has_saved)
        run_id = self.meeting.assignment.run_id
        outcome = replace(outcome, started=self.started, run_id=run_id, command=command)
        folder = self.path
        if folder and self.args.node_rank and (folder / "run.json").exists():
            folder = None  # node rank 0's, on a shared disk
        report_outcome(outcome, control, is_line_open=is_open, folder=folder)

    def _resume_command(self, has_saved: bool) -> str:
        """Return what resumes the run; nothing for a program that may not be able to resume."""
        can_resume = has_saved or os.path.realpath(self.args.program.name) == TRAIN
        return os.environ.get("LAUNCH_COMMAND", "") if can_resume else ""
