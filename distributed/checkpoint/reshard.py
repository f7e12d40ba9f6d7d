"""Full states from the shards of fsdp, and shards from full states.

DTensor is slow to import, so import this module only for a sharded model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives import own_rank
from ..torch_internals import import_dtensor, tree_map_only

dtensor = import_dtensor()


def gather(state: Any) -> Any:
    """Return a state_dict() with full tensors in place of DTensors.

    They are on rank 0's CPU; on other ranks, they are empty. All ranks must call this.
    """
    keep = Tensor.cpu if own_rank() == 0 else lambda whole: whole.new_empty(0)
    return tree_map_only(dtensor.DTensor, lambda tensor: keep(tensor.full_tensor()), state)


def scatter(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's full state_dict() with its tensors replaced by this rank's shards.

    Meta tensors become shards on the meta device, whose content can then be read. All ranks must
    call this.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    parts = {
        index: {name: _shard_like(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": parts}


def scatter_weights(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Do the same as `scatter` for a model's full state_dict()."""
    own = model.state_dict()
    return {name: _shard_like(value, own.get(name)) for name, value in weights.items()}


def _shard_like(value: Any, like: Any) -> Any:
    """Return this rank's shard of a full value; the value itself if it is not to be sharded."""
    is_sharded = isinstance(like, dtensor.DTensor) and isinstance(value, Tensor)
    if not is_sharded or not value.dim():  # such as an optimizer's count of steps
        return value
    whole = value if value.is_meta else value.to(like.device)
    return dtensor.distribute_tensor(whole, like.device_mesh, like.placements)
