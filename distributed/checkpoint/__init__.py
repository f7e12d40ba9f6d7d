"""Checkpoints: complete or absent on disk, verified when read, the same on every rank.

files.py describes the folder of a checkpoint; sharded.py describes what a sharded one adds to it.
"""

from .files import CheckpointError
from .loader import gather_ranks, load, rng_state, set_rng_state, weights_hash
from .saver import Saver, State

__all__ = (
    "CheckpointError",
    "Saver",
    "State",
    "gather_ranks",
    "load",
    "rng_state",
    "set_rng_state",
    "weights_hash",
)
