"""A DDP loop that saves when it is stopped, and resumes where it stopped.

    RUN_ID=mine TRAIN_SCRIPT=examples/resumable.py scripts/ssh/launch_singlenode.sh - 2

Stop it with Ctrl-C, then run the same command again. With `-- 5000`, it trains for 5,000 steps.
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch_launch_kit.distributed import torch as helper

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
SAVE_EVERY = 1000

env = helper.init_distributed()
helper.seed_everything(0)  # the same weights on every rank
model = helper.setup_distributed_models(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
helper.seed_everything(0, env.rank)  # different data on every rank

folder, stop, step = Path("checkpoints", env.run_id), helper.Stop(), 0
if progress := helper.load(folder, model, optimizer):
    step = progress["step"]
while step < STEPS and not stop.agreed():
    inputs = torch.randn(32, 8, device=helper.device())
    loss = mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    stop.ask()  # the ranks agree while they compute
    loss.backward()
    optimizer.step()
    step += 1
    helper.beat(step)  # a rank that stops calling this is reported as stuck
    if step % 100 == 0:
        helper.print_main(f"step {step}  loss {loss.item():.6f}")
    if step % SAVE_EVERY == 0 or step == STEPS or stop.agreed():
        helper.save(folder, step, model, optimizer)
helper.finish(0 if step >= STEPS else helper.STOPPED)  # once the last save is on the disk
