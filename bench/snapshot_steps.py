"""train.py with snapshots only in every second block of BLOCK steps, for snapshots.py.

The two kinds of steps are compared within one run, because two runs differ by more than a snapshot
costs. Rank 0 writes the time when each block began to BLOCKS_FILE, in seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from distributed.torch import finish
from training.arguments import read_command_line

BLOCK = int(os.environ["BLOCK"])
began: list[float] = []


class Run(train.Run):
    """A run that omits the snapshots of even blocks; a block begins before its first snapshot."""

    def save(self, step: int, scores: Mapping[str, Any], *, in_memory: bool = False) -> None:
        if in_memory and step % BLOCK == 0:
            began.append(time.perf_counter())
        if not in_memory or step // BLOCK % 2:
            super().save(step, scores, in_memory=in_memory)


train.Run = Run  # type: ignore[misc]
code = train.train(*read_command_line(__doc__))
if os.environ["RANK"] == "0":
    Path(os.environ["BLOCKS_FILE"]).write_text(json.dumps(began))
finish(code)
