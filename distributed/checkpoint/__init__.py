"""Checkpoints: complete or absent on disk, verified when read, the same on every rank.

files.py describes the folder of one, sharded.py what a sharded one has besides.
"""

from .files import CheckpointError as CheckpointError
from .loader import gather_ranks as gather_ranks
from .loader import load as load
from .loader import rng_state as rng_state
from .loader import set_rng_state as set_rng_state
from .loader import weights_hash as weights_hash
from .saver import Saver as Saver
from .saver import State as State
