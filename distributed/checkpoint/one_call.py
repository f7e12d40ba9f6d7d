"""Save or load everything that a training loop needs to continue, in one call each."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..collectives import barrier, own_rank
from ..errors import STOPPED, as_number
from ..exit import before_finish
from ..heartbeat import beat
from ..models import is_sharded, unwrap
from ..stop import restart_save_clock
from . import files, loader
from .saver import Saver, State, check_loadable

_SHARED = nn.Module, Optimizer  # all ranks have one state, or a part of it each
_savers = dict[Path, Saver]()
_log = logging.getLogger(__name__)


def save(
    folder: Path | str | Saver,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    keep_last: int = 2,
    in_memory: bool = False,
    **more: Any,
) -> None:
    """Copy what this loop needs to continue, and save it in the background.

    All ranks must call this. It waits for the previous save, and restarts the clock of each Stop's
    `save_seconds`. Only rank 0 writes, unless fsdp has sharded the model: then each rank writes its
    part, to a disk that all nodes share. Each rank's random state is saved too.

    `more` holds what else the loop needs: objects with a `state_dict`, to be given to `load` by the
    same names, and values that `load` returns, such as an epoch. Of a model or an optimizer, one
    state is saved; of any other object or value, that of each rank. Keeps the newest `keep_last`
    checkpoints and the one with the lowest `score` or, without scores, `validation_loss`; only the
    first call for a folder chooses `keep_last`. Call `finish` at the end.

    In place of the folder, a Saver chooses the format and `keep_last`; with "full", rank 0 writes a
    sharded model too. With `in_memory`, the copy is a snapshot in the node agent's memory, not a
    save; without a node agent, nothing is copied.

    Raises the errors of Saver, TypeError for a score or a validation loss that is no number,
    CheckpointError if the previous save failed, or if this state could not be loaded again, and
    ValueError for a snapshot of a model that is sharded other than by rows.
    """
    objects = {name: one for name, one in more.items() if hasattr(one, "state_dict")}
    progress = files.plain(
        {"step": step, **{n: one for n, one in more.items() if n not in objects}}
    )
    for name in {"score", "validation_loss"} & progress.keys():
        if name == "score" or progress[name] is not None:
            progress[name] = as_number(f"the {name}", progress[name])

    # Of a model or an optimizer, one state is saved; of any other object, that of each rank.
    shared = {n: _state_of(one) for n, one in objects.items() if isinstance(one, _SHARED)}
    own = {name: one.state_dict() for name, one in objects.items() if name not in shared}
    mine = {"rng": loader.rng_state(), "objects": own, "progress": progress}
    check_loadable({name: [one] for name, one in {**own, **progress}.items()})
    # For tools and people; JSON turns keys into text and tuples into lists, for example.
    in_json = json.loads(json.dumps(progress, default=repr, skipkeys=True))

    saver = folder if isinstance(folder, Saver) else _saver_of(Path(folder), keep_last, model)
    _savers[saver.folder] = saver  # complete() waits for it

    trees = _state_of(model), {**_state_of(optimizer), "objects": shared}
    if is_sharded(model) and saver.format == "full":
        from . import reshard

        trees = reshard.gather(trees)
    state = State(*trees, in_json, loader.gather_ranks(mine))
    if in_memory:
        saver.snapshot(step, state)
    else:
        saver.save(step, state)
        restart_save_clock()


def _saver_of(folder: Path, keep_last: int, model: nn.Module) -> Saver:
    """Return this process's Saver of a folder, or create one; then all ranks must call this."""
    if folder in _savers:
        return _savers[folder]

    return Saver(
        folder,
        keep_last=keep_last,
        enabled=own_rank() == 0,
        format="sharded" if is_sharded(model) else "full",
    )


def load(
    folder: Path | str | State,
    model: nn.Module,
    optimizer: Optimizer | None,
    **objects: Any,
) -> dict[str, Any] | None:
    """Load a run's newest intact checkpoint into the given objects. All ranks must call this.

    `folder` is the one given to `save`, a single checkpoint, or the State that
    `checkpoint.load(folder, whole=False)` has returned. Waits for a save in progress. Also restores
    this rank's random state. The number of ranks and the strategy may differ from those of the
    save; a rank that did not exist then keeps its random state, and gets rank 0's state of other
    objects.

    Rank 0 logs a warning for an object that is only in the checkpoint, or only among those given;
    it is not loaded. If the optimizer is None, there is no such warning.

    Returns the progress, with the step, or None if the folder holds no checkpoint yet. Raises
    CheckpointError if all are damaged, or if an object does not fit what was saved.
    """
    state = folder if isinstance(folder, State) else loader.load(folder, whole=False)
    if state is None:
        return None

    objects = {"model": model, "optimizer": optimizer, **objects}
    cause = "the checkpoint is from a different model, optimizer or other object"
    with files.as_checkpoint_error(f"{cause}; use those that it was saved with, or another RUN_ID"):
        return _restore(state, {name: one for name, one in objects.items() if one is not None})


def _restore(state: State, targets: dict[str, Any]) -> dict[str, Any]:
    """Load a state, whose tensors may not have been read yet, into objects; return its progress.

    Restores the random state too. Rank 0 logs a warning for each object that is not loaded.
    """
    # What was saved of each rank: a rank that did not exist then gets rank 0's objects.
    rank = own_rank()
    is_new = rank >= len(state.ranks)
    mine = state.ranks[0 if is_new else rank] if state.ranks else {}
    progress = {**mine.get("progress", state.progress)}
    own = mine.get("objects")
    if own is None:  # train.py 0.2.0 saved its objects beside the random state, and the scaler here
        own = {name: mine[name] for name in mine.keys() - {"rng"}}
        if "scaler" in progress:
            own["scaler"] = progress.pop("scaler")

    # What was saved once for all ranks.
    optimizer = {**state.optimizer}
    shared = optimizer.pop("objects", {})
    saved = {"model": state.model, "optimizer": optimizer, **shared}

    names = own.keys() | saved.keys()
    if rank == 0 and "optimizer" in targets:
        for name in sorted(names ^ targets.keys()):
            where = "only in the checkpoint" if name in names else "not in the checkpoint"
            _log.warning(f"load: {name} is {where}, so it is not loaded")

    # Read only what this rank needs of the tensors.
    scatter = is_sharded(targets["model"])
    parts = {n: _part_of(one, targets[n], scatter) for n, one in saved.items() if n in targets}
    weights = parts.pop("model")
    moments = parts.pop("optimizer", {})  # the other parts are those of `shared`
    found = state.fetch({"model": weights, "optimizer": {**moments, "objects": parts}})
    objects = found["optimizer"].pop("objects")

    for name, one in {**own, **objects, **found}.items():
        if name in targets and (one or name in saved):  # not of a scaler that does nothing
            _fill_target(targets[name], one)
    if "rng" in mine and not is_new:
        loader.set_rng_state(mine["rng"])
    progress["step"]  # raises if there is none: it is not from a training loop
    return progress


def _state_of(one: Any) -> dict[str, Any]:
    """Return what is saved of a model or an optimizer. All ranks must call this."""
    if isinstance(one, nn.Module):
        return {_plain_name(name): tensor for name, tensor in unwrap(one).state_dict().items()}
    if hasattr(one, "consolidate_state_dict"):  # ZeroRedundancyOptimizer: rank 0 collects the parts
        one.consolidate_state_dict()
        return one.state_dict() if own_rank() == 0 else {}
    return dict(one.state_dict())


def _part_of(state: dict[str, Any], target: Any, scatter: bool) -> dict[str, Any]:
    """Return what this rank reads of a saved state: all or, of a sharded target, its part."""
    if not scatter:
        return state
    from . import reshard

    if not isinstance(target, nn.Module):
        return reshard.scatter(state, target)
    parts = reshard.scatter_weights(_named_as_in(target, state), unwrap(target))
    return dict(zip(state, parts.values(), strict=True))


def _fill_target(target: Any, state: dict[str, Any]) -> None:
    """Load a state, of which this rank has read its part, into its object."""
    if isinstance(target, nn.Module):
        unwrap(target).load_state_dict(_named_as_in(target, state))
    else:
        target.load_state_dict(state)


def _named_as_in(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Return weights with the names that the model has for them, in the same order."""
    names = {_plain_name(name): name for name in unwrap(model).state_dict()}
    return {names.get(_plain_name(name), name): one for name, one in weights.items()}


def _plain_name(name: str) -> str:
    """Return a weight's name without what torch.compile adds.

    Earlier versions of `save` kept it, and also the `module.` of a compiled DDP.
    """
    return re.sub(r"^_orig_mod\.module\.|\b_orig_mod\.", "", name)


def complete(code: int) -> None:
    """Wait until this rank's saves are on disk or, if the run ends well, until all ranks' are.

    Raises CheckpointError if a save fails.
    """
    for saver in _savers.values():
        saver.wait()
        if code in (0, STOPPED):
            barrier()  # no rank exits while another is still saving
            beat(saved=saver.last_step)


before_finish.insert(0, complete)
