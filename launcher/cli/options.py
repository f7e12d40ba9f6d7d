"""Every command that launches: its arguments, and how it reaches the nodes.

Each script in scripts/ names a command in this table. Its options are in launcher/plan/settings.ini
and are read like torchrun's: in full or shortened, with `-` or `_`, as `--name value` or
`--name=value`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from launcher.cli.torchrun import read_like_torchrun
from launcher.plan.plan import ROOT
from launcher.plan.settings import TABLE
from launcher.plan.typed import Values
from launcher.text import Environ, PlanError, warn


class Option(NamedTuple):
    """Where an option's value goes. An option without a value is a flag."""

    field: str  # of Typed, or for `finish`; "passed": the option is passed on unchanged
    has_value: bool
    names_nodes: bool  # as --hosts does


@dataclass(frozen=True)
class Command:
    """What one command accepts, and what its name implies."""

    fanout: str  # as in Typed
    arguments: Sequence[str] = ()  # fields; the last may be `node`, which takes all remaining
    # words, or `program`, the training script, which gets all words after it
    fixed: Mapping[str, Any] = field(default_factory=dict)  # more fields of Typed
    finish: Callable[[Values, Environ], None] | None = None  # completes the values
    is_batch: bool = False  # a scheduler runs it


def options_of(command: str) -> dict[str, Option]:
    """Return the options that this command accepts, by name, without those that all accept.

    With "", return those that all commands accept.
    """
    options = {}
    for setting in TABLE.values():
        if command in setting.commands and setting.names[0].startswith("-"):
            # --name, --name= or --name=field
            for name, has_value, own in (word.partition("=") for word in setting.names):
                target = own or setting.field or name[2:].replace("-", "_")
                options[name] = Option(target, bool(has_value), name in setting.names_nodes)
    return options


# --- functions that complete the values ---------------------------------------------------------


def _complete_launch(values: Values, environ: Environ) -> None:
    """Complete the values of launch.sh as torchrun would: from variables, then from each other.

    For options that were not typed, reads PET_NNODES and similar variables. With --hosts, those
    that name nodes are ignored, with a warning. Raises PlanError if --hosts and another option both
    name the nodes, or if read_like_torchrun() rejects the values.
    """
    for name, option in options_of("launch").items():
        variable = f"PET_{name[2:].replace('-', '_').upper()}"
        value = environ.get(variable)
        if option.names_nodes and "hosts" in values:
            if values.get(option.field):
                raise PlanError(f"--hosts and {name} both name the nodes; omit one")
            if value:
                warn(
                    f"{values['program']}: warning: {variable} is ignored; --hosts names the nodes"
                )
        elif value and option.field != "passed":
            values.setdefault(option.field, value if option.has_value else value != "0")
    read_like_torchrun(values, environ)


def _refuse_without_master(values: Values, _environ: Environ) -> None:
    """Raise PlanError if the master was not typed: the argument before it is required, too."""
    if not values.get("master"):
        raise PlanError(f"too few arguments; usage: {values['usage']}")


def _replace_hydra_options(values: Values, environ: Environ) -> None:
    """Replace --config-path and --config-name by one config, or pass them to a Hydra script.

    Raises PlanError if --config is given, too, or if only one of the two is, unless the script uses
    Hydra, which has defaults for both.
    """
    folder = values.pop("config_path", "")
    name = values.pop("config_name", "")
    if not folder and not name:
        return

    if "config" in values:
        raise PlanError("--config, and --config-path or --config-name, name two configs; omit one")

    script = Path(environ.get("TRAIN_SCRIPT") or "-")
    if script.is_file() and re.search(rb"^@hydra\.main", script.read_bytes(), re.MULTILINE):
        given = {"--config-path": folder, "--config-name": name}
        words = [f"{option}={value}" for option, value in given.items() if value]
        values["rest"] = (*words, *values.get("rest", ()))
        values.setdefault("config", "-")
    elif folder and name:
        values["config"] = _join_config(script, folder, name)
    else:
        raise PlanError("--config-path and --config-name go together; give both, or --config FILE")


def _join_config(script: Path, folder: str, name: str) -> str:
    """Return the path of a config, whose name may lack its ending.

    Like Hydra, looks for a folder that does not exist here beside the script; our train.py is used
    if `script` is not a file.
    """
    beside = (script.parent if script.is_file() else ROOT) / folder
    is_beside = beside.is_dir() and not Path(folder).is_dir()
    ending = "" if name.endswith((".yaml", ".yml")) else ".yaml"
    return f"{beside if is_beside else folder}/{name}{ending}"


def _read_config_variable(values: Values, environ: Environ) -> None:
    """Use qsub's `-v CONFIG=FILE` if no config was typed: qsub passes no arguments to a script."""
    values.setdefault("config", environ.get("CONFIG") or None)


def _pass_to_test(values: Values, _environ: Environ) -> None:
    """Move the self-test's options to its own arguments, `rest`.

    Raises PlanError for a setting, or for a test that does not exist.
    """
    if settings := values.get("setting"):
        raise PlanError(f"{settings[0]!r}: settings have no effect here; omit them")
    test = values.pop("test", "")
    file = values.pop("json", "")
    if test not in ("", "basic", "all"):
        raise PlanError(f"--test is {test!r}; give basic or all")
    words = ["--test", test] if test else []
    # The self-test runs in the project's folder, and not where this was typed.
    words += ["--json", str(values["here"] / file)] if file else []
    values["rest"] = (*values.pop("passed", ()), *words, *values.get("rest", ()))


# --- the table ----------------------------------------------------------------------------------

TASKS = {  # instead of a run
    name: setting.task for setting in TABLE.values() if setting.task for name in setting.names
}
COMMON = {name: option for name, option in options_of("").items() if name not in TASKS}
_CONFIG = {"default_config": True}
_SELFTEST = {"module": "distributed.selftest", "cpu_nproc": 2}
_NODES = ("config", "nproc", "node")


def _slurm(name: str) -> Command:
    """Return the command of a batch script in scripts/slurm."""
    fixed = {**_CONFIG, "batch_script": f"scripts/slurm/{name}"}
    return Command("srun", ("config",), fixed=fixed, is_batch=True)


COMMANDS = {
    "launch": Command(
        "local",
        ("program",),
        {"like_torchrun": True, "batch_script": "scripts/launch.sh"},
        _complete_launch,
    ),
    "launch_singlenode": Command("local", ("config", "nproc")),
    "launch_torchrun_auto": Command("ssh", _NODES),
    "launch_torchrun_multinode": Command(
        "local",
        ("config", "nproc", "nnodes", "node_rank", "master", "port"),
        finish=_refuse_without_master,
    ),
    "launch_multinode": Command("ssh", _NODES, {"engine": "torch.distributed.launch"}),
    "launch_pdsh_multinode": Command("pdsh", _NODES),
    "run_ddp": Command("auto", (), _CONFIG, _replace_hydra_options),
    "cluster_train": Command(
        "local",
        ("config", "nnodes", "node_rank", "master", "port"),
        fixed={**_CONFIG, "has_health_check": True, "has_transcript": True},
    ),
    "slurm_train": _slurm("slurm_train.sh"),
    "slurm_train_single_node": _slurm("slurm_train_single_node.sh"),
    "submit_with_config": Command("submit", is_batch=True),
    "pbs_train": Command(
        "ssh",
        ("config",),
        fixed={**_CONFIG, "nodefile": True, "batch_script": "scripts/pbs/pbs_train.sh"},
        finish=_read_config_variable,
        is_batch=True,
    ),
    "test_distributed": Command("auto", ("nproc", "node"), _SELFTEST, _pass_to_test),
    "test_distributed_integration": Command("srun", fixed=_SELFTEST),
}
