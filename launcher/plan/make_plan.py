"""Makes the plan from the arguments, the environment and the scheduler. Each decision is made here.

The order of precedence is: arguments, environment, config, default.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

from distributed.environment import DEFAULT_LOG_DIR, check_run_id, new_run_id, port_from_id
from distributed.job import ask_scheduler, in_slurm_step, job_id, job_run_id
from launcher.command_line import read_grace, read_silence
from launcher.container import Container, config_texts, read_container
from launcher.handshake import read_access
from launcher.master_port import claim_node_rank_0, is_loopback
from launcher.plan import foreign, hosts, mpi, pbs, slurm, spares
from launcher.plan.plan import ROOT, Plan, World
from launcher.plan.resume import resume_line
from launcher.plan.script import choose_program, is_our_train_py, refuse_missing
from launcher.plan.settings import VARIABLES, in_order, read_nproc, read_number, read_value
from launcher.plan.typed import Choices, Typed, fields_of
from launcher.record.run_ids import free_run_id, plain_run_id
from launcher.text import Environ, PlanError, warn
from launcher.wire import limits

BY_HAND_PORT = "29500"  # nodes started by hand cannot agree on another port before they meet
_DEBUG = ("TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG")


def make_plan(typed: Typed) -> Plan:
    """Return the plan, except for what depends on the config or the machines.

    May ask the scheduler, print warnings and reserve the run id (see choose_run_id). Raises
    PlanError, LauncherError or HostlistError if the input does not describe a valid run.
    """
    given = _read_hosts_option(typed)
    is_guest = typed.like_torchrun and not is_our_train_py(typed.rest[0])  # see foreign.py
    typed = hosts.with_plain_master(foreign.read_own(given, is_guest=is_guest))
    environ = typed.environ
    words, is_ours, config = choose_program(typed)
    max_restarts = _read_restarts(typed)
    fanout = choose_fanout(typed)
    is_by_srun = fanout != "local" and environ.get("LAUNCHER") == "srun"  # no node agents
    engine = typed.engine or ("srun" if is_by_srun else "")
    is_here = fanout == "local" and not (typed.is_dry_run or environ.get("CONTAINER"))
    if is_here:
        refuse_missing(typed.here, words)

    world = hosts.check_master(read_world(typed, fanout))
    try:
        world = spares.set_aside(world, environ, fanout, engine, max_restarts)
    except PlanError as error:
        if not is_guest:
            raise
        typed = foreign.drop(typed, error, *spares.NAMES)
    is_by_hand = fanout == "local" and world.num_nodes > 1
    if is_by_hand:
        read_access(environ)  # raises PlanError if RUN_SECRET or HOSTS is wrong

    log_dir = Path(_first(typed.log_dir, environ, "LOG_DIR") or DEFAULT_LOG_DIR)
    log_dir = typed.here / log_dir if typed.module else log_dir  # a module runs in ROOT
    directory = ROOT if typed.module else typed.here
    is_namer = world.node_rank == 0 and fanout != "job_command"  # the job has no id yet
    as_set = given.environ if typed.like_torchrun else environ  # the user's script reads them too
    usual_s = limits.SPARED_SILENCE_S if world.min_nodes else limits.SILENCE_S

    return Plan(
        **fields_of(World, world),
        **fields_of(Choices, foreign.hide(given, typed.environ)),
        fanout=fanout,
        command=resume_line(typed, fanout),
        root=ROOT,
        directory=directory,
        log_dir=log_dir,
        run_id=choose_run_id(typed, log_dir, is_namer=is_namer),
        words=words,
        is_ours=is_ours,
        config="" if config == "-" else config,
        port=_read_port(typed, is_by_hand=is_by_hand),
        backend=environ.get("BACKEND") or "auto",
        engine=engine,
        max_restarts=max_restarts,
        grace_s=int(read_grace(typed.passed, environ)),
        silence_s=read_silence(environ, usual_s),
        variables=_choose_variables(environ, as_set, is_ours=is_ours),
        container=_choose_container(typed, fanout, directory, [log_dir, config, *words]),
        has_checks=environ.get("SKIP_PREFLIGHT") != "1",
        preflight_s=int(environ.get("PREFLIGHT_SECONDS") or 9),
    )


def _read_restarts(typed: Typed) -> int:
    """Return how often the ranks may be restarted. Raises PlanError if the engine cannot do it."""
    given = _first(typed.max_restarts, typed.environ, "MAX_RESTARTS")
    restarts = int(read_value("MAX_RESTARTS", given or "0"))
    if restarts and typed.engine:
        cause = f"MAX_RESTARTS is {restarts}, but {typed.engine} cannot restart ranks"
        raise PlanError(f"{cause}; omit it")
    return restarts


def _choose_container(
    typed: Typed, fanout: str, directory: Path, named: list[Path | str]
) -> Container | None:
    """Return the container of the run, which can read `named` and the config; None without one.

    The run starts in `directory`; `named` are paths and words that may contain paths. Raises as
    read_container() does.
    """
    paths = [typed.here, ROOT, *named, *config_texts(Path(typed.config or "-"))]
    # Now, or once the job starts; a node file is that of PBS.
    in_job = fanout in ("srun", "job_command", "check") and not typed.nodefile
    return read_container(typed.environ, typed.here, directory, paths, in_job=in_job)


def _choose_variables(environ: Environ, as_set: Environ, *, is_ours: bool) -> dict[str, str]:
    """Return the variables that every node agent gets, with the values that `as_set` has.

    `environ` shows which are set, in our spelling.
    """
    chosen = {name: as_set[name] for name in in_order("agent") if environ.get(name)}
    if is_ours and environ.get("LOG_LEVEL") == "DEBUG":  # torch reads _DEBUG when imported
        chosen |= {name: environ.get(name) or "INFO" for name in _DEBUG}
    return chosen


# --- nodes --------------------------------------------------------------------------------------


def _read_hosts_option(typed: Typed) -> Typed:
    """Return what was typed, with launch.sh's --hosts turned into the fields of other commands.

    Raises PlanError if --hosts is `job` outside a job, or if --via is unknown or without --hosts.
    """
    nodes = typed.hosts
    via = typed.via or "ssh"
    if via not in ("ssh", "pdsh") or (typed.via and nodes is None):
        raise PlanError(f"--via {via}: give ssh or pdsh, and the nodes with --hosts")
    if nodes is None:
        return typed

    if nodes != "job":
        if os.path.isfile(nodes):  # unlike Path.is_file, for a text of any length
            return replace(typed, fanout=via, hostfile=nodes)
        # In node[1,3], the comma separates no nodes.
        return replace(typed, fanout=via, node=re.split(r",(?![^\[]*\])", nodes))

    if typed.environ.get("SLURM_JOB_ID"):
        return replace(typed, fanout="srun")
    if pbs.read_lines(typed.environ):
        return replace(typed, fanout=via, nodefile=True)
    raise PlanError(
        "--hosts job: not inside a SLURM or PBS job (no SLURM_JOB_ID, no file at PBS_NODEFILE); "
        "name the nodes, or run this inside a job"
    )


def choose_fanout(typed: Typed) -> str:
    """Return how the nodes are reached: a module of launcher/fanout/, or `check`.

    `auto` depends on where this runs. If it becomes `local`, check_lone_node() may refuse or warn.
    """
    environ = typed.environ
    job_variable = "PBS_JOBID" if typed.nodefile else "SLURM_JOB_ID"
    if typed.batch_script and typed.is_dry_run and not environ.get(job_variable):  # outside a job
        return "job_command"
    if typed.fanout in ("local", "auto") and (typed.node or typed.hostfile):
        return "ssh"
    if typed.fanout != "auto":
        is_only_node = typed.nodefile and pbs.count_nodes(environ) == 1
        return "local" if is_only_node else typed.fanout  # some sites forbid ssh to one's own node

    if environ.get("SLURM_JOB_ID") and not in_slurm_step(environ):
        return "srun"
    if pbs.count_nodes(environ) > 1:
        return "ssh"
    check_lone_node(typed)
    return "local"


def check_lone_node(typed: Typed) -> None:
    """Raise PlanError if the step or job has several nodes: a launch on this node uses no others.

    Warn if the step has only a part of the job's nodes, or if this looks like a login node.
    """
    slurm.refuse_many_nodes(typed)
    slurm.warn_of_part(typed)
    if is_login_node(typed.environ):
        warn(
            f"{typed.program}: warning: this looks like a login node; "
            "get an allocation first (salloc, qsub -I)"
        )


def is_login_node(environ: Environ) -> bool:
    """Return whether a batch system answers here, and this process is in none of its jobs.

    Outside a job, waits up to LOGIN_NODE_S seconds each for sinfo and for qstat.
    """
    if job_id(environ):
        return False
    asked = (ask_scheduler(tool, limit_s=limits.LOGIN_NODE_S) for tool in ("sinfo", "qstat"))
    return any(answer is not None for answer in asked)


def read_world(typed: Typed, fanout: str) -> World:
    """Return the nodes of the run, from the arguments or from the scheduler.

    May ask the scheduler, print warnings and, for a launch by hand without a node rank, reserve
    node rank 0 on this machine. Raises PlanError, LauncherError or HostlistError if they are not
    valid.
    """
    environ = typed.environ
    if typed.nnodes is None:  # otherwise, each copy may be one node of the run
        mpi.refuse_copies(environ)
    nproc = read_nproc("the number of processes", _first(typed.nproc, environ, "NPROC_PER_NODE"))
    if fanout == "job_command":
        return hosts.read_batch_script(ROOT / typed.batch_script, nproc)
    if fanout == "srun":
        return slurm.read_job(environ, typed.typed[0], nproc)
    if fanout in ("ssh", "pdsh") or typed.nodefile:
        return _read_named(typed, nproc)

    if typed.fanout == "auto":  # such as run_ddp.sh, which uses what the job requested
        nproc = nproc or pbs.asked_ranks(environ)
    return replace(_read_own_node(typed), nproc=nproc)


def _first(given: str | None, environ: Environ, variable: str) -> str | None:
    """Return the argument if it was given, otherwise the variable; None if that is empty."""
    return given if given is not None else environ.get(variable) or None


def _read_named(typed: Typed, nproc: int | None) -> World:
    """Return the nodes that the user or PBS names one by one; the first has node rank 0.

    May ask PBS. Raises PlanError if there are no nodes, if they cannot be read, or if one is a path
    that does not exist: the user meant a file of nodes.
    """
    is_named = typed.node or typed.hostfile
    if typed.nodefile or (typed.fanout == "auto" and not is_named):
        nodes = pbs.read_nodefile(typed.environ, nproc)
    else:
        for word in typed.node:
            if "/" in word and not os.path.exists(word):
                raise PlanError(f"there is no file {word!r}; correct its path, or name nodes")
        more = hosts.read_hostfile(Path(typed.hostfile)) if typed.hostfile else ()
        nodes = hosts.read_nodes([*typed.node, *more], nproc)

    if not nodes:
        raise PlanError("no nodes; name them after NPROC, or in a file with -f")
    if len(nodes) == 1:  # no other node has to find the master
        return World(nproc=nodes[0].nproc, nodes=nodes)
    master = typed.environ.get("MASTER_ADDR") or nodes[0].host
    return World(len(nodes), master, nproc=nproc, nodes=nodes)


def _read_own_node(typed: Typed) -> World:
    """Return the world as this node sees it, if each node is started by srun or by hand.

    `nproc` is not set. Warns if a part of the job stays unused. Raises PlanError or LauncherError
    if the arguments or srun's variables are not valid or contradict each other. May reserve node
    rank 0 (see _read_node_by_hand).
    """
    slurm.refuse_many_tasks(typed.environ)
    # Other commands, and launch.sh --nnodes 1, do not take their place from srun's variables.
    may_be_task = typed.has_health_check or (typed.like_torchrun and typed.nnodes != "1")
    if may_be_task and (step := slurm.read_step(typed)):  # srun has started this on each node
        slurm.warn_of_part(typed, needs_srun=True)
        return step
    if typed.has_health_check:
        slurm.refuse_many_nodes(typed)
    return _read_node_by_hand(typed)


def _read_node_by_hand(typed: Typed) -> World:
    """Return the world of a node that was started by hand, as the arguments describe it.

    With node rank `auto`, a process at the master's address gets node rank 0 and reserves it on
    this machine (see claim_node_rank_0). Warns if a master is named for only one node. Raises
    PlanError if the arguments are not valid.
    """
    nnodes = "1" if typed.nnodes is None else typed.nnodes
    num_nodes = read_number("the number of nodes", nnodes, 1, 100_000)
    rank = "0" if typed.node_rank is None else typed.node_rank
    node_rank = -1 if rank == "auto" else read_number("the node rank", rank, 0, num_nodes - 1)
    if num_nodes == 1:
        _warn_of_master(typed)
        return World()

    master = typed.master or typed.environ.get("MASTER_ADDR")
    if not master:
        raise PlanError(f"{num_nodes} nodes, but no MASTER_ADDR; give the address of node rank 0")
    if rank == "auto" and claim_node_rank_0(master, _read_port(typed, is_by_hand=True) or 0):
        node_rank = 0  # the others get theirs in order of arrival
    return World(num_nodes, master, node_rank)


def _warn_of_master(typed: Typed) -> None:
    """Warn if torchrun's options name another machine as the master, but no second node."""
    if typed.like_torchrun and typed.master and not is_loopback(typed.master):
        warn(
            f"{typed.program}: warning: one node needs no master: {typed.master} is ignored; "
            "for more nodes, give --nnodes"
        )


def _read_port(typed: Typed, *, is_by_hand: bool) -> int | None:
    """Return the port of the rendezvous; None if node rank 0 may choose it. Raises PlanError.

    `is_by_hand`: each node is started separately, so that all must know the port beforehand.
    """
    text = _first(typed.port, typed.environ, "MASTER_PORT")
    if is_by_hand and in_slurm_step(typed.environ) and text in (None, "auto"):
        return port_from_id(job_run_id(typed.environ))  # only node rank 0 knows the run id
    text = text or (BY_HAND_PORT if is_by_hand else "auto")
    if text == "auto" or (typed.port == "0" and not is_by_hand):  # torchrun's 0: any free port
        return None
    return read_number("the port", text, *VARIABLES["MASTER_PORT"].bounds)


# --- the run ------------------------------------------------------------------------------------


def choose_run_id(typed: Typed, log_dir: Path, *, is_namer: bool) -> str:
    """Return RUN_ID; if it is unset, an id from --rdzv-id or the job, or a new one.

    Without RUN_ID, empty if `is_namer` is false: node rank 0 names the run. If another launch has
    the id of --rdzv-id or of the job, a number is appended; except in a dry run, this process
    reserves the result on this machine (see free_run_id). Warns if RUN_ID overrides --rdzv-id.
    Raises LauncherError if an id cannot name a folder, and OSError if a run.json is not readable.
    """
    environ = typed.environ
    run_id = environ.get("RUN_ID", "")
    given = plain_run_id(typed.run_id)
    if run_id:
        is_derived = f"{run_id}.".startswith(f"{given}.")  # GIVEN.1, from a resume line
        if given and not is_derived:
            warn(f"{typed.program}: warning: RUN_ID is {run_id}; --rdzv-id {given} is ignored")
        return check_run_id(run_id)
    if not is_namer:
        return ""

    name = given or job_run_id(environ)
    if not name:
        return new_run_id()  # its time and random digits need no reservation
    free = free_run_id(log_dir, name, environ, of_job=not given, is_dry_run=typed.is_dry_run)
    return check_run_id(free)
