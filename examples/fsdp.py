"""A model sharded with FSDP: each rank holds and saves a part of it.

    RUN_ID=mine TRAIN_SCRIPT=examples/fsdp.py scripts/ssh/launch_singlenode.sh - 2

Stop it with Ctrl-C, then run the same command again. With `-- 500`, it trains for 500 steps.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_launch_kit.distributed import torch as helper

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
LETTERS, WIDTH, LAYERS, CONTEXT = 32, 32, 3, 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH)
        self.blocks = nn.ModuleList(  # each is gathered when it is used
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:  # [batch, position]
        hidden = self.embedding(letters)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).float()  # [batch, position, letter]


env = helper.init_distributed()
helper.seed_everything(0)
sharding = helper.Sharding(dtype="bfloat16")  # to compute in; the weights stay float32
model = helper.setup_distributed_models(Model(), strategy="fsdp", sharding=sharding)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
helper.seed_everything(0, env.rank)  # different data and dropout on every rank

folder, stop = Path("checkpoints", env.run_id), helper.Stop()
step = (helper.load(folder, model, optimizer) or {"step": 0})["step"]
while step < STEPS and not stop.agreed():
    first = torch.randint(LETTERS, (8, 1), device=helper.device())
    letters = (first + torch.arange(CONTEXT + 1, device=helper.device())) % LETTERS
    scores = model(letters[:, :-1])
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), letters[:, 1:].flatten())
    stop.ask()
    loss.backward()
    norm = helper.clip_gradients(model, 1.0)  # over all ranks' parts
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 100 == 0:
        helper.print_main(f"step {step}  loss {loss.item():.4f}  gradient {norm.item():.2f}")
    if step % 500 == 0 or step == STEPS or stop.agreed():
        helper.save(folder, step, model, optimizer)
helper.finish(0 if step >= STEPS else helper.STOPPED)
