"""The plan of a run, made before anything starts: its rows on the terminal, and its commands."""

import functools
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from distributed import hostlist
from distributed.errors import Refused
from launcher.container import Container
from launcher.plan.typed import Choices, Words
from launcher.preflight.check_node import check_node
from launcher.preflight.compare import Preflight
from launcher.text import Environ, count, fold_names, print_row
from launcher.wire import limits
from launcher.wire.messages import Report, Request

ROOT = Path(__file__).parents[2]  # as launch.sh names it
AGENT, START = "scripts/lib/agent.py", "scripts/lib/start.py"
LONGEST = 100_000  # bytes of an argument or a variable; Linux allows 128 KiB
BeReady = Callable[[], None]  # a fan-out calls it just before it starts the first agent
Row = Callable[[str, str], None]  # prints a row: its name, its text


@dataclass(frozen=True)
class NodePlan:
    """One node, by its name for ssh, and its number of ranks."""

    name: str
    nproc: int | None = None  # None: one per GPU
    is_by_lines: bool = False  # nobody chose `nproc`: it counts the node's lines in a node file

    @property
    def host(self) -> str:
        """The name without the user's."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True)
class World:
    """How many nodes there are, which one this is, and where they meet."""

    num_nodes: int = 1
    master_addr: str = "127.0.0.1"  # empty: the scheduler has not chosen yet
    node_rank: int = 0  # of this machine; -1: the next free one at the check-in
    nproc: int | None = None  # ranks per node; None: one per GPU
    nodes: Sequence[NodePlan] = ()  # by node rank, if this launcher starts them all by name
    num_spares: int = 0  # additional nodes, which wait: the last of `nodes`
    min_nodes: int = 0  # the fewest that the run can continue with; 0: a lost node ends the run
    hosts: str = ""  # SLURM's list of the nodes
    job: str = ""  # SLURM's id of the job
    left_out: Sequence[str] = ()  # faulty nodes of the job


@dataclass(frozen=True)
class Batch:
    """The samples in one rank's micro-batch, or in a whole step; the other number is 0."""

    samples: int
    samples_in_all: int
    accumulation: int  # micro-batches per step

    def describe(self, ranks: int) -> str:
        """Return both numbers in words, for `ranks` ranks. A resumed run keeps the total."""
        shares = ranks * self.accumulation
        each = self.samples or max(1, round(self.samples_in_all / shares))  # as in train.py
        accumulated = f" x {self.accumulation} accumulated" if self.accumulation > 1 else ""
        split = f"{count(ranks, 'rank')} x {each}{accumulated}"
        return f"{count(each * shares, 'sample')} a step = {split}"

    def can_split(self, ranks: int, fewer: int) -> bool:
        """Return whether a run on `ranks` ranks can continue on fewer, as train.py decides it."""
        samples = self.samples_in_all or self.samples * ranks * self.accumulation
        return not samples % (fewer * self.accumulation)


@dataclass(frozen=True, kw_only=True)
class ConfigFacts:
    """What train.py's config says, from `train.py --check --json`."""

    backend: str = "auto"
    join_timeout_s: float = limits.JOIN_S
    checkpoint_dir: Path | None = None
    batch: Batch | None = None
    num_workers: int = 0  # data-loading processes of each rank
    prepare: str = ""  # a script to run before the training
    task_file: str = ""  # the module of train.py's task, if it is the user's own


@dataclass(frozen=True, kw_only=True)
class Plan(World, Choices, ConfigFacts):
    """Everything that the user, the environment, the config and the scheduler decided."""

    fanout: str  # a module of launcher/fanout/ such as local, srun, ssh; or check (the config)
    command: str  # the resume line: all that was typed, quoted for a shell
    root: Path  # the project
    directory: Path  # where the launch was typed; relative paths begin here
    log_dir: Path
    run_id: str  # empty: node rank 0 names the run
    words: Words  # the training script and its arguments, as the node agent takes them
    is_ours: bool  # the training script is this project's train.py
    config: str  # empty: none
    port: int | None  # None: derived from the run id and the folder
    engine: str  # what starts the ranks instead of the node agent
    max_restarts: int
    grace_s: int
    silence_s: float  # after this long without a heartbeat, a node is lost
    variables: Environ  # for every node
    container: Container | None  # in which the preflight, the agents and the ranks run
    forwarded: Sequence[str] = ()  # names of the variables sent to nodes over ssh
    unsent: Sequence[str] = ()  # names of others that the training script names
    has_checks: bool
    preflight_s: int  # for every node to connect over ssh and be checked

    @property
    def folder(self) -> Path:
        """The run's folder, for its logs and record."""
        return self.directory / self.log_dir / self.run_id

    @property
    def num_agents(self) -> int:
        """The number of nodes with an agent, including spares."""
        return self.num_nodes + self.num_spares

    def request(self, *, meeting_size: int = 0, within_s: float = 0.0) -> Request:
        """Return the preflight request for this machine, or for every node of a step: there,
        `meeting_size` nodes meet at the master's port within `within_s` (0: the usual limit).
        """
        return Request(
            run_id=self.run_id,
            num_nodes=self.num_agents,
            node_rank=self.node_rank,
            nproc=self.nproc,
            cpu_nproc=self.cpu_nproc,
            num_workers=self.num_workers,
            master_addr=self.master_addr,
            port=self.port,
            words=[*self.words, self.task_file],
            directory=self.directory,
            log_dir=self.log_dir,
            checkpoint_dir=self.checkpoint_dir,
            has_checks=self.has_checks and not self.is_dry_run,
            backend=self.backend,
            meeting_size=meeting_size,
            within_s=within_s or limits.for_nodes(limits.MEETING_S, self.num_agents),
        )

    def run_variables(self) -> dict[str, str]:
        """Return the environment variables that describe the run to an agent and its ranks."""
        command = self.command if len(os.fsencode(self.command)) < LONGEST else ""  # exec's limit
        named = {
            "RUN_ID": self.run_id,
            "LAUNCH_COMMAND": command,
            "ENGINE": self.engine,
            "LAUNCH_TASK_FILE": self.task_file,
            "SKIP_PREFLIGHT": "" if self.has_checks else "1",
        }
        if self.min_nodes:
            named |= {"SPARES": str(self.num_spares), "MIN_NODES": str(self.min_nodes)}
        if self.silence_s != limits.SILENCE_S:
            named["SILENCE_SECONDS"] = f"{self.silence_s:g}"
        named |= self.variables
        # If LAUNCH_COMMAND were missing, and not just empty, train.py would make its own.
        return {name: value for name, value in named.items() if value or name == "LAUNCH_COMMAND"}

    def agent_command(self, *, nproc: int, port: int, node_rank: int | None) -> list[str]:
        """Return what one node runs: its agent, with torchrun's arguments.

        Without a node rank, as in a SLURM job step, the agent works out its own.
        """
        command = [self.python, str(self.root / AGENT)]
        if node_rank is not None:
            command += ["--nnodes", str(self.num_nodes), "--node-rank", str(node_rank)]
        if node_rank is not None or self.has_named_master:
            command += ["--master-addr", self.master_addr]
        command += ["--nproc-per-node", str(nproc), "--master-port", str(port)]
        if not self.engine:  # which would get them from the agent, but does not know them
            command += ["--rdzv-conf", f"join_timeout={self.join_timeout_s:g}"]
            command += ["--log-dir", str(self.log_dir)]
            if self.run_id:
                command += ["--rdzv-id", self.run_id]
            if self.max_restarts:
                command += ["--max-restarts", str(self.max_restarts)]
        return [*command, *self.passed, *self.words]

    @property
    def has_named_master(self) -> bool:
        """Whether the master of a SLURM job is not the job's first node."""
        return bool(self.hosts) and self.master_addr != hostlist.first(self.hosts)

    def module_command(self, module: str) -> list[str]:
        """Return the command that runs a module of launcher/, on this machine or on a node."""
        return [self.python, str(self.root / START), module]

    def run_inside(self, command: Words, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command here, in the container, and wait. Raises Refused if it cannot start."""
        words = self.inside(command)
        try:
            return subprocess.run(words, stdin=subprocess.DEVNULL, errors="replace", **options)
        except OSError as error:
            cure = "correct PYTHON"
            if self.container:
                cure = f"install {self.container.runtime}, or unset CONTAINER"
            raise Refused("env-missing", f"{words[0]}: {error.strerror}; {cure}") from None

    def inside(self, command: Words) -> list[str]:
        """Return a command wrapped for the run's container, if it has one."""
        return self.container.wrap(command) if self.container else list(command)

    def step_options(self) -> list[str]:
        """Return the srun options that run a step in the run's container."""
        return self.container.srun_options(self.run_id) if self.container else []

    def with_variables(self, command: Words) -> list[str]:
        """Return a command of this run, preceded by the run's variables."""
        variables = [f"{name}={value}" for name, value in self.run_variables().items()]
        return ["env", *variables, *command]

    def shell_line(self, command: Words) -> str:
        """Return a shell line that runs a command where the launch was typed."""
        return f"cd {shlex.quote(str(self.directory))} && {shlex.join(command)}"

    def rank_counts(self, nproc: int) -> list[int]:
        """Return each node's number of ranks, without spares; `nproc` if none was given."""
        if self.nodes:
            return [node.nproc or nproc for node in self.nodes[: self.num_nodes]]
        return [self.nproc or nproc] * self.num_nodes


def node_comment(plan: Plan, node_rank: int, host: str, counts: Sequence[int], port: int) -> str:
    """Return the line above a node's command in a dry run, with its ranks; a spare has none."""
    where = f"rendezvous {plan.master_addr}:{port}"
    if node_rank < 0:
        return f"# this node ({host}): {counts[0]} of {count(sum(counts), 'rank')}, {where}"
    if node_rank >= len(counts):
        return f"# node {node_rank} ({host}): a spare, {where}"
    first = sum(counts[:node_rank])
    last = first + counts[node_rank] - 1
    return f"# node {node_rank} ({host}): ranks {first}-{last} of {sum(counts)}, {where}"


def print_commands(plan: Plan, paste_line: Callable[[str, str], str]) -> None:
    """Print the plan and, for each node, what `paste_line` makes of its name and command."""
    here = check_node(plan.request(), plan.environ)  # its GPUs stand for those of every node
    counts = plan.rank_counts(here.nproc)
    print_plan(plan, here, None, counts)
    for number, node in enumerate(plan.nodes):
        nproc = node.nproc or here.nproc
        command = plan.agent_command(nproc=nproc, port=here.port, node_rank=number)
        print(node_comment(plan, number, node.name, counts, here.port))
        print(paste_line(node.name, plan.shell_line(plan.with_variables(plan.inside(command)))))


def print_plan(
    plan: Plan,
    node: Report | None,  # node rank 0's report, or this node's if each is started separately
    preflight: Preflight | None,  # what the preflight found; None if it has not run
    counts: Sequence[int],  # ranks of each node; empty if they are not known yet
    out: TextIO | None = None,  # None: stderr
) -> None:
    """Print the plan, in rows."""
    row = functools.partial(print_row, out=out)
    config = f"    {shlex.quote(plan.config)}" if plan.config else ""
    row("run", f"{plan.run_id or '(named by node rank 0)'}{config}")
    if plan.site:
        row("site", plan.site)
    if plan.container:
        row("container", str(plan.container))
    row("hosts", _describe_hosts(plan, node))
    if plan.min_nodes:
        row("spares", _describe_spares(plan))
    if counts:
        _print_ranks(plan, node, counts, row)
    if plan.join_timeout_s != limits.JOIN_S:
        row("wait", f"at most {plan.join_timeout_s:g} s for all nodes to join")
    if plan.forwarded:
        row("variables", f"sent to the nodes: {' '.join(plan.forwarded)}")
    if plan.unsent:
        names = " ".join(plan.unsent)
        row("variables", f"not sent: {names}   (FORWARD_ENV='{names}' sends them)")
    row("preflight", _describe_preflight(plan, preflight))
    if plan.engine and not plan.is_ours:
        return  # there is no log
    follow = "" if plan.engine else f"   (tail -f {shlex.quote(str(plan.log_dir))}/node_*.log)"
    row("logs", f"{plan.log_dir}/{plan.run_id or '<run id>'}/{follow}")


def _print_ranks(plan: Plan, node: Report | None, counts: Sequence[int], row: Row) -> None:
    """Print the number of ranks, their shares of CPUs and batch, and warnings about these."""
    backend = plan.backend.replace("auto", "nccl" if node and node.gpus else "gloo")
    each = str(counts[0]) if len({*counts}) == 1 else ",".join(map(str, counts))
    row("ranks", f"{sum(counts)} = {count(plan.num_nodes, 'node')} x {each}, {backend}")
    if node and plan.nodes:
        first = plan.nodes[0]  # `node` is its report
        if first.is_by_lines and node.gpus not in (0, first.nproc):
            lines = f"{first.name} has {count(node.gpus, 'GPU')}, but {first.nproc} lines"
            row("warning", f"{lines} in the node file; NPROC_PER_NODE overrides them")

    if node and node.cpus and not plan.is_dry_run:
        row("cpus", f"{node.cpus / counts[0]:g} per rank of {node.host}")
    if not plan.batch:
        return

    row("batch", plan.batch.describe(sum(counts)))
    for left in range(plan.min_nodes or plan.num_nodes, plan.num_nodes):
        if not plan.batch.can_split(sum(counts), sum(counts[:left])):
            text = f"{left} of {plan.num_nodes} nodes cannot share this batch equally"
            row("warning", f"{text}: without a spare, the run would end")


def _describe_spares(plan: Plan) -> str:
    """Return the names of the spares, and with how many nodes the run can continue."""
    everyone = [node.name for node in plan.nodes] or hostlist.expand(plan.hosts)
    names = "  ".join(fold_names(everyone[plan.num_nodes :])) or "none"
    if plan.min_nodes == plan.num_nodes:
        return names
    return f"{names}   (if none is left: {count(plan.min_nodes, 'node')} or more)"


def _describe_hosts(plan: Plan, node: Report | None) -> str:
    """Return the nodes, with the master's address and port if they are known."""
    if node is None:  # the scheduler has not chosen yet
        return plan.hosts
    address = f"[{plan.master_addr}]" if ":" in plan.master_addr else plan.master_addr
    master = f"{address}:{node.port}"
    if plan.nodes:
        first, *others = (node.name for node in plan.nodes[: plan.num_nodes])
        return "  ".join([f"{first} (master, {master})", *fold_names(others)])
    if plan.num_nodes == 1:
        return f"{plan.hosts or node.host} (master, {master})"
    rank = "the next node rank" if plan.node_rank < 0 else f"node rank {plan.node_rank}"
    here = f"{node.host} (this one, {rank} of {plan.num_nodes})"
    return f"{master} (master)  {plan.hosts or here}"


def _describe_preflight(plan: Plan, preflight: Preflight | None) -> str:
    """Return the preflight's result, or why it has not run."""
    if plan.is_dry_run or preflight is None:
        return "not run (--dry-run)"
    if not plan.has_checks:
        return "not run (SKIP_PREFLIGHT)"
    warnings = len(preflight.findings)
    verdict = count(warnings, "warning") if warnings else "ok"
    checks = f"{count(preflight.num_checks, 'check')} on {count(preflight.num_nodes, 'node')}"
    return f"{checks}: {verdict} in {preflight.seconds:.3g} s"
