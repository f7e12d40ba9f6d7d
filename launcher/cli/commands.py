"""Every command that launches: its arguments, its options, and how it reaches the nodes.

A script of scripts/ names its command here. Options are read as torchrun's are: in full or
shortened, with `-` or `_`, as `--name value` or `--name=value`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from launcher.cli.torchrun import read_like_torchrun
from launcher.plan.typed import UsageError

Values = dict[str, Any]  # by the names of Typed's fields


class Option(NamedTuple):
    """Where its value goes; without one, it is a flag."""

    field: str  # of Typed, or what `finish` takes; "passed": the option goes on as it is
    has_value: bool = True


@dataclass(frozen=True)
class Command:
    """What one command accepts, and what follows from its name alone."""

    fanout: str  # as Typed has it
    arguments: Sequence[str] = ()  # fields; the last may be `node`, which takes all that is left,
    # or `program`: the training script, after which everything is its own
    options: Mapping[str, Option] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # more fields of Typed
    finish: Callable[[Values, Mapping[str, str]], None] | None = None  # from what was typed
    prefix: str = ""  # of variables with the values of options that were not typed
    is_batch: bool = False  # a scheduler holds its runs


def _passed(names: str, *, has_value: bool = True) -> dict[str, Option]:
    return {name: Option("passed", has_value) for name in names.split()}


# --- what a command makes of its own arguments --------------------------------------------------


def _need_master(values: Values, _environ: Mapping[str, str]) -> None:
    if not values.get("master"):
        raise UsageError(f"too few arguments; usage: {values['usage']}")


def _join_config(values: Values, environ: Mapping[str, str]) -> None:
    """Make one config of --config-path and --config-name, or pass both to a script of Hydra's."""
    folder, name = values.pop("config_path", ""), values.pop("config_name", "")
    if not folder and not name:
        return
    script = Path(environ.get("TRAIN_SCRIPT") or "-")
    if script.is_file() and re.search(rb"^@hydra\.main", script.read_bytes(), re.MULTILINE):
        given = {"--config-path": folder, "--config-name": name}
        words = [f"{option}={value}" for option, value in given.items() if value]
        values["rest"] = (*words, *values.get("rest", ()))
        values.setdefault("config", "-")
    elif folder and name:
        values["config"] = f"{folder}/{name.removesuffix('.yaml')}.yaml"
    else:
        raise UsageError("--config-path and --config-name go together; give both, or --config FILE")


def _take_config(values: Values, environ: Mapping[str, str]) -> None:
    if environ.get("CONFIG"):  # of qsub -v
        values.setdefault("config", environ["CONFIG"])


def _pass_to_test(values: Values, _environ: Mapping[str, str]) -> None:
    """Put the self-test's own options after its name. It runs in the project's folder."""
    if settings := values.get("setting"):
        raise UsageError(f"settings mean nothing here ({settings[0]!r}); leave them out")
    test, file = values.pop("test", ""), values.pop("json", "")
    if test not in ("", "basic", "all"):
        raise UsageError(f"--test is {test!r}; give basic or all")
    words = ["--test", test] if test else []
    words += ["--json", str(Path(values["directory"], file))] if file else []
    values["rest"] = (*values.pop("passed", ()), *words, *values.get("rest", ()))


# --- the table ----------------------------------------------------------------------------------

COMMON = {
    "--dry-run": Option("dry_run", has_value=False),
    "--strict": Option("strict", has_value=False),
    "--detach": Option("detach", has_value=False),
    "--show": Option("show"),
}
TASKS = {  # in place of a run
    **{"-h": "help", "--help": "help", "--version": "version"},
    **{"--status": "status", "--stop": "stop", "--stacks": "stacks"},
}
_CONFIG = {"default_config": True}
_SELFTEST = {"module": "distributed.selftest", "cpu_nproc": 2}
_NODES = ("config", "nproc", "node")
_HOSTFILE = {"-f": Option("hostfile")}
_TORCHRUN = {
    "--nproc-per-node": Option("nproc"),
    "--nnodes": Option("nnodes"),
    "--node-rank": Option("node_rank"),
    "--master-addr": Option("master"),
    "--master-port": Option("port"),
    "--standalone": Option("standalone", has_value=False),
    "--rdzv-backend": Option("rdzv_backend"),
    "--rdzv-endpoint": Option("rdzv_endpoint"),
    "--rdzv-id": Option("run_id"),
    "--max-restarts": Option("max_restarts"),
    "--log-dir": Option("log_dir"),
    "--hosts": Option("hosts"),
    "--via": Option("via"),
    "-m": Option("as_module", has_value=False),
    "--module": Option("as_module", has_value=False),
    "--no-python": Option("as_command", has_value=False),
    **_passed(
        "--rdzv-conf --monitor-interval --start-method --event-log-handler --role -r --redirects"
        " -t --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters"
        " --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout"
    ),
    **_passed("--run-path --virtual-local-rank", has_value=False),
}
_RUN_DDP = {
    **{"-n": Option("nproc"), "--num-gpus": Option("nproc")},
    **{"-c": Option("config"), "--config": Option("config")},
    **{"--config-path": Option("config_path"), "--config-name": Option("config_name")},
    **{"-l": Option("log_level"), "--log-level": Option("log_level")},
}
_SBATCH = _passed(
    "--begin --comment --constraint --deadline --exclude --licenses --mail-type --mail-user"
    " --reservation --switches --tmp --wckey"
)


def _slurm(name: str) -> Command:
    fixed = {**_CONFIG, "batch_script": f"scripts/slurm/{name}"}
    return Command("srun", ("config",), fixed=fixed, is_batch=True)


COMMANDS = {
    "launch": Command(
        "local",
        ("program",),
        _TORCHRUN,
        {"like_torchrun": True, "batch_script": "scripts/launch.sh"},
        read_like_torchrun,
        prefix="PET_",
    ),
    "launch_singlenode": Command("local", ("config", "nproc")),
    "launch_torchrun_auto": Command("ssh", _NODES, _HOSTFILE),
    "launch_torchrun_multinode": Command(
        "local",
        ("config", "nproc", "nnodes", "node_rank", "master", "port"),
        finish=_need_master,
    ),
    "launch_multinode": Command(
        "ssh",
        _NODES,
        {**_HOSTFILE, "--use-env": Option("use_env", has_value=False)},
        {"engine": "torch.distributed.launch"},
    ),
    "launch_pdsh_multinode": Command("pdsh", _NODES, _HOSTFILE),
    "run_ddp": Command("auto", (), _RUN_DDP, _CONFIG, _join_config),
    "cluster_train": Command(
        "local",
        ("config", "nnodes", "node_rank", "master", "port"),
        fixed={**_CONFIG, "health_check": True, "transcript": True},
    ),
    "slurm_train": _slurm("slurm_train.sh"),
    "slurm_train_single_node": _slurm("slurm_train_single_node.sh"),
    "submit_with_config": Command(
        "submit", (), {"--wait": Option("wait", has_value=False), **_SBATCH}, is_batch=True
    ),
    "pbs_train": Command(
        "ssh",
        ("config",),
        fixed={**_CONFIG, "nodefile": True, "batch_script": "scripts/pbs/pbs_train.sh"},
        finish=_take_config,
        is_batch=True,
    ),
    "test_distributed": Command(
        "auto",
        ("nproc", "node"),
        {
            **_HOSTFILE,
            **_passed("--quick", has_value=False),
            **{"--test": Option("test"), "--json": Option("json")},
        },
        _SELFTEST,
        _pass_to_test,
    ),
    "test_distributed_integration": Command("srun", fixed=_SELFTEST),
}
