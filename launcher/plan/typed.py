"""What was typed, as scripts/lib/launch.sh hands it over."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Typed:
    """What an entry script hands over: what was typed, by name."""

    fanout: str  # a module of launcher/fanout/, auto (what this place allows), or another task:
    # check (the config), submit, status, stop, stacks
    program: str = "start.py"  # the script
    directory: str = ""  # where it was typed, by the name that the shell has for it
    python: str = sys.executable
    typed: Sequence[str] = ()  # every word of the command line
    transcript: bool = False  # keep what the terminal shows
    config: str | None = None
    nproc: str | None = None
    cpu_nproc: str | None = None  # where there is no GPU
    nnodes: str | None = None
    node_rank: str | None = None
    master: str | None = None
    port: str | None = None
    log_level: str | None = None
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
    standalone: bool = False
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


def parse(arguments: Sequence[str]) -> Typed:
    """Read FANOUT [--name=value | --flag]... -- REST, as scripts/lib/launch.sh writes it.

    In a task of a job array, its number takes the place of {task} in settings.
    """
    end = arguments.index("--")
    values: dict[str, Any] = {"fanout": arguments[0], "rest": tuple(arguments[end + 1 :])}
    defaults = {field.name: field.default for field in fields(Typed)}
    for word in arguments[1:end]:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if defaults[name] == ():
            values[name] = (*values.get(name, ()), value)
        else:
            values[name] = value if equals else True
    if task := os.environ.get("SLURM_ARRAY_TASK_ID") or os.environ.get("PBS_ARRAY_INDEX"):
        filled = {word: word.replace("{task}", task) for word in values.get("setting", ())}
        values["setting"] = tuple(filled.values())
        values["typed"] = tuple(filled.get(word, word) for word in values.get("typed", ()))
    return Typed(**values)
