"""The least that trains the built-in model with DDP: what `make bench-step` holds train.py against.

bench/step.py starts it and says how. Prints the seconds per step, from FROM_STEP on, on rank 0.
"""

import os
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from training.settings import load
from training.tasks.language_model import LanguageModelTask


def main() -> None:
    steps, from_step, batch_size = (
        int(os.environ[name]) for name in ("STEPS", "FROM_STEP", "BATCH")
    )
    settings = load(Path(os.environ["CONFIG"]))
    torch.distributed.init_process_group("gloo")
    task = LanguageModelTask(settings)
    text = torch.frombuffer(task.train.read(0, task.train.size), dtype=torch.uint8)
    context = task.train.context
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    began = 0.0
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - context - 1, (batch_size,)).tolist()
        batch = torch.stack([text[at : at + context + 1] for at in starts])
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == from_step:
            began = time.time()
    if torch.distributed.get_rank() == 0:
        print((time.time() - began) / (steps - from_step), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
