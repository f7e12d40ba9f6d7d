"""Save or load everything that a training loop needs to continue, in one call each."""

from __future__ import annotations

import atexit
import json
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..collectives import barrier, own_rank
from ..errors import STOPPED
from ..heartbeat import beat
from ..models import is_sharded, unwrap
from ..stop import note_save
from . import loader
from .saver import Saver, State


@cache
def _savers() -> dict[Path, Saver]:
    return {}


def save(
    folder: Path | str,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: GradScaler | None = None,
    keep_last: int = 2,
    **progress: Any,
) -> None:
    """Copy what this loop needs to continue, and save it in the background.

    All ranks must call this. Only rank 0 writes, unless fsdp has sharded the model: then each rank
    writes its part, to a disk that all nodes share. Each rank's random state is saved too, and so
    is `progress`: any values that JSON can hold. Keeps the newest `keep_last` checkpoints and, if
    `progress` has a `score`, the one with the lowest. Call `finish` at the end. Raises the errors
    of Saver, TypeError if `progress` is not JSON, and CheckpointError if the previous save failed.
    """
    told = {"step": step, **progress, "scaler": scaler.state_dict() if scaler else {}}
    json.dumps(told)
    _check_keys(told)
    savers, folder = _savers(), Path(folder)
    if folder not in savers:
        format = ("full", "sharded")[is_sharded(model)]
        savers[folder] = Saver(folder, keep_last=keep_last, enabled=own_rank() == 0, format=format)
        atexit.register(savers[folder].wait)  # for a script that does not call finish
    ranks = loader.gather_ranks({"rng": loader.rng_state()})
    state = State(unwrap(model).state_dict(), optimizer.state_dict(), told, ranks)
    savers[folder].save(step, state)
    note_save()


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        if other := [key for key in value if not isinstance(key, str)]:
            cause = f"progress has the key {other[0]!r}, which JSON would turn into text"
            raise TypeError(f"{cause}; use text (of MultiStepLR, save last_epoch)")
        value = [*value.values()]
    for one in value if isinstance(value, list | tuple) else ():
        _check_keys(one)


def load(
    folder: Path | str, model: nn.Module, optimizer: Optimizer, *, scaler: GradScaler | None = None
) -> dict[str, Any] | None:
    """Load into the given objects what `save` saved last. All ranks must call this.

    The number of ranks and the strategy may differ from those of the save; a rank that did not
    exist then keeps its random state. Returns the progress, with the step, or None if the folder
    holds no checkpoint yet. Raises CheckpointError if all are damaged.
    """
    state = loader.load(folder, whole=False)
    if state is None:
        return None
    module, weights, moments = unwrap(model), state.model, state.optimizer
    if is_sharded(model):
        from .. import fsdp

        weights = fsdp.scatter_weights(weights, module)
        moments = fsdp.scatter(moments, optimizer)
    found = state.fetch({"model": weights, "optimizer": moments})
    module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    progress = dict(state.progress)
    scale = progress.pop("scaler", {})
    if scaler and scale:  # empty if saved without a scaler
        scaler.load_state_dict(scale)
    if own_rank() < len(state.ranks):
        loader.set_rng_state(state.ranks[own_rank()]["rng"])
    return progress


def complete(code: int) -> None:
    """Wait until this rank's saves are on disk or, if the run ends well, until all ranks' are."""
    for saver in _savers().values():
        saver.wait()
        if code in (0, STOPPED):
            barrier()  # no rank exits while another is still saving
            beat(saved=saver.last_step)
