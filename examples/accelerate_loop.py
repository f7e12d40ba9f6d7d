"""A loop with Hugging Face's accelerate; nothing in it is ours.

pip install accelerate
scripts/launch.sh --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    arguments = parser.parse_args()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
    )
    set_seed(42)
    data = TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 8, True))
    for epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.gather(loss.detach().reshape(1)).mean()
        accelerator.print(f"epoch {epoch}: loss {mean:.5f}")
    accelerator.wait_for_everyone()
    print(f"process {accelerator.process_index} of {accelerator.num_processes}")
    accelerator.save_state("state")
    accelerator.end_training()


if __name__ == "__main__":
    main()
