"""The agent of one node: it imports torch once, forks the ranks, watches them, and ends them.

It uses torchrun's parser, error files, store and environment variables. Rendezvous is static, with
ranks numbered in node rank order. For what needs more, torch's own elastic agent runs the ranks.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distributed.errors import BAD_INPUT, REFUSED, Refused
from launcher.agent import elastic
from launcher.agent.attempt import Attempt
from launcher.agent.control import AgentNote, SupervisorLink, collect_signals, report_outcome
from launcher.agent.diagnosis.nccl_network import NetworkWatch, prepare_watch
from launcher.agent.facts import Facts
from launcher.agent.fork import cpus_of_ranks, fork_ranks, variables_of
from launcher.agent.join import begin_record, join_run
from launcher.agent.node_ranks import Heartbeats, NodeRanks, Rank
from launcher.agent.nodes import checkin, successor
from launcher.agent.nodes.checkin import Meeting
from launcher.agent.nodes.team import Team
from launcher.agent.output.noise import without_noise
from launcher.agent.output.outputs import Outputs
from launcher.agent.output.stream import say
from launcher.agent.query import Query
from launcher.agent.restarts import Restarts
from launcher.agent.snapshots.memory import Snapshots
from launcher.agent.torch_internals import load_dynamo, serve_store
from launcher.agent.torchrun_arguments import Arguments, parse
from launcher.failure import Failure
from launcher.outcome import Outcome
from launcher.record.run_folder import RunFolder
from launcher.text import OwnEnviron
from launcher.wire import limits
from launcher.wire.messages import Assignment, Membership, Verdict
from launcher.wire.node_link import Peers, tell_silences

with contextlib.suppress(Exception):  # a rank that needs it shows the error
    load_dynamo()  # once here, not in each rank, nor at each restart
TRAIN = str(Path(__file__).resolve().parents[2] / "train.py")


def run_agent(arguments: Sequence[str], environ: OwnEnviron, supervisor: SupervisorLink) -> int:
    """Run as the agent, and exit with the run's code; or let torch's own agent run the ranks.

    Returns BAD_INPUT for invalid arguments, 0 after torch's agent; raises what ends that agent.
    Removes RUN_SECRET from `environ`.
    Each forked rank raises SystemExit through this function (launcher/agent/rank/program.py).
    """
    try:
        args, beyond_static = parse(arguments, environ)
        for_torch = elastic.read_arguments(arguments) if beyond_static else None
    except ValueError as error:
        has_fault = getattr(error, "fault", "")  # then the text ends with it
        say(f"{error}{'' if has_fault else ' [config-invalid]'}")
        return BAD_INPUT
    environ.pop("RUN_SECRET", None)  # no rank needs it
    if for_torch is not None:
        say(f"{beyond_static}: torch's elastic agent starts the ranks; each imports torch")
        collect_signals()  # unblocks notices: torch's ranks would inherit them blocked
        elastic.run(for_torch)
        return 0
    try:
        meeting = join_run(args, is_by_hand=supervisor.control is None)
        with meeting.starting_others():
            agent = NodeAgent(args, meeting, supervisor)
        code = agent.run()
    except Refused as refused:
        say(str(refused))
        code = REFUSED
    os._exit(code)  # skip torch's cleanup, which takes 0.6 s and is not needed


class NodeAgent:
    """What this node does in a run, once all nodes have checked in."""

    def __init__(self, args: Arguments, meeting: Meeting, supervisor: SupervisorLink) -> None:
        """Raise Refused if the run's folder is unusable, or the ranks' CPUs cannot be found."""
        self.args, self.supervisor = args, supervisor
        self.signals = collect_signals()  # received before the next attempt
        self.cpus = cpus_of_ranks(args.numa_binding, args.nproc)
        self.heartbeats = Heartbeats(args.nproc)
        self.snapshots = Snapshots(args.nproc)
        self.started = time.time()
        self.folder: RunFolder | None = None
        self.network = NetworkWatch()
        self.error_files = args.log_dir or Path(tempfile.mkdtemp())
        self.restarts = Restarts(args.max_restarts, self.heartbeats)
        self.outputs = Outputs(args)
        self.is_spare = True  # until it has ranks
        # Shown even if no rank has reported a save; a script other than train.py may not resume.
        self.resume_command = args.command if os.path.realpath(args.program.name) == TRAIN else ""
        self._begin_assignment(meeting)

    def _begin_assignment(self, meeting: Meeting) -> None:
        """Adopt a meeting and its assignment, and open what the next attempt needs.

        When this agent first has ranks, it opens the run's folder and sends its AgentNote; as node
        rank 0, it opens run.json. Raises Refused if it cannot write, or a live process has the run.
        """
        own, args = meeting.assignment, self.args
        own_port = meeting.listener.getsockname()[1] if meeting.listener else args.master_port
        own = replace(own, address=own.address or args.master_addr, port=own.port or own_port)
        has_first_ranks = self.is_spare and own.node_rank >= 0
        self.is_spare = own.node_rank < 0
        self.meeting, self.own = meeting, own
        self.store: object = None  # a new store per attempt: old keys would mislead ranks

        if has_first_ranks and args.log_dir:
            self.folder = RunFolder(args.log_dir, own.run_id, own.node_rank, args.environ)
            self.folder.create()
            self.error_files = self.folder.failures
            self.outputs.keep_in(self.folder)
        if self.folder and own.node_rank == 0 and self.restarts.record is None:
            is_by_hand = self.supervisor.control is None
            self.restarts.record = begin_record(self.folder.path, args, own, is_by_hand=is_by_hand)
            self.restarts.has_begun = own.attempt > 0  # the lost node has recorded the first step
        if self.folder and own.members and own.attempt:  # a lost node's ranks may still write
            self.error_files = self.folder.failures / f"attempt_{own.attempt}"
            with contextlib.suppress(OSError):  # a full disk
                self.error_files.mkdir(exist_ok=True)
        if own.node_rank == 0 and len(own.hosts) > 1:
            self.snapshots.outgoing.begin()
            if has_first_ranks and self.folder:
                self.network = prepare_watch(self.folder, args.environ)
        if has_first_ranks:
            folder = self.folder.path if self.folder and self.restarts.record else None
            note = AgentNote(own.run_id, own.node_rank, self.started, args.nproc)
            self.supervisor.send(replace(note, folder=folder, command=self.resume_command))

    def run(self) -> int:
        """Run one attempt after another, then save the snapshot and report. Returns the code."""
        while True:
            attempt = self._begin_attempt()
            verdict = attempt.watch(self.outputs)  # until all ranks have ended
            facts = attempt.facts
            self.meeting = self.meeting.keep(attempt.peers)
            self.signals = facts.signals
            if self.own.node_rank == 0 and verdict.outcome.code and not self.may_go_on_elsewhere:
                saved_step = self.heartbeats.reached().saved
                parts = self.snapshots.find_parts(facts.nodes.values(), saved_step)
                verdict = replace(verdict, parts=parts)  # for a checkpoint, if this is the end
            if not self._join_next_attempt(facts, verdict):
                break
        outcome = self._save_or_hand_over(verdict, facts)
        self._report(outcome, has_verdict=facts.verdict is not None)
        return outcome.code

    @property
    def is_last(self) -> bool:
        return self.own.attempt >= self.args.max_restarts

    @property
    def may_go_on_elsewhere(self) -> bool:
        """Whether other agents may start another attempt without this one."""
        team = self.meeting.team
        return self.args.min_nodes > 0 and not (self.is_last or (team and team.is_majority))

    def _begin_attempt(self) -> Attempt:
        """Fork the ranks of the next attempt; on node rank 0, serve torch's store to all ranks."""
        self.restarts.begin_attempt()
        args, own, meeting = self.args, self.own, self.meeting
        host = "" if self.is_spare else own.hosts[own.node_rank]
        ranks = [] if self.is_spare else self._fork_ranks()
        if meeting.listener:  # serve the store where the agents met
            with without_noise(2, is_debug=args.is_debug):
                self.store = serve_store(own.address, own.port, meeting.listener.detach())
        here = NodeRanks(ranks, self.heartbeats, own.node_rank, host)
        # The peers sent no heartbeats while they waited, and may first save a lost node's snapshot.
        pause_s = args.grace_s if meeting.took_over else 0.0
        for peer in meeting.everyone():
            peer.expect_news(args.silence_s, pause_s)
        return Attempt(
            here,
            peers={**meeting.peers},
            spares=meeting.spares,
            supervisor=self.supervisor.socket,
            earlier=self.signals,
            facts=Facts(host=host, node_rank=own.node_rank),
            grace_s=args.grace_s,
            is_last=self.is_last,
            query=Query(here, own.hosts, self.outputs.say, self.folder and self.folder.path),
            snapshots=self.snapshots,
            on_beat=lambda peers: run_periodic_tasks(self, peers),
        )

    def _fork_ranks(self) -> list[Rank]:
        ports = filter(None, (self.meeting.listener, self.meeting.failover))
        held = [self.supervisor, *ports, *self.meeting.everyone()]
        given = zip(map(self._variables, range(self.args.nproc)), self.cpus, strict=True)
        return fork_ranks(self.args.program, self.own, self.outputs, given, held)

    def _variables(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables to add for a rank."""
        return {
            **variables_of(self.args, self.own, local_rank, self.error_files),
            **self.snapshots.variables(local_rank),
            **(self.network.variables if local_rank == 0 else {}),  # empty except on node rank 0
            "HEARTBEAT_FILE": self.heartbeats.name(local_rank),
        }

    def _join_next_attempt(self, facts: Facts, verdict: Verdict) -> bool:
        """Take part in the next attempt, for which node rank 0 decides. Returns False if none."""
        team, first = self.meeting.team, verdict.outcome.failure
        can_follow = not (self.is_last or facts.stops)
        if team:  # node rank 0 decides for all nodes
            assignments = self._try_restart(team, facts, first) if first and can_follow else {}
            team.send_assignments(assignments, verdict)
            return bool(assignments)
        if verdict.next:
            self._begin_assignment(replace(self.meeting, assignment=verdict.next))
            return True
        loss = next((one for one in facts.failures if one.node_rank == 0 and one.rank < 0), None)
        is_alone = not (facts.verdict or self.meeting.peers)
        if not (loss and is_alone and can_follow):
            return False
        return self._replace_first_node(loss)

    def _replace_first_node(self, loss: Failure) -> bool:
        """Join or become the successor of node rank 0, and save the snapshot; False if it ends."""
        followed = successor.follow_or_lead(self.meeting, self.args)
        if not followed:
            return False
        with followed.starting_others():
            self._begin_assignment(followed)
            if followed.team:
                self._record_restart(loss, -1, [loss.host], followed.took_over)
            saved = self.heartbeats.reached().saved  # the lost node cannot save its snapshot
            limit_s = self.args.grace_s
            self.snapshots.save(saved, self.own.attempt, is_first_node=False, limit_s=limit_s)
        return True

    def _try_restart(self, team: Team, facts: Facts, first: Failure) -> Mapping[int, Assignment]:
        """Begin another attempt, and return all assignments; or print why none, and return {}."""
        busy = team.peers.keys() - facts.nodes.keys()  # nodes whose ranks are still running
        if team.min_nodes:
            team.part_with(busy)  # they count as lost: their ranks did not exit in time
        team.check_spares(self.on_lost_spare)
        held_step = self.snapshots.step()
        why = team.why_stop(are_all_quiet=not busy)
        if not why and not team.lost:  # the loss of a node says nothing about the script
            why = self.restarts.why_stop(first, held_step)
        if why:
            say(why)
            return {}
        lost = [team.members[node_rank].host for node_rank in team.lost]
        replaced = team.refill() if lost else []
        # Use a new port: a late process that looks for the old store would mislead the new ranks.
        listener = checkin.listen(self.own.address, 0)
        port = listener.getsockname()[1]
        assignments = team.assign(self.own.attempt + 1, self.own.address, port)
        own = assignments[self.args.node_rank]
        meeting = replace(self.meeting, assignment=own, listener=listener, took_over=())
        self._begin_assignment(meeting)
        self._record_restart(first, held_step, lost, replaced)
        return assignments

    def _record_restart(
        self, first: Failure, held_step: int, lost: Sequence[str], replaced: Sequence[str]
    ) -> None:
        """Record and report why the ranks restart and, if nodes were replaced, on which nodes."""
        number = self.own.attempt
        line = self.restarts.record_restart(first, held_step, number, lost=lost, replaced=replaced)
        self.outputs.say(f"{line}; now on port {self.own.port}")
        if replaced:
            self._tell_membership()
            self.restarts.write(hosts=self.own.hosts, world_size=self.own.world_size)

    def on_lost_spare(self, loss: Failure) -> None:
        what = f"spare {loss.host}: {loss.cause}"
        self.outputs.say(f"warning: {what}; the run continues [{loss.fault}]")
        self._tell_membership()

    def _tell_membership(self) -> None:
        """Report to the launcher which nodes the run continues with."""
        if team := self.meeting.team:
            nodes = [member.node_id for member in (*team.members, *team.spares)]
            self.outputs.send(Membership(self.own.attempt, nodes), self.supervisor.control)

    def _save_or_hand_over(self, verdict: Verdict, facts: Facts) -> Outcome:
        """Save a snapshot that is newer than the last checkpoint; a later start resumes from it.

        If node rank 0 has sent the verdict, it saves: hand over this node's parts, and wait for it.
        Nothing is saved after code 0, or if other agents may continue. Returns the outcome, with
        the new step.
        """
        outcome, limit_s = verdict.outcome, self.args.grace_s
        if facts.stops:  # the ranks have used up GRACE; the supervisor and launchers wait longer
            limit_s = min(limit_s, limits.STOP_SNAPSHOT_S)
        if facts.verdict and 0 in self.meeting.peers:
            parts = None if self.is_spare else verdict.parts
            self.snapshots.hand_over(self.meeting.peers[0], parts, limit_s)
        if outcome.code == 0 or facts.verdict or self.may_go_on_elsewhere:
            return outcome

        attempt, peers = self.own.attempt, self.meeting.peers
        if verdict.parts is not None:
            step = self.snapshots.save_parts(verdict.parts, attempt, peers, limit_s)
        else:
            saved = self.heartbeats.reached().saved
            is_first = self.own.node_rank == 0
            step = self.snapshots.save(saved, attempt, is_first_node=is_first, limit_s=limit_s)
        return outcome.with_saved(step) if step >= 0 else outcome

    def _report(self, outcome: Outcome, *, has_verdict: bool) -> None:
        """Complete the log and run.json, delete temporary files, and report the end if due."""
        self.outputs.log.close()  # warns if that shows that lines are lost
        if not self.args.log_dir:
            shutil.rmtree(self.error_files, ignore_errors=True)
        self.restarts.end(outcome.code)
        control = self.supervisor.control
        if has_verdict and (control is not None or self.args.is_in_step):  # node rank 0 reports
            return
        if shows_no_rank(self) and outcome.code == 0:
            self.outputs.say("the run has ended with code 0")
        command = self.args.command if outcome.has_saved else self.resume_command
        if outcome.code == BAD_INPUT:  # the same command would fail again
            command = ""
        outcome = replace(outcome, started=self.started, run_id=self.own.run_id, command=command)
        folder = self.folder and self.folder.path
        if folder and self.own.node_rank and (folder / "run.json").exists():
            folder = None  # on a shared disk, node rank 0 keeps the text
        report_outcome(outcome, control, is_line_open=self.outputs.is_line_open, folder=folder)


def run_periodic_tasks(agent: NodeAgent, peers: Peers) -> None:
    """Every BEAT_S: check the spares, NCCL's log and the peers; show progress, or stop the run."""
    team, say = agent.meeting.team, agent.outputs.say
    if team:
        team.check_spares(agent.on_lost_spare)
    agent.network.poll_nccl_log(say)
    agent.restarts.record_progress()
    agent.restarts.stop_if_taken_over(say)  # by SIGTERM to this process
    if agent.own.node_rank in (0, 1) or shows_no_rank(agent):  # not every node of a large run
        tell_silences(peers, agent.own.hosts, say)
    if shows_no_rank(agent):
        agent.outputs.show_step(agent.heartbeats.step())


def shows_no_rank(agent: NodeAgent) -> bool:
    """Return whether this node has a terminal to itself, and rank 0 is elsewhere."""
    is_alone = agent.supervisor.control is None and not agent.args.is_in_step
    return is_alone and agent.own.node_rank > 0
