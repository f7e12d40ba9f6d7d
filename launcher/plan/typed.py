"""What was typed, by name: launcher/cli/arguments.py reads it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from launcher.text import Environ


def is_same(file: Path, other: Path) -> bool:
    """Return whether two paths lead to one file."""
    return file.exists() and other.exists() and file.samefile(other)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the plan takes unchanged from the command line."""

    program: str = "start.py"  # the script that was typed, for messages
    python: str = sys.executable  # of the nodes; in the container, where there is one
    activated: Sequence[str] = ()  # names of those that SITE, VENV, CONDA_ENV and MODULES changed
    site: str = ""  # the file with the cluster's settings, and which variables it sets
    passed: Sequence[str] = ()  # more options of the node agent, or of torch.distributed.launch
    cpu_nproc: int = 1  # ranks per node where `nproc` is None and there is no GPU
    is_dry_run: bool = False
    is_strict: bool = False
    is_detached: bool = False
    has_health_check: bool = False  # of this node's ranks together, after the preflight
    has_transcript: bool = False  # of what the terminal shows
    environ: Environ = field(default_factory=dict, repr=False)  # with which it was typed

    def choices(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(Choices)}


@dataclass(frozen=True)
class Typed(Choices):
    """One command line, with what follows from the name of its command."""

    fanout: str  # a module of launcher/fanout/, auto (what this place allows), or another task:
    # check (the config), submit, status, stop, stacks, help, version
    here: Path = field(default_factory=Path.cwd)  # where, by the name that the shell has for it
    typed: Sequence[str] = ()  # every word of the command line
    config: str | None = None
    nproc: str | None = None
    nnodes: str | None = None
    node_rank: str | None = None
    master: str | None = None
    port: str | None = None
    log_level: str = ""
    show: str | None = None  # the ranks whose output is shown
    hostfile: str = ""
    hosts: str | None = None  # of launch.sh: node names, a file of them, or job
    via: str = ""  # how it reaches them
    run_id: str = ""
    log_dir: str | None = None
    max_restarts: str | None = None
    engine: str = ""  # what starts the ranks in place of the node agent
    module: str = ""  # run in place of a training script
    batch_script: str = ""  # of SLURM or PBS, as one submits it
    node: Sequence[str] = ()  # NODE, NODE:NPROC or a list
    setting: Sequence[str] = ()  # key=value
    like_torchrun: bool = False  # what followed is a script with its arguments
    as_module: bool = False  # it is a module
    as_command: bool = False  # it is any program
    default_config: bool = False  # train.py of this project may do without `config`
    nodefile: bool = False  # the nodes are those of the PBS job
    wait: bool = False  # submit: for the job's end
    usage: str = ""  # of the script, in one line
    rest: Sequence[str] = ()  # what followed `--`
