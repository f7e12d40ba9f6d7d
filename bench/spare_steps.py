"""Small steps of DDP that go on from what is saved, for spares.py: spare_steps.py FOLDER.

Rank 0 saves every 50 steps, and takes a snapshot every 5, which only a node agent can keep.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from distributed.checkpoint import Saver, State, load

PACE_S = 0.03  # of a step, at least
dist.init_process_group("gloo")
folder, is_main = Path(sys.argv[1]), dist.get_rank() == 0
model = DistributedDataParallel(torch.nn.Linear(1000, 1000))
optimizer = torch.optim.AdamW(model.parameters())
saver = Saver(folder / "checkpoints", keep_last=2, enabled=is_main)
state, step = load(folder / "checkpoints"), 0
if state is not None:
    step = state.progress["step"]
    model.module.load_state_dict(state.model)
    optimizer.load_state_dict(state.optimizer)
    if is_main:
        print("resumed after step", step, flush=True)
while True:
    step += 1
    time.sleep(PACE_S)
    model(torch.ones(8, 1000)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_main:
        with (folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time()}) + "\n")
        now = State(model.module.state_dict(), optimizer.state_dict(), {"step": step}, [])
        if step % 5 == 0:
            saver.snapshot(step, now)
        if step % 50 == 0:
            saver.save(step, now)
