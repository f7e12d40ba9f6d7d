"""The agent of one node: fork the ranks from one import of torch, watch them, end them together.

It takes torchrun's parser, error files, store and environment variables from torch. Rendezvous is
static: node rank 0 serves the store, and ranks follow node ranks. What needs more than that
(elastic node counts, etcd, ...) is handed to torch's own elastic agent.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed.run as torchrun
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import record

from distributed import network
from distributed.environment import new_run_id
from distributed.errors import BAD_INPUT, REFUSED, Refused
from distributed.torch_internals import load_dynamo, serve_store
from launcher import typed_json
from launcher.agent import next_attempt
from launcher.agent.assignment import Assignment
from launcher.agent.attempt import Attempt
from launcher.agent.command_line import read_for_torch
from launcher.agent.control import Done, report_outcome, tell
from launcher.agent.diagnosis import nccl_network
from launcher.agent.diagnosis.nccl_network import NetworkWatch
from launcher.agent.fork import cpus_of_ranks, fork_ranks
from launcher.agent.link import AgentNote, GuardianLink
from launcher.agent.node_ranks import Heartbeats, NodeRanks
from launcher.agent.nodes import checkin
from launcher.agent.output.noise import without_noise
from launcher.agent.output.stream import NodeLog, say
from launcher.agent.output.terminal import Terminal, is_line_open
from launcher.agent.query import Query
from launcher.agent.restarts import Restarts
from launcher.agent.snapshots.memory import Snapshots
from launcher.agent.torchrun_arguments import Arguments, parse
from launcher.agent.verdict import Facts, Verdict
from launcher.failure_block import Outcome
from launcher.preflight import must_match
from launcher.record.run_json import LauncherProcess, LiveRecord, RunFolder
from launcher.screen import are_one_file
from launcher.wire import limits
from launcher.wire.messages import NodeReport

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
        record(torchrun.run)(read_for_torch(torchrun.parse_args, arguments))
        return 0
    try:
        meeting = check_in(args, is_by_hand=guardian.control is None)
        with meeting.ready():
            agent = NodeAgent(args, arguments, meeting, guardian)
        code = agent.run()
    except Refused as refused:
        say(str(refused))
        code = REFUSED
    os._exit(code)  # nothing of torch's needs its 0.6 s of taking down here


def check_in(args: Arguments, *, is_by_hand: bool) -> checkin.Meeting:
    """Meet the other nodes' agents: settles the run id, the ranks and the hosts.

    Where no launcher has started all of them, nor tried the ways between them, they do so now,
    unless the ranks may use another network. What a preflight has compared is not compared again.
    Raises Refused where the run cannot start.
    """
    files: dict[str, str] = {}
    is_compared = not (is_by_hand or os.environ.get("SKIP_PREFLIGHT"))
    task_file = os.environ.pop("LAUNCH_TASK_FILE", "")
    agents = args.num_nodes + args.num_spares
    if agents > 1:
        if not is_compared:
            words = [args.program.name, *args.program.arguments]
            files = must_match.describe_program(words, task_file, os.environ)
        if not args.access.secret and args.node_rank == 0:
            who = "a process on any of HOSTS" if args.access.addresses else "anyone who reaches it"
            where = f"port {args.master_port} of {args.master_addr}"
            say(f"warning: {who} can join this run at {where}; set RUN_SECRET [stranger]")
    me = NodeReport(
        node_rank=args.node_rank,
        num_nodes=agents,
        nproc=args.nproc,
        host=socket.gethostname(),
        run_id=args.run_id or (new_run_id() if args.node_rank == 0 else ""),
        versions=_nccl_version() if is_compared else _versions(),
        files=files,
    )
    address, port = args.master_addr, args.master_port
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    is_same = not named or network.interface_to(address) in re.split("[,=]", named)
    meeting = checkin.meet(
        address,
        port,
        me,
        args.access,
        args.join_timeout_s,
        num_spares=args.num_spares,
        min_nodes=args.min_nodes,
        tries_pairs=is_by_hand and is_same and not os.environ.get("SKIP_PREFLIGHT"),
    )
    chosen = network.choose_variables(address, agents)  # not before the name is known here
    os.environ.update(chosen)
    if chosen and args.node_rank == 0 and agents > 1:
        say(f"sets {' '.join(f'{name}={value}' for name, value in chosen.items())}")
    if args.node_rank != 0 and is_by_hand and not args.is_in_step:
        where = f"{meeting.assignment.hosts[0]} ({address}:{port})"
        say(f"checked in with node rank 0 on {where}, as node rank {meeting.assignment.node_rank}")
    return meeting


class NodeAgent:
    """What this node does in a run, once all nodes have checked in."""

    def __init__(
        self,
        args: Arguments,
        arguments: list[str],  # as they were typed, for run.json
        meeting: checkin.Meeting,
        guardian: GuardianLink,
    ) -> None:
        """Raises Refused where the run's folder cannot be written, or a live process has it."""
        self.args, self.arguments = args, arguments
        self.guardian = guardian
        self.store: TCPStore | None = None
        out = Terminal(1)
        self.terminals = out, out if are_one_file(1, 2) else Terminal(2)
        self.cpus = cpus_of_ranks(args.numa_binding, args.nproc)
        self.heartbeats = Heartbeats(args.nproc)
        self.snapshots = Snapshots(args.nproc)
        self.started = time.time()
        self.folder: RunFolder | None = None
        self.network = NetworkWatch()
        self.error_files = args.log_dir or Path(tempfile.mkdtemp())
        self.restarts = Restarts(args.max_restarts)
        self.log = NodeLog(None)
        self.streams: Path | None = None  # for those with own files
        self.is_spare = True  # so far
        self.take_part(meeting)

    def _open_folder(self, own: Assignment) -> None:
        """Write to the run's folder from now on, for this node has ranks."""
        if self.args.log_dir is not None:
            self.folder = RunFolder(self.args.log_dir, own.run_id, own.node_rank)
            self.folder.create()
            self.error_files, self.streams = self.folder.failures, self.folder.path
            self.log = NodeLog(self.folder.node_log)
        self.network = nccl_network.prepare(self.folder, own.node_rank, len(own.hosts))

    def _tell_guardian(self, own: Assignment) -> None:
        folder = str(self.folder.path) if self.folder and self.restarts.record else ""
        command, nproc = self._resume_command(has_saved=False), self.args.nproc
        note = AgentNote(own.run_id, own.node_rank, self.started, nproc, folder, command)
        self.guardian.socket.sendall(typed_json.encode(note).encode())

    def take_part(self, meeting: checkin.Meeting) -> None:
        """Take what this agent is assigned in the next attempt; raises Refused."""
        own, args = meeting.assignment, self.args
        self.meeting, self.assignment, self.listener = meeting, own, meeting.listener
        begins, self.is_spare = self.is_spare and own.node_rank >= 0, own.node_rank < 0
        if begins:
            self._open_folder(own)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(own.attempt)  # for locks (RunLock)
        master, number = own.address or args.master_addr, len(own.hosts)
        self.args = replace(args, node_rank=own.node_rank, num_nodes=number, master_addr=master)
        own_port = self.listener.getsockname()[1] if self.listener else args.master_port
        self.port = own.port or own_port
        if own.node_rank == 0 and number > 1:
            self.snapshots.outgoing.begin()
        if self.folder is not None and own.node_rank == 0 and self.restarts.record is None:
            guardian = LauncherProcess.of(os.getppid())
            self.restarts.record = LiveRecord(
                self.folder.path,
                is_takeover=own.attempt > 0,
                launcher=None if self.guardian.control else guardian,
                versions=_versions(),
                agent_arguments=self.arguments,
                hosts=own.hosts,
                world_size=own.world_size,
                grace=self.args.grace_s,
            )
        if self.folder is not None and own.members and own.attempt:  # a lost node may still write
            self.error_files = self.folder.failures / f"attempt_{own.attempt}"
            self.error_files.mkdir(exist_ok=True)
        if meeting.lost is not None:
            self.restarts.take_over(own.attempt - 1)
            lost, told = [meeting.lost.host], meeting.told
            line = self.restarts.note(meeting.lost, self.heartbeats, -1, lost=lost, replaced=told)
            self.say(f"{line}; now on port {self.port}")
            next_attempt.tell_lineup(self, own.attempt)
        if begins:
            self._tell_guardian(own)

    # --- one attempt after another ------------------------------------------------------------

    def run(self) -> int:
        """Run the ranks to their end; returns the run's exit code."""
        signals: list[int] = []  # that came from outside
        while True:
            reached = self.heartbeats.reached()
            attempt = self._begin_attempt(signals)
            verdict = next_attempt.find_parts(self, attempt.facts, attempt.watch(self.terminals))
            if not next_attempt.prepare(self, attempt.facts, verdict, reached):
                break
        is_told = attempt.facts.verdict is not None
        self._report(self._keep_snapshot(verdict, is_told=is_told), is_told=is_told)
        return verdict.outcome.code

    @property
    def is_last(self) -> bool:
        return self.assignment.attempt >= self.args.max_restarts

    def _begin_attempt(self, signals: list[int]) -> Attempt:
        """Fork the ranks."""
        self.heartbeats.clear()
        ranks = [] if self.is_spare else fork_ranks(self)
        if self.args.node_rank == 0:
            self._serve_store()
        hosts, peers, team = self.assignment.hosts, self.meeting.peers, self.meeting.team
        host = "" if self.is_spare else hosts[self.args.node_rank]
        here = NodeRanks(ranks, self.heartbeats, self.args.node_rank, host)
        folder = self.folder.path if self.folder else None
        for peer in peers.values():
            # It may have waited long for the others, and be about to save the lost node's snapshot.
            peer.heard = time.monotonic() + (self.args.grace_s if self.meeting.lost else 0)
        attempt = Attempt(
            here,
            hosts=hosts,
            peers=peers,
            guardian=self.guardian.socket,
            facts=Facts(signals=signals),
            grace_s=self.args.grace_s,
            verdict_s=limits.VERDICT_S if self.is_last else limits.SILENCE_S,
            query=Query(here, hosts, peers, self.say, folder),
            snapshots=self.snapshots,
            on_beat=self._on_beat,
        )
        if team is not None:
            team.listen(attempt.selector, partial(next_attempt.note_lost_spare, self))
        return attempt

    def _on_beat(self) -> None:
        if self.meeting.team is not None:
            self.meeting.team.beat()
        self.network.look(self.say)
        self.restarts.look(self.heartbeats)

    def say(self, text: str) -> None:
        """Print a line of the agent's own below what the ranks have shown."""
        print(end="\n" if is_line_open(self.terminals) else "", file=sys.stderr)
        say(text)

    def _serve_store(self) -> None:
        """Serve torch's store where the agents met, on the very same listening socket."""
        assert self.listener is not None
        with without_noise(2):
            address, listener = self.args.master_addr, self.listener.detach()
            self.store = serve_store(address, self.port, listener)

    # --- the end ------------------------------------------------------------------------------

    def _keep_snapshot(self, verdict: Verdict, *, is_told: bool) -> Outcome:
        """Write what is newer in memory than on the disk as a checkpoint, for a later start."""
        outcome = verdict.outcome
        is_first_node, team = self.args.node_rank == 0, self.meeting.team
        limit_s = self.args.grace_s
        if outcome.signum:  # the ranks have had GRACE: the guardian and launchers wait a bit longer
            limit_s = min(limit_s, limits.STOP_SNAPSHOT_S)
        if outcome.code != 0 and is_told and not is_first_node:
            parts = None if self.is_spare else verdict.parts
            self.snapshots.leave_to(self.meeting.peers.get(0), parts, limit_s)
        if outcome.code == 0 or (is_told and not is_first_node):
            return outcome
        if self.args.min_nodes and not (self.is_last or (team and team.is_majority)):
            return outcome  # the run may go on elsewhere
        if is_first_node and verdict.parts is not None:
            step = self.snapshots.save_parts(verdict.parts, self.meeting.peers, limit_s)
        else:
            saved, _ = self.heartbeats.reached()
            step = self.snapshots.save(saved, is_first_node=is_first_node, limit_s=limit_s)
        if step < 0:
            return outcome
        first = outcome.failure and replace(outcome.failure, saved_step=step)
        return replace(outcome, failure=first, has_saved=True)

    def _report(self, outcome: Outcome, *, is_told: bool) -> None:
        """Complete run.json, and tell last of all how the run ended; node rank 0 tells it for all.

        An agent that has not heard node rank 0's verdict tells its own.
        """
        if self.args.log_dir is None:
            shutil.rmtree(self.error_files, ignore_errors=True)
        self.restarts.end(outcome.code, self.heartbeats)
        control, is_open = self.guardian.control, is_line_open(self.terminals)
        if is_told and control is not None:
            tell(Done(), control, is_line_open=is_open)
            return
        if is_told and self.args.is_in_step:
            return  # to the same terminal
        command = "" if outcome.code == BAD_INPUT else self._resume_command(outcome.has_saved)
        run_id = self.assignment.run_id
        outcome = replace(outcome, started=self.started, run_id=run_id, command=command)
        folder = self.folder.path if self.folder else None
        if folder and self.args.node_rank and (folder / "run.json").exists():
            folder = None  # node rank 0's, on a shared disk
        report_outcome(outcome, control, is_line_open=is_open, folder=folder)

    def _resume_command(self, has_saved: bool) -> str:
        """Return what resumes the run; nothing for a program that may not be able to resume."""
        can_resume = has_saved or os.path.realpath(self.args.program.name) == TRAIN
        return os.environ.get("LAUNCH_COMMAND", "") if can_resume else ""


def _versions() -> dict[str, str]:
    """Return what must be the same on every node."""
    return {**must_match.versions(), **_nccl_version()}


def _nccl_version() -> dict[str, str]:
    """Return what a preflight, which does not import torch, cannot compare."""
    if not torch.distributed.is_nccl_available():
        return {}
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {"nccl": ".".join(map(str, nccl))}
