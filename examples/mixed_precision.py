"""Mixed precision, accumulated gradients and an evaluation.

    RUN_ID=mine TRAIN_SCRIPT=examples/mixed_precision.py scripts/ssh/launch_singlenode.sh - 2

It saves after each epoch. However it ends, the same command resumes it."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset
from torch_launch_kit.distributed import torch as helper

STRATEGY, DTYPE = "ddp", "bfloat16"  # or "fsdp"; or "float16", which scales the loss
EPOCHS, ACCUMULATION, TESTS = 6, 4, 511
env, device = helper.init_distributed(), helper.device()
helper.seed_everything(0)  # the same data and weights on every rank
inputs = torch.randn(2047, 16)  # [sample, feature]
data = TensorDataset(inputs, (inputs[:, :4].sum(dim=1) > 0).long())
tests = helper.get_dataloader_for_distributed(Subset(data, range(TESTS)), 32, shuffle=False)
batches = helper.get_dataloader_for_distributed(Subset(data, range(TESTS, 2047)), 32, shuffle=True)
module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
model = helper.setup_distributed_models(module, strategy=STRATEGY)
optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=3e-3), helper.grad_scaler(DTYPE)
helper.seed_everything(0, env.rank)  # different dropout on every rank
folder = Path("checkpoints", env.run_id)
progress = helper.load(folder, model, optimizer, scaler=scaler) or {"step": 0}
batches.sampler.set_epoch(progress["step"])
for epoch in range(progress["step"], EPOCHS):
    for number, (x, y) in enumerate(batches):
        first = number - number % ACCUMULATION  # the first batch of this step
        count = min(ACCUMULATION, len(batches) - first)  # its batches: fewer at an epoch's end
        is_step = number == first + count - 1
        with helper.no_sync(model, enabled=not is_step):  # ranks exchange gradients once per step
            with helper.autocast(DTYPE):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            scaler.scale(loss / count).backward()
        if is_step:
            scaler.unscale_(optimizer)  # before clipping
            helper.clip_gradients(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad(), helper.autocast(DTYPE):
        right = [model(x.to(device)).argmax(dim=1) == y.to(device) for x, y in tests]
    model.train()
    accuracy = helper.gather(torch.cat(right), samples=TESTS).float().mean().item()
    helper.save(folder, epoch + 1, model, optimizer, scaler=scaler, accuracy=accuracy)
    helper.print_main(f"epoch {epoch + 1}  accuracy {accuracy:.4f}")
helper.finish()
