"""What was typed, by name: launcher/cli/arguments.py reads it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class UsageError(ValueError):
    """The command line cannot mean anything: `cause; cure`."""


@dataclass(frozen=True)
class Typed:
    """One command line, with what follows from the name of its command."""

    fanout: str  # a module of launcher/fanout/, auto (what this place allows), or another task:
    # check (the config), submit, status, stop, stacks, help, version
    program: str = "start.py"  # the script
    directory: str = ""  # where it was typed, by the name that the shell has for it
    python: str = sys.executable
    typed: Sequence[str] = ()  # every word of the command line
    transcript: bool = False  # keep what the terminal shows
    config: str | None = None
    nproc: str | None = None
    cpu_nproc: int = 1  # where there is no GPU
    nnodes: str | None = None
    node_rank: str | None = None
    master: str | None = None
    port: str | None = None
    log_level: str | None = None
    show: str | None = None  # the ranks whose output is shown
    hostfile: str | None = None
    hosts: str | None = None  # of launch.sh: node names, a file of them, or job
    via: str | None = None  # how it reaches them
    run_id: str | None = None
    log_dir: str | None = None
    max_restarts: str | None = None
    engine: str | None = None
    module: str | None = None  # run in place of a training script
    batch_script: str | None = None  # of SLURM or PBS, as one submits it
    node: Sequence[str] = ()  # NODE, NODE:NPROC or a list
    setting: Sequence[str] = ()  # key=value
    activated: Sequence[str] = ()  # names of variables that the Python's environment has changed
    staged: str = ""  # the packed environment of `python`, which each node unpacks
    site: str = ""  # the file with the cluster's settings, and which variables it sets
    passed: Sequence[str] = ()  # options of the node agent
    like_torchrun: bool = False  # what followed is a script with its arguments
    as_module: bool = False  # it is a module
    as_command: bool = False  # it is any program
    default_config: bool = False  # train.py of this project may do without `config`
    nodefile: bool = False  # the nodes are those of the PBS job
    use_env: bool = False
    health_check: bool = False
    dry_run: bool = False
    strict: bool = False
    detach: bool = False
    wait: bool = False  # submit: for the job's end
    usage: str = ""  # of the script, in one line
    rest: Sequence[str] = ()  # what followed `--`

    @property
    def here(self) -> Path:
        return Path(self.directory or Path.cwd())
