"""torchrun's arguments, as the node agent reads them."""

import argparse
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import torch
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import Std, to_map

from distributed.stop_signals import NEVER_ADDED
from launcher import handshake
from launcher.agent.rank.fresh import decide_fresh
from launcher.agent.rank.program import Program
from launcher.agent.torch_internals import rendezvous_settings
from launcher.command_line import RANGE_CURE, read_grace, read_silence, split
from launcher.handshake import Access
from launcher.record.run_ids import plain_run_id
from launcher.slurm_node import slurm_node
from launcher.text import OwnEnviron

_TORCHS_ALONE = (
    "run_path",
    "logs_specs",
    "event_log_handler",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
)
_FIRST_TORCH = {  # the oldest torch whose torchrun has the option
    "--event-log-handler": "2.8",
    "--numa-binding": "2.9",
    "--duplicate-stdout-filters": "2.10",
    "--duplicate-stderr-filters": "2.10",
    "--signals-to-handle": "2.10",
    "--virtual-local-rank": "2.10",
    "--shutdown-timeout": "2.12",
}
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_LABEL = "[rank${rank}] "


@dataclass(frozen=True)
class Arguments:
    """The settings of one node's agent. Times are in seconds."""

    typed: Sequence[str]  # all of them, for run.json
    program: Program
    num_nodes: int
    node_rank: int  # as given; a later attempt may change it
    nproc: int  # ranks on this node
    master_addr: str
    master_port: int  # 0 means any free port
    run_id: str  # empty means a new one, or node rank 0's
    command: str  # as typed, for the resume line
    log_dir: Path | None  # the parent of all runs' folders; None means no logs
    role: str
    max_restarts: int
    shown: frozenset[int] | None  # local ranks to show; None means rank 0, or all without logs
    is_in_step: bool  # srun started it, and shares its terminal between all nodes
    join_timeout_s: float
    grace_s: float
    silence_s: float  # after this long without a heartbeat, another node is lost
    num_spares: int  # agents beyond `num_nodes`, which wait to replace a lost node
    min_nodes: int  # the fewest nodes to continue with; 0 means never replace a node
    redirected: Mapping[int, Std]  # by local rank: streams written only to their own files
    teed: Mapping[int, Std]  # by local rank: streams also written to their own files
    numa_binding: str  # empty means none
    virtual_gpus: Sequence[str]  # by local rank: its only visible GPU; empty means all
    has_labels: bool  # show all ranks, each line prefixed with its rank
    label: str  # of such a prefix: torchrun's template
    is_debug: bool  # LOG_LEVEL=DEBUG: also show torch's noise
    access: Access = field(repr=False)
    environ: OwnEnviron = field(repr=False)  # the agent's environment, which the ranks inherit

    def label_of(self, rank: int, local_rank: int) -> bytes:
        """Return the prefix of a rank's lines; empty if there is none."""
        if not self.has_labels:
            return b""
        names = {"role_name": self.role, "rank": rank, "local_rank": local_rank}
        return Template(self.label).safe_substitute(names).encode()

    def shown_ranks(self, first_rank: int, *, has_log: bool) -> Sequence[int]:
        """Return the local ranks that the terminal shows; by default, rank 0 if there is a log."""
        ranks = range(self.nproc)
        if self.shown is not None:
            return [rank for rank in ranks if rank in self.shown]
        is_any = self.has_labels or not has_log
        return [rank for rank in ranks if is_any or first_rank + rank == 0]


def parse(arguments: Sequence[str], environ: OwnEnviron) -> tuple[Arguments, str | None]:
    """Return torchrun's arguments, and the name of one, if any, that only torch's agent supports.

    Removes SPARES and MIN_NODES from `environ`. May ask SLURM. Raises ValueError with one line.
    """
    args = _parse_as_torchrun(arguments, environ.get("PET_MASTER_PORT"))
    spares = int(environ.pop("SPARES", "") or 0)
    min_nodes = int(environ.pop("MIN_NODES", "") or 0)
    is_placed = _place_in_step(args, spares, environ)
    low, high = _count_nodes(args.nnodes)
    nproc = _count_ranks(args.nproc_per_node, environ)
    agents = high + spares
    address, port = _choose_master(args, agents)

    if low != high and args.rdzv_backend == "static":
        raise ValueError(f"--nnodes {args.nnodes}: {RANGE_CURE}")
    _refuse_out_of_range(nproc, args.node_rank, agents, port)
    beyond_static = _find_beyond_static(args, low, high)
    if is_placed and beyond_static:
        cure = "omit it, or also give --nnodes, --node-rank and --master-addr"
        raise ValueError(f"{beyond_static}: not supported in a SLURM step; {cure}")
    _refuse_unusable(args)

    program = Program(
        args.training_script, tuple(args.training_script_args), args.module, args.no_python
    )
    filtered = args.local_ranks_filter
    teed = to_map(Std.from_str(args.tee), nproc)
    is_debug = environ.get("LOG_LEVEL", "").upper() == "DEBUG"
    return Arguments(
        typed=arguments,
        program=decide_fresh(program, environ.get("FRESH")),
        num_nodes=high,
        node_rank=args.node_rank,
        nproc=nproc,
        master_addr=address,
        master_port=port,
        run_id=environ.get("RUN_ID") or plain_run_id(args.rdzv_id),
        command=environ.get("LAUNCH_COMMAND", ""),
        log_dir=Path(args.log_dir).absolute() if args.log_dir is not None else None,
        role=args.role,
        max_restarts=args.max_restarts,
        shown=frozenset(map(int, filtered.split(","))) if filtered else None,
        is_in_step=is_placed,
        join_timeout_s=float(rendezvous_settings(args.rdzv_conf).get("join_timeout", "300")),
        grace_s=read_grace(arguments, environ),
        silence_s=read_silence(environ),
        num_spares=spares,
        min_nodes=min_nodes,
        virtual_gpus=_virtual_gpus(args, nproc, environ.get("CUDA_VISIBLE_DEVICES")),
        numa_binding=vars(args).get("numa_binding") or environ.get("NUMA_BINDING", ""),
        redirected=to_map(Std.from_str(args.redirects), nproc),
        teed=teed,
        has_labels=any(teed.values()) or environ.get("SHOW_RANKS") == "all" or is_debug,
        label=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or _LABEL,
        is_debug=is_debug,
        access=handshake.read_access(environ),
        environ=environ,
    ), beyond_static


def _parse_as_torchrun(arguments: Sequence[str], master_port: str | None) -> argparse.Namespace:
    """Parse the arguments as torchrun does. Raises ValueError with a one-line cause and fix.

    `master_port` is PET_MASTER_PORT, the default; None if it is unset, so that the result shows
    whether a port was given.
    """
    parser = torchrun.get_args_parser()
    parser.set_defaults(master_port=master_port)  # the default is 29500 before torch 2.12
    parser.exit_on_error = False  # it would print its usage, of 90 lines
    options, program = split(arguments)
    try:
        args, unknown = parser.parse_known_args([*options, *program[:1]])
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}; see --help") from None
    args.training_script_args = program[1:]  # no parser may see them: see split()
    if unknown:
        option = unknown[0].partition("=")[0].replace("_", "-")
        first = _FIRST_TORCH.get(option)
        cure = f"install torch {first} or newer" if first else "see --help"
        cause = f"{option}: torchrun in torch {torch.__version__} has no such option"
        raise ValueError(f"{cause}; {cure}")
    return args


def _place_in_step(args: argparse.Namespace, spares: int, environ: OwnEnviron) -> bool:
    """In a SLURM step, set the node count, node rank and master in `args`. Returns whether it did.

    It does nothing if --nnodes, --node-rank or a rendezvous option is given. If --master-addr is,
    that node is the step's master. The last `spares` nodes of the step are spares, not counted in
    `args.nnodes`. May ask the scheduler. Raises LauncherError if a node has several tasks.
    """
    usual = vars(torchrun.get_args_parser().parse_args(["script"]))  # the defaults
    names = "nnodes", "node_rank", "rdzv_endpoint", "rdzv_backend", "standalone"
    is_named = args.master_addr != usual["master_addr"]
    step = slurm_node(environ, master=args.master_addr if is_named else "")
    if step is None or any(getattr(args, name) != usual[name] for name in names):
        return False

    num_nodes, args.node_rank, args.master_addr = step
    args.nnodes = str(num_nodes - spares)
    return True


def _count_ranks(nproc_per_node: str, environ: OwnEnviron) -> int:
    """Return the number given; for `auto` and the like, how many devices torch finds.

    GPUs are counted with NVML, because the agent must not use CUDA before it forks the ranks. torch
    reads this choice from the process's own variables, `environ`, which are then restored. Raises
    ValueError for any other word, or if there is no such device.
    """
    given = environ.get(_BY_NVML)
    environ[_BY_NVML] = "1"
    try:
        return int(torchrun.determine_local_world_size(nproc_per_node))
    finally:
        del environ[_BY_NVML]
        if given is not None:
            environ[_BY_NVML] = given


def _count_nodes(given: str) -> tuple[int, int]:
    """Return the fewest and the most nodes. Raises ValueError if they are not given as N or N:M."""
    try:
        low, high = torchrun.parse_min_max_nnodes(given)
    except (ValueError, RuntimeError):
        low, high = 0, 0
    if not 0 < low <= high:
        raise ValueError(f"--nnodes {given}: not a number of nodes; give N or MIN:MAX, at least 1")
    return low, high


def _refuse_out_of_range(nproc: int, node_rank: int, agents: int, port: int) -> None:
    """Raise ValueError for a number that no run of this many agents can have."""
    if nproc < 1:
        raise ValueError(f"--nproc-per-node {nproc}: no ranks; give at least 1")
    least = -1 if agents > 1 else 0  # -1 requests the next free node rank
    if not least <= node_rank < agents:
        cure = f"give a number from 0 to {agents - 1} (--nnodes)"
        raise ValueError(f"--node-rank {node_rank}: out of range; {cure}")
    if not 0 <= port < 65536:
        raise ValueError(f"--master-port {port}: not a port; give a number from 1 to 65535")


def _refuse_unusable(args: argparse.Namespace) -> None:
    """Raise ValueError for values that no run can use, whether typed or in a PET_ variable."""
    names = vars(args).get("signals_to_handle") or ""  # older torch lacks it
    known = {"", *signal.Signals.__members__} - NEVER_ADDED
    if unknown := {*names.replace(" ", "").split(",")} - known:
        cause = f"--signals-to-handle {names}: cannot handle {', '.join(sorted(unknown))}"
        raise ValueError(f"{cause}; give names such as SIGUSR2")

    if args.no_python and args.module and not args.run_path:  # it makes torch ignore both
        raise ValueError("--no-python and --module cannot be used at the same time; omit one")
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts {args.max_restarts}: give 0 or more")
    ranks = args.local_ranks_filter or "0"
    if not all(rank.strip().isdecimal() for rank in ranks.split(",")):
        raise ValueError(f"--local-ranks-filter {ranks}: give local ranks, such as 0,1,2")


def _virtual_gpus(args: argparse.Namespace, nproc: int, visible: str | None) -> list[str]:
    """Return each rank's only GPU, for --virtual-local-rank or for ranks that share GPUs.

    Returns an empty list if neither is the case. `visible` is CUDA_VISIBLE_DEVICES; None means all
    GPUs. In it, a GPU that ranks share is named several times, which CUDA itself does not accept.
    """
    gpus = [*map(str, range(nproc))]
    if visible is not None:
        gpus = visible.replace(" ", "").split(",")
    if not vars(args).get("virtual_local_rank") and len({*gpus}) == len(gpus):
        return []
    return [gpus[rank % len(gpus)] for rank in range(nproc)]  # the list may be shorter


def _choose_master(args: argparse.Namespace, num_agents: int) -> tuple[str, int]:
    """Return the address and the port at which the agents meet; port 0 means any free one.

    An agent that is alone meets nobody: only its ranks use the port, on this machine.
    """
    is_alone = num_agents == 1
    if args.standalone or (is_alone and args.rdzv_backend != "static"):
        return "127.0.0.1", 0
    if args.rdzv_endpoint:
        host, _, port = args.rdzv_endpoint.rpartition(":")  # no colon: only a host
        return (host.strip("[]"), int(port)) if host else (args.rdzv_endpoint, 29500)

    port = args.master_port
    if port is None:
        port = 0 if is_alone else 29500
    return "127.0.0.1" if is_alone else args.master_addr.strip("[]"), port


def _find_beyond_static(args: argparse.Namespace, low: int, high: int) -> str | None:
    """Return the first option given that only torch's own agent supports; None if there is none."""
    if low != high:
        return "--nnodes MIN:MAX"
    if args.rdzv_backend != "static" and high > 1:
        return f"--rdzv-backend {args.rdzv_backend}"
    for name in _TORCHS_ALONE:
        # Older torch lacks the newest arguments. "null" is the default of --event-log-handler.
        value = vars(args).get(name) or "null"
        if value != "null":
            return f"--{name.replace('_', '-')}"
    return None
