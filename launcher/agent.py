"""The agent of one node: fork the ranks from one import of torch, watch them, end them together.

It takes torchrun's parser, error files, store and environment variables from torch. Rendezvous is
static: node rank 0 serves the store, and ranks follow node ranks. What needs more than that
(elastic node counts, etcd, ...) is handed to torch's own elastic agent.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # DistributedDataParallel imports it: here once, not in each rank
import torch.distributed.run as torchrun
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.utils.api import macros

from distributed import network
from distributed.environment import new_run_id
from distributed.errors import Refused
from distributed.lock import RunLock
from launcher import checkin, identity, link, rank, runlog
from launcher.arguments import Arguments, parse
from launcher.attempt import Attempt, Rank, Verdict
from launcher.control import Control, report_end
from launcher.failure import End, RunSummary
from launcher.heartbeats import Heartbeats
from launcher.output import NodeLog, Stream, Terminal, open_stream


def run_agent(arguments: list[str], guardian: socket.socket, control: Control | None) -> int:
    """Be the agent process; in each forked rank, return that rank's exit code instead."""
    try:
        args, beyond_static = parse(arguments)
        if beyond_static is not None:
            _say(f"{beyond_static}: started by torch's own elastic agent, one import per rank")
            torchrun.main(arguments)
            return 0
        agent = NodeAgent(args, arguments, guardian, control)
        agent.check_in()
    except (Refused, ValueError) as error:
        _say(str(error))
        return 3 if isinstance(error, Refused) else 2
    code = agent.run()
    if agent.is_rank:
        return code
    os._exit(code)  # nothing of torch's needs its 0.6 s of taking down here


NO_STEP = (-1, -1)  # no checkpoint, no step
VERDICT_S = 1.5  # after a failure that no restart follows: for the other nodes' last words


class NodeAgent:
    """This node's part of a run."""

    def __init__(
        self,
        args: Arguments,
        arguments: list[str],
        guardian: socket.socket,
        control: Control | None,
    ) -> None:
        self.args = args
        self.control = control
        self.shares_terminal = args.is_in_step or control is not None
        self.arguments = arguments
        self.guardian = guardian
        self.is_rank = False  # in the agent itself
        self.port = args.master_port
        self.store: TCPStore | None = None
        self.terminals = (Terminal(1), Terminal(2))
        self.reached = NO_STEP

    # --- before the ranks ---------------------------------------------------------------------

    def check_in(self) -> None:
        """Meet the other nodes' agents: settles the run id, the ranks and the log folder.

        Raises:
            Refused: the run cannot start; no rank was started.
        """
        args = self.args
        run_id = args.run_id or (new_run_id() if args.node_rank == 0 else "")
        is_alone = args.num_nodes == 1
        if not is_alone:
            self._choose_network()
        me = identity.NodeReport(
            node_rank=args.node_rank,
            num_nodes=args.num_nodes,
            nproc=args.nproc,
            host=socket.gethostname(),
            run_id=run_id,
            versions=_versions(),
            files={} if is_alone else _code(args.program.name, args.program.arguments),
        )
        if args.node_rank == 0:
            self.listener = checkin.listen(args.master_addr, self.port, is_local=is_alone)
            self.port = self.listener.getsockname()[1]
            self.peers, self.assignment = checkin.gather(
                self.listener, me, args.join_timeout_s, _say
            )
        else:
            address = args.master_addr
            hub, self.assignment = checkin.join(address, self.port, me, args.join_timeout_s, _say)
            self.peers = {0: hub}
            if not self.shares_terminal:
                where = f"{self.assignment.hosts[0]} ({address}:{self.port})"
                _say(f"checked in with node rank 0 on {where}")
        self.started = time.time()
        self._open_folder()
        notes = {"run_id": self.assignment.run_id, "node_rank": self.args.node_rank}
        notes |= {"started": self.started, "ranks": self.args.nproc}
        self.guardian.sendall(json.dumps(notes).encode())

    def _choose_network(self) -> None:
        chosen = network.choose_variables(self.args.master_addr)
        os.environ.update(chosen)
        if chosen and self.args.node_rank == 0:
            _say(f"sets {' '.join(f'{name}={value}' for name, value in chosen.items())}")

    def _open_folder(self) -> None:
        self.folder: runlog.RunFolder | None = None
        if self.args.log_dir is None:
            self.error_files = Path(tempfile.mkdtemp(prefix="ranks-"))
            self.log = NodeLog(None)
            return
        run_id = self.assignment.run_id
        self.folder = runlog.RunFolder(self.args.log_dir, run_id, self.args.node_rank)
        self.folder.create()
        self.error_files = self.folder.failures
        self.log = NodeLog(self.folder.node_log)
        if self.args.node_rank == 0:
            self.lock = RunLock(self.folder.path, f"run {run_id}")
            record = runlog.start_record(
                run_id,
                self.arguments,
                self.assignment.hosts,
                self.assignment.world_size,
                _versions(),
            )
            self.folder.write_record(record)

    # --- one attempt after another ------------------------------------------------------------

    def run(self) -> int:
        """Run the ranks to their end; returns the run's exit code, or in a rank that rank's."""
        gc.freeze()  # shared with all ranks from here on: no collector shall touch these pages
        signals: list[int] = []  # that came from outside
        for number in itertools.count():
            ranks = self._fork_ranks(number)
            if isinstance(ranks, int):
                return ranks
            if self.args.node_rank == 0:
                self._serve_store()
            is_last = number == self.args.max_restarts
            attempt = Attempt(
                ranks,
                node_rank=self.args.node_rank,
                hosts=self.assignment.hosts,
                peers=self.peers,
                guardian=self.guardian,
                heartbeats=self.heartbeats,
                signals=signals,
                grace_s=self.args.grace_s,
                verdict_s=VERDICT_S if is_last else link.SILENCE_S,
            )
            verdict = attempt.watch(self.terminals)
            before, self.reached = self.reached, max(self.reached, self._furthest())
            if self.args.node_rank == 0:
                is_wanted = verdict.failure is not None and not is_last and not signals
                if is_wanted and self._can_restart(attempt, number, before):
                    port = self._prepare_restart(verdict, number + 1)
                    verdict = replace(verdict, restart_port=port)
                attempt.tell(verdict)
            if not verdict.restart_port:
                break
            self.port = verdict.restart_port
        self._tell(verdict)
        return verdict.code

    def _furthest(self) -> tuple[int, int]:
        """The newest checkpoint and step of this attempt, whose records are then closed."""
        with contextlib.closing(self.heartbeats) as beats:
            return beats.furthest(self.args.nproc)

    def _can_restart(self, attempt: Attempt, number: int, before: tuple[int, int]) -> bool:
        """Whether every node is still there, and the attempt got further than those before it."""
        if len(self.peers.keys() & attempt.done.keys()) < self.args.num_nodes - 1:
            _say("a node's agent is gone: there is no restart")
            return False
        if number > 0 and before == self.reached != NO_STEP:
            _say(f"restart {number} gained no step: there is no other")
            return False
        return True

    def _prepare_restart(self, verdict: Verdict, number: int) -> int:
        """On node rank 0, before the others hear of it; returns the port of a fresh store.

        The old one's keys, and whoever is still on the way to it, would mislead the new ranks.
        """
        first = verdict.failure
        assert first is not None
        self.store = None
        self.listener = checkin.listen(self.args.master_addr, 0, is_local=self.args.num_nodes == 1)
        port: int = self.listener.getsockname()[1]
        restart = f"restart {number} of {self.args.max_restarts} after {first.who}"
        _say(f"{restart}: {first.cause}; now on port {port}")
        return port

    def _fork_ranks(self, attempt: int) -> list[Rank] | int:
        """Fork the ranks of an attempt; in a rank, run it and return its exit code instead."""
        self.heartbeats = Heartbeats(self.args.nproc)
        ranks: list[Rank] = []
        agent = os.getpid()
        for local_rank in range(self.args.nproc):
            number = self.assignment.first_rank + local_rank
            error_file = self.error_files / f"rank_{number}.json"
            error_file.unlink(missing_ok=True)
            shown = self.terminals if self._is_shown(local_rank, number) else (None, None)
            stdout, out = open_stream(number, self.log, shown[0])
            stderr, err = open_stream(number, self.log, shown[1])
            pid = os.fork()
            if pid == 0:
                self.is_rank = True
                self._drop_everything(out, err, *ranks)
                arguments = macros.substitute(list(self.args.program.arguments), str(local_rank))
                return rank.run(
                    replace(self.args.program, arguments=tuple(arguments)),
                    self._variables(local_rank, number, attempt, error_file),
                    stdout=stdout,
                    stderr=stderr,
                    parent=agent,
                )
            os.close(stdout)
            os.close(stderr)
            pidfd = os.pidfd_open(pid)
            ranks.append(Rank(number, local_rank, pid, pidfd, (out, err), error_file))
        return ranks

    def _is_shown(self, local_rank: int, number: int) -> bool:
        """Whether the terminal shows this rank: any, or rank 0 alone where there is a log."""
        if self.args.shown is not None:
            return local_rank in self.args.shown
        return self.folder is None or number == 0

    def _variables(
        self, local_rank: int, number: int, attempt: int, error_file: Path
    ) -> dict[str, str]:
        """A rank's environment: what torchrun sets, RUN_ID, LOG_DIR and HEARTBEAT_FILE."""
        variables = {
            "RANK": number,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.assignment.world_size,
            "LOCAL_WORLD_SIZE": self.args.nproc,
            "GROUP_RANK": self.args.node_rank,
            "GROUP_WORLD_SIZE": self.args.num_nodes,
            "ROLE_NAME": self.args.role,
            "ROLE_RANK": number,
            "ROLE_WORLD_SIZE": self.assignment.world_size,
            "MASTER_ADDR": self.args.master_addr,
            "MASTER_PORT": self.port,
            "TORCHELASTIC_RUN_ID": self.assignment.run_id,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": self.args.max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_ERROR_FILE": error_file,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
            "RUN_ID": self.assignment.run_id,
            "HEARTBEAT_FILE": self.heartbeats.path,
        }
        if self.folder is not None:
            variables["LOG_DIR"] = self.folder.root
        if self.args.nproc > 1 and "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = 1  # torchrun's choice
        return {name: str(value) for name, value in variables.items()}

    def _drop_everything(self, *private: Stream | Rank) -> None:
        """In a rank: close what is the agent's, through its objects so that none closes twice."""
        self.guardian.close()
        self.log.close()
        if self.args.node_rank == 0:
            self.listener.close()
        for peer in self.peers.values():
            peer.close()
        for one in private:
            one.close()

    def _serve_store(self) -> None:
        """Serve torch's store where the agents met, on the very same listening socket."""
        self.store = TCPStore(
            self.args.master_addr,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self.listener.detach(),
        )

    def _tell(self, verdict: Verdict) -> None:
        """Print how it ended, last of all, and complete run.json."""
        is_line_open = any(terminal.is_line_open for terminal in self.terminals)
        sends_end = self.control is not None and self.control.token
        if verdict.code != 0 and is_line_open and not sends_end:
            print(file=sys.stderr)
        summary = RunSummary(
            started=self.started,
            lost_peer=verdict.lost_peer,
            stopped=verdict.stopped,
            left=verdict.left,
            run_id=self.assignment.run_id,
            command=os.environ.get("LAUNCH_COMMAND", ""),
        )
        if sends_end or not (
            self.shares_terminal and verdict.is_told
        ):  # else node rank 0 prints it
            end = End(verdict.code, verdict.failure, summary, verdict.is_told)
            report_end(end, self.control, is_line_open=self.terminals[0].is_line_open)
        if self.folder is None:
            shutil.rmtree(self.error_files)
        elif self.args.node_rank == 0:
            with contextlib.suppress(Refused), self.lock.committing():
                self.folder.write_record({"ended": time.time(), "exit_code": verdict.code})


def _versions() -> dict[str, str]:
    """What must be the same on every node."""
    versions = identity.versions()
    if torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions["nccl"] = ".".join(map(str, nccl))
    return versions


def _code(script: str, arguments: Sequence[str]) -> dict[str, str]:
    """The arguments, and the files among them."""
    files = identity.hash_files([script, *arguments], Path())
    return {"the list of arguments": shlex.join(arguments), **files}


def _say(text: str) -> None:
    print(f"node agent: {text}", file=sys.stderr, flush=True)
