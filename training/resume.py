"""Resuming a run: its checkpoint, its settings before and now, and the command that resumes it."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from distributed import checkpoint
from distributed.checkpoint.files import steps
from distributed.environment import Environment
from training.asked import warn_unread
from training.config_file import SettingsError, Tree
from training.progress import may_be_lost
from training.settings import Settings, Train

_log = logging.getLogger(__name__)


def load_checkpoint(resume: str, folder: Path, *, is_restart: bool) -> checkpoint.State | None:
    """Return the run's newest checkpoint or, without one, that at `resume: PATH`; None without any.

    `resume: never` applies to the first start of a run, not to its restarts after a failure. The
    tensors of a sharded checkpoint are not read yet. Rank 0 logs damaged checkpoints, and renames
    those of this run. All ranks must call this. Raises SettingsError if there is a checkpoint in
    spite of `never`, or none at PATH, or one of another script, and CheckpointError if all are
    damaged.
    """
    if resume == "never" and not is_restart:
        if steps(folder):
            raise SettingsError(f"resume: never, but {folder} holds checkpoints; use a new RUN_ID")
        return None

    state = checkpoint.load(folder, whole=False)
    if state is None and resume not in ("auto", "never"):
        state = checkpoint.load(Path(os.path.expanduser(resume)), whole=False)
        if state is None:
            raise SettingsError(f"resume: {resume} holds no checkpoint; correct the path")
    if state is not None and "settings" not in state.progress:
        raise SettingsError(
            "resume: the checkpoint is another script's; use another RUN_ID or path"
        )
    return state


def choose_batch_size(train: Train, world_size: int, saved: checkpoint.State | None) -> int:
    """Return the size of one process's micro-batch; log a global batch that had to be rounded.

    A resumed run uses the config's global_batch_size. With batch_size, it keeps its global batch,
    on any number of processes, until that setting or grad_accumulation changes. A global batch that
    is not divisible is rounded, except in a run that keeps it, or that resumes on another number of
    processes: then it raises SettingsError.
    """
    each = train.batch_size_on(world_size)
    shares = world_size * train.grad_accumulation
    exact: int | None = None  # the global batch that the run must keep; any other is rounded
    if saved and train.batch_size:
        now = {"batch_size": train.batch_size, "grad_accumulation": train.grad_accumulation}
        if now.items() <= saved.progress["settings"]["train"].items():
            exact = saved.progress["global_batch_size"]
    elif saved and len(saved.ranks) != world_size:  # on as many ranks, it is rounded as before
        exact = train.global_batch_size

    samples = exact or train.global_batch_size or each * shares
    if samples % shares:
        cause = f"{samples} samples are not divisible by {shares} (ranks x grad_accumulation)"
        if exact:
            raise SettingsError(
                f"resume: the run's {cause}; resume it with a different number of processes"
            )
        _log.info(f"batch      {each * shares} samples a step: {cause}")
    return exact // shares if exact else each


def log_resume(saved: checkpoint.State, progress: Tree, world_size: int) -> None:
    """Log the step that the run resumes after, and a warning for each change since then.

    `progress` is that of the resumed run; the changes are in settings, sizes and ranks.
    """
    source = ", from memory" if saved.is_snapshot else ""
    _log.info(f"resumed    after step {saved.progress['step']}{source}")

    now: Tree = progress["settings"]
    changes = [*_changed_settings(saved.progress["settings"], now)]
    before = saved.progress["global_batch_size"]
    samples = progress["global_batch_size"]
    if samples != before:
        changes.append(f"batches of {samples} samples (was {before})")
    sizes = progress["sizes"]
    old_sizes = saved.progress.get("sizes") or sizes  # older checkpoints have none
    for new, old, name in zip(sizes, old_sizes, ("validation", "training"), strict=False):
        if new != old:
            changes.append(f"{new} {name} samples (was {old})")
    if world_size != len(saved.ranks):
        count = f"{world_size} {'process' if world_size == 1 else 'processes'}"
        changes.append(f"{count} (was {len(saved.ranks)}): sums are rounded differently")

    for change in changes:
        _log.warning(f"resumed    with {change}")


def _changed_settings(before: Tree, now: Tree, prefix: str = "") -> Iterator[str]:
    """Yield each setting that differs, such as `seed 2 (was 1)`, apart from `resume`."""
    for key in {**now, **before}:
        old = before.get(key)
        new = now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changed_settings(old, new, f"{prefix}{key}.")
        elif old != new and key != "resume":
            yield f"{prefix}{key} {json.dumps(new)} (was {json.dumps(old)})"


def write_config(settings: Settings, folder: Path) -> None:
    """Write all settings of the run into config.yaml, which train.py accepts as a config.

    Warns about those that the task has not read.
    """
    warn_unread(settings.model, settings.task)
    text = yaml.safe_dump(settings.as_tree(), sort_keys=False)
    with may_be_lost(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(f"# All settings of this run's latest start.\n{text}")


def resume_line(environment: Environment, command: str | None) -> str:
    """Return the command that resumes this run, with its label.

    `command` is the launcher's: None without ours, and "" if no command resumes the run; then the
    result is "".
    """
    if command is None:
        dropped = "--local-rank", "--local_rank", "resume=never"
        words = [word for word in sys.argv if not word.startswith(dropped)]
        command = shlex.join([*_launch_words(environment), *words])
    return command and f"resume     RUN_ID={shlex.quote(environment.run_id)} {command}"


def _launch_words(environment: Environment) -> list[str]:
    """Return the words before the script that start as many ranks.

    Those of srun and python are for one command, those of torchrun for one command on each node.
    """
    if environment.launcher == "slurm":
        return [
            "srun",
            f"--nodes={environment.num_nodes}",
            f"--ntasks={environment.world_size}",
            "python",
        ]
    if environment.launcher != "torchrun":
        return ["python"]
    words = ["torchrun", f"--nproc-per-node={environment.local_world_size}"]
    if environment.num_nodes > 1:
        words += [
            f"--nnodes={environment.num_nodes}",
            f"--node-rank={environment.node_rank}",
            f"--master-addr={environment.master_addr}",
        ]
    return words
