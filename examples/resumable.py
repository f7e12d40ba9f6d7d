"""A DDP loop that saves when it is stopped, and resumes where it stopped.

    RUN_ID=mine TRAIN_SCRIPT=examples/resumable.py scripts/ssh/launch_singlenode.sh - 2

Stop it with Ctrl-C, and type the same line again. After `-- 5000` it trains for 5,000 steps.
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

# Not needed where the project is installed: from torch_launch_kit.distributed import ...
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distributed import torch as helper
from distributed.checkpoint import Saver, State, gather_ranks, load, rng_state, set_rng_state
from distributed.errors import STOPPED
from distributed.stop import Stop

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
SAVE_EVERY = 1000

env = helper.init_distributed()
helper.seed_everything(0)  # the same weights on every rank
model = helper.setup_distributed_models(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
helper.seed_everything(0, env.rank)  # different data on every rank

folder = Path("checkpoints", env.run_id)
saver, stop, step = Saver(folder, keep_last=2, enabled=env.is_main), Stop(), 0
if saved := load(folder):  # on every rank; rank 0 alone reads
    helper.unwrap(model).load_state_dict(saved.model)
    optimizer.load_state_dict(saved.optimizer)
    set_rng_state(saved.ranks[env.rank]["rng"])
    step = saved.progress["step"]

while step < STEPS and not stop.agreed():
    inputs = torch.randn(32, 8, device=helper.device())
    loss = mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    stop.ask()  # the ranks agree while they compute
    loss.backward()
    optimizer.step()
    step += 1
    helper.beat(step)  # a rank that no longer does this is found and named
    if env.is_main and step % 100 == 0:
        print(f"step {step}  loss {loss.item():.6f}")
    if step % SAVE_EVERY == 0 or step == STEPS or stop.agreed():
        ranks = gather_ranks({"rng": rng_state()})
        weights, moments = helper.unwrap(model).state_dict(), optimizer.state_dict()
        saver.save(step, State(weights, moments, {"step": step}, ranks))
saver.wait()
helper.barrier()  # no rank leaves while another still saves
helper.beat(saved=step)  # now code 75 means: saved, resume it
helper.finish(0 if step == STEPS else STOPPED)
