"""The least that trains the built-in model with DDP: what `make bench-step` holds train.py against.

    STEPS=120 BATCH=16 torchrun --nproc-per-node 2 bench/bare_loop.py

Prints the seconds per step, from step 20 to the last, on rank 0.
"""

import os
import time

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from training.settings import load
from training.tasks.language_model import LanguageModelTask

FROM_STEP = 20


def main() -> None:
    steps, batch_size = int(os.environ["STEPS"]), int(os.environ["BATCH"])
    settings = load(os.environ["CONFIG"])
    torch.distributed.init_process_group("gloo")
    task = LanguageModelTask(settings)
    text, context = task.train.bytes, task.train.context
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    began = 0.0
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - context - 1, (batch_size,)).tolist()
        batch = torch.stack([text[at : at + context + 1] for at in starts])
        task.loss(model, batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == FROM_STEP:
            began = time.time()
    if torch.distributed.get_rank() == 0:
        print((time.time() - began) / (steps - FROM_STEP), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
