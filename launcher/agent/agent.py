"""The agent of one node: fork the ranks from one import of torch, watch them, end them together.

It takes torchrun's parser, error files, store and environment variables from torch. Rendezvous is
static: node rank 0 serves the store, and ranks follow node ranks. What needs more than that
(elastic node counts, etcd, ...) is handed to torch's own elastic agent.
"""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # DistributedDataParallel imports it: here once, not in each rank
import torch.distributed.run as torchrun
from torch._C._distributed_c10d import TCPStore

from distributed import network
from distributed.environment import new_run_id
from distributed.errors import BAD_INPUT, REFUSED, Refused
from launcher import typed_json
from launcher.agent import checkin, nccl_network
from launcher.agent.attempt import Attempt
from launcher.agent.control import SILENCE_S, report_end
from launcher.agent.fork import fork_ranks
from launcher.agent.guardian import AgentNote, GuardianLink
from launcher.agent.heartbeats import Heartbeats
from launcher.agent.node_ranks import NodeRanks
from launcher.agent.output import NodeLog, say, without_noise
from launcher.agent.query import Query
from launcher.agent.rank_environment import cpus_of_ranks
from launcher.agent.restarts import Restarts
from launcher.agent.snapshots import Snapshots
from launcher.agent.terminal import is_line_open, open_terminals
from launcher.agent.torchrun_arguments import Arguments, parse
from launcher.agent.verdict import Facts, Verdict
from launcher.failure import Failure
from launcher.failure_block import End, RunSummary
from launcher.preflight import must_match
from launcher.record.run_json import LauncherProcess, LiveRecord, RunFolder

TRAIN = str(Path(__file__).resolve().parents[2] / "train.py")
STOPPED_S = 8.0  # after a stop: to write a snapshot
VERDICT_S = 1.5  # after a failure that no restart follows: for the other nodes' ends


def run_agent(arguments: list[str], guardian: GuardianLink) -> int:
    """Be the agent process; returns its exit code where no rank was started, else ends it.

    Each forked rank leaves this function by SystemExit (launcher/agent/rank.py).
    """
    try:
        args, beyond_static = parse(arguments)
    except ValueError as error:
        say(str(error))
        return BAD_INPUT
    os.environ.pop("RUN_SECRET", None)  # no rank needs it
    if beyond_static is not None:
        say(f"{beyond_static}: started by torch's own elastic agent, one import per rank")
        torchrun.main(arguments)
        return 0
    try:
        is_terminal_shared = args.is_in_step or guardian.control is not None
        meeting = check_in(args, is_terminal_shared=is_terminal_shared)
        with meeting.ready():
            agent = NodeAgent(args, arguments, meeting, guardian)
        code = agent.run()
    except Refused as refused:
        say(str(refused))
        code = REFUSED
    os._exit(code)  # nothing of torch's needs its 0.6 s of taking down here


def check_in(args: Arguments, *, is_terminal_shared: bool) -> checkin.Meeting:
    """Meet the other nodes' agents: settles the run id, the ranks and the hosts.

    Raises Refused where the run cannot start.
    """
    files: dict[str, str] = {}
    task_file = os.environ.pop("LAUNCH_TASK_FILE", "")
    chosen = network.choose_variables(args.master_addr, args.num_nodes)
    os.environ.update(chosen)
    if args.num_nodes > 1:
        words = [args.program.name, *args.program.arguments]
        files = {"the list of arguments": shlex.join(words[1:])}
        files |= must_match.hash_files([*words, task_file], Path())
        if chosen and args.node_rank == 0:
            say(f"sets {' '.join(f'{name}={value}' for name, value in chosen.items())}")
        if not args.access.secret and args.node_rank == 0:
            who = "a process on any of HOSTS" if args.access.addresses else "anyone who reaches it"
            where = f"port {args.master_port} of {args.master_addr}"
            say(f"warning: {who} can join this run at {where}; set RUN_SECRET [stranger]")
    me = must_match.NodeReport(
        node_rank=args.node_rank,
        num_nodes=args.num_nodes,
        nproc=args.nproc,
        host=socket.gethostname(),
        run_id=args.run_id or (new_run_id() if args.node_rank == 0 else ""),
        versions=_versions(),
        files=files,
    )
    address, port = args.master_addr, args.master_port
    meeting = checkin.meet(address, port, me, args.access, args.join_timeout_s)
    if args.node_rank != 0 and not is_terminal_shared:
        where = f"{meeting.assignment.hosts[0]} ({address}:{port})"
        say(f"checked in with node rank 0 on {where}")
    return meeting


class NodeAgent:
    """This node's part of a run, once all nodes have checked in."""

    def __init__(
        self,
        args: Arguments,
        arguments: list[str],  # as they were typed, for run.json
        meeting: checkin.Meeting,
        guardian: GuardianLink,
    ) -> None:
        """Raises Refused where the run's folder cannot be written, or a live process has it."""
        self.args = args
        self.meeting = meeting
        self.assignment = meeting.assignment
        self.listener = meeting.listener
        self.port = meeting.listener.getsockname()[1] if meeting.listener else args.master_port
        self.guardian = guardian
        self.control = guardian.control
        self.store: TCPStore | None = None
        self.terminals = open_terminals()
        self.cpus = cpus_of_ranks(args.numa_binding, args.nproc)
        self.heartbeats = Heartbeats(args.nproc)
        has_others = args.node_rank == 0 and args.num_nodes > 1
        self.snapshots = Snapshots(args.nproc, has_others=has_others)
        self.started = time.time()
        run_id, log_dir = self.assignment.run_id, args.log_dir
        self.folder = RunFolder(log_dir, run_id, args.node_rank) if log_dir else None
        if self.folder is not None:
            self.folder.create()
        self.network = nccl_network.prepare(self.folder, args.node_rank, args.num_nodes)
        self.restarts = Restarts(args.max_restarts, self._open_record(arguments))
        self.log = NodeLog(self.folder.node_log if self.folder else None)
        self.streams = self.folder.path if self.folder else None  # for those with own files
        self.error_files = self.folder.failures if self.folder else Path(tempfile.mkdtemp())
        folder = str(self.folder.path) if self.folder and self.restarts.record else ""
        command = self._resume_command(has_saved=False)
        note = AgentNote(run_id, args.node_rank, self.started, args.nproc, folder, command)
        guardian.socket.sendall(typed_json.encode(note).encode())

    def _open_record(self, arguments: list[str]) -> LiveRecord | None:
        """On node rank 0, start run.json."""
        if self.folder is None or self.args.node_rank != 0:
            return None
        return LiveRecord(
            self.folder.path,
            launcher=None if self.control else LauncherProcess.of(os.getppid()),  # the guardian
            versions=_versions(),
            agent_arguments=arguments,
            hosts=self.assignment.hosts,
            world_size=self.assignment.world_size,
            grace=self.args.grace_s,
        )

    # --- one attempt after another ------------------------------------------------------------

    def run(self) -> int:
        """Run the ranks to their end; returns the run's exit code."""
        gc.freeze()  # shared with all ranks from here on: no collector shall touch these pages
        signals: list[int] = []  # that came from outside
        number = 0
        while (verdict := self._run_attempt(number, signals)).restart_port:
            self.port = verdict.restart_port
            number += 1
        self._report(self._save_snapshot(verdict))
        return verdict.code

    def _run_attempt(self, number: int, signals: list[int]) -> Verdict:
        """Fork the ranks and watch them to their end; returns what all nodes agree on."""
        reached = self.heartbeats.reached()
        self.heartbeats.clear()
        ranks = fork_ranks(self, number)
        if self.args.node_rank == 0:
            self._serve_store()
        is_last = number == self.args.max_restarts
        hosts, peers = self.assignment.hosts, self.meeting.peers
        here = NodeRanks(ranks, self.heartbeats, self.args.node_rank, hosts[self.args.node_rank])
        folder = self.folder.path if self.folder else None
        attempt = Attempt(
            here,
            hosts=hosts,
            peers=peers,
            guardian=self.guardian.socket,
            facts=Facts(signals=signals),
            grace_s=self.args.grace_s,
            verdict_s=VERDICT_S if is_last else SILENCE_S,
            query=Query(here, hosts, peers, self._say, folder, self.args.hang_s),
            snapshots=self.snapshots,
            on_beat=self._on_beat,
        )
        verdict = attempt.watch(self.terminals)
        if self.args.node_rank == 0:
            first = None if is_last or signals else verdict.failure
            if first is not None and self._can_restart(first, attempt, reached):
                verdict = replace(verdict, restart_port=self._prepare_restart(first))
            attempt.send_all(verdict)
        return verdict

    def _on_beat(self) -> None:
        self.network.look(self._say)
        self.restarts.look(self.heartbeats)

    def _can_restart(self, first: Failure, attempt: Attempt, before: tuple[int, int]) -> bool:
        """Whether every node is still there, and another attempt may get further."""
        why = "a node's agent is gone: there is no restart"
        if len(self.meeting.peers.keys() & attempt.facts.nodes.keys()) == self.args.num_nodes - 1:
            why = self.restarts.why_not(first, self.heartbeats, before)
        if why:
            say(why)
        return not why

    def _prepare_restart(self, first: Failure) -> int:
        """On node rank 0, before the others hear of it; returns the port of a fresh store.

        The old one's keys, and whoever is still on the way to it, would mislead the new ranks.
        """
        self.store = None
        self.listener = checkin.listen(self.args.master_addr, 0)
        port: int = self.listener.getsockname()[1]
        told = self.restarts.note(first, self.heartbeats, self.snapshots.step())
        self._say(f"{told}; now on port {port}")
        return port

    def _say(self, text: str) -> None:
        """Print a line of the agent's own below what the ranks have shown."""
        print(end="\n" if is_line_open(self.terminals) else "", file=sys.stderr)
        say(text)

    def _serve_store(self) -> None:
        """Serve torch's store where the agents met, on the very same listening socket."""
        assert self.listener is not None
        with without_noise(2):
            address, fd = self.args.master_addr, self.listener.detach()
            self.store = TCPStore(
                address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=fd
            )

    # --- the end ------------------------------------------------------------------------------

    def _save_snapshot(self, verdict: Verdict) -> Verdict:
        """Write what is newer in memory than on the disk as a checkpoint, for a later start."""
        is_first_node = self.args.node_rank == 0
        if verdict.code != 0 and verdict.is_told and not is_first_node:
            self.snapshots.await_save(self.meeting.peers.get(0), self.args.grace_s)
        if verdict.code == 0 or (verdict.is_told and not is_first_node):
            return verdict
        saved_step, limit_s = self.heartbeats.reached()[0], self.args.grace_s
        if verdict.signum:  # the ranks have had GRACE: the guardian and launchers wait a bit longer
            limit_s = min(limit_s, STOPPED_S)
        step = self.snapshots.save(
            is_first_node=is_first_node, saved_step=saved_step, limit_s=limit_s
        )
        if step < 0:
            return verdict
        first = verdict.failure and replace(verdict.failure, saved_step=step)
        return replace(verdict, failure=first, has_saved=True)

    def _report(self, verdict: Verdict) -> None:
        """Complete run.json, and tell last of all how the run ended."""
        if self.folder is None:
            shutil.rmtree(self.error_files, ignore_errors=True)
        if told := self.restarts.end(verdict.code, self.heartbeats):
            self._say(told)
        summary = RunSummary(
            started=self.started,
            lost_peer=verdict.lost_peer,
            stopped=verdict.stopped,
            left=verdict.left,
            run_id=self.assignment.run_id,
            command="" if verdict.code == BAD_INPUT else self._resume_command(verdict.has_saved),
            ends=verdict.ends,
            signum=verdict.signum,
        )
        if self.args.is_in_step and verdict.is_told and self.control is None:
            return  # node rank 0 prints it, to the same terminal
        end = End(verdict.code, verdict.failure, summary, verdict.is_told)
        report_end(end, self.control, is_line_open=is_line_open(self.terminals))

    def _resume_command(self, has_saved: bool) -> str:
        """Return what resumes the run; nothing for a program that may not be able to resume."""
        can_resume = has_saved or os.path.realpath(self.args.program.name) == TRAIN
        return os.environ.get("LAUNCH_COMMAND", "") if can_resume else ""


def _versions() -> dict[str, str]:
    """Return what must be the same on every node."""
    versions = must_match.versions()
    if torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions["nccl"] = ".".join(map(str, nccl))
    return versions
