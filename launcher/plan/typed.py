"""What was typed, as named fields; launcher/cli/arguments.py parses it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from launcher.text import Environ

Words = Sequence[str]  # of a command line
Values = dict[str, Any]  # by the names of Typed's fields


def fields_of(kind: type[Any], value: object) -> Values:
    """Return those fields of `value` that the dataclass `kind` declares, by name."""
    return {field.name: getattr(value, field.name) for field in fields(kind)}


def is_same(file: Path, other: Path) -> bool:
    """Return whether two paths lead to the same file."""
    return file.exists() and other.exists() and file.samefile(other)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the plan takes unchanged from the command line."""

    program: str = "start.py"  # the script that was typed, for messages
    python: str = sys.executable  # of the nodes; inside the container, if there is one
    activated: Sequence[str] = ()  # variables that SITE, VENV, CONDA_ENV and MODULES changed
    site: str = ""  # the file with the cluster's settings, and which variables it sets
    passed: Words = ()  # more options of the node agent, or of torch.distributed.launch
    cpu_nproc: int = 1  # ranks per node if `nproc` is None and there is no GPU
    is_dry_run: bool = False
    is_strict: bool = False
    is_detached: bool = False
    has_health_check: bool = False  # test this node's ranks together after the preflight
    has_transcript: bool = False  # keep a copy of what the terminal shows
    environ: Environ = field(default_factory=dict, repr=False)  # the user's environment


@dataclass(frozen=True)
class Typed(Choices):
    """One command line, with what the name of its command implies."""

    fanout: str  # a module of launcher/fanout/, auto (depends on where it runs), or another task:
    # check (the config), submit, status, stop, stacks, help, version
    here: Path = field(default_factory=Path.cwd)  # where it was typed, as the shell names it
    typed: Words = ("start.py",)  # every word of the command line, the script's path first
    config: str | None = None
    nproc: str | None = None
    nnodes: str | None = None
    node_rank: str | None = None
    master: str | None = None
    port: str | None = None
    log_level: str = ""
    show: str | None = None  # the ranks whose output is shown
    hostfile: str = ""
    hosts: str | None = None  # of launch.sh: node names, a file that lists them, or job
    via: str = ""  # how launch.sh reaches these nodes
    run_id: str = ""
    log_dir: str | None = None
    max_restarts: str | None = None
    engine: str = ""  # what starts the ranks instead of the node agent
    module: str = ""  # run instead of a training script
    batch_script: str = ""  # of SLURM or PBS, as it is submitted
    node: Words = ()  # NODE, NODE:NPROC or a list
    setting: Words = ()  # key=value
    like_torchrun: bool = False  # `rest` is a script with its arguments
    as_module: bool = False  # the script is a module
    as_command: bool = False  # the script is any program
    default_config: bool = False  # `config` may be omitted
    nodefile: bool = False  # the nodes are those of the PBS job
    wait: bool = False  # submit: wait for the job's end
    usage: str = ""  # of the script, in one line
    rest: Words = ()  # the words after `--`
