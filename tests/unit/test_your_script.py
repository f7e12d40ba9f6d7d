"""The Python blocks of docs/your-script.md run as they stand, in the reader's own folder.

page_loop.py runs the first block with the loop of "Stop, save and resume".
"""

import re
from pathlib import Path

import pytest
from agents import ROOT, execute, written

PAGE = (ROOT / "docs/your-script.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
# What the blocks leave to the reader's script.
OWN = """
import sys
from itertools import chain, repeat
from pathlib import Path
import torch

STEPS = 6
dataset = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 99 * 8).view(99, 8))

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))

def loss_of(model, batch):
    return model(batch[0]).square().mean()
"""
IN_A_STEP = """
from torch_launch_kit.distributed.torch import (
    autocast, broadcast, clip_gradients, gather, grad_scaler, main_first, no_sync,
)

def download(folder):
    Path(folder).mkdir(exist_ok=True)
    return folder

loss = torch.tensor(0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = grad_scaler("bfloat16")
ordered = get_dataloader_for_distributed(dataset, batch_size=32, shuffle=False)
parts = [batch[0] for batch in ordered]
batches = [*loader]
for batch in batches:
    is_last = batch is batches[-1]
"""
AFTERWARDS = """
assert limits == {"lr": 3e-4, "steps": 900} and data == "data"
assert torch.equal(predictions, dataset.tensors[0])
print_main(f"norm {norm:.3f}")
"""
BEFORE_A_SCHEDULE = """
folder = Path("checkpoints", env.run_id)
batches = chain.from_iterable(repeat(loader))
"""


def run_on_two_ranks(folder: Path, text: str) -> str:
    """Run a program on two ranks. Returns what it printed."""
    script = written(folder / "mine.py", text)
    words = (ROOT / "scripts/launch.sh", "--nproc-per-node=2", script.name)
    return execute(folder, *words, CUDA_VISIBLE_DEVICES="", RUN_ID="mine").stdout


def test_the_page_has_these_blocks_and_no_others() -> None:
    begins = [block.partition("\n")[0] for block in BLOCKS]
    assert len(begins) == 4
    assert begins[1].startswith("with no_sync(model")
    assert begins[3] == "from torch.optim.lr_scheduler import MultiStepLR"


@pytest.mark.slow
def test_the_calls_and_the_step_of_several_batches_run(tmp_path: Path) -> None:
    calls = f"{OWN}loss = 0.5\n{BLOCKS[0]}"
    step, after = BLOCKS[1].split("scaler.unscale_", 1)
    indented = "".join(f"    {line}" for line in step.splitlines(keepends=True))
    shown = run_on_two_ranks(
        tmp_path, f"{calls}{IN_A_STEP}{indented}\nscaler.unscale_{after}{AFTERWARDS}"
    )
    assert shown.startswith("{'loss': 0.5}\n")
    assert re.search(r"^norm \d+\.\d+$", shown, re.M)


@pytest.mark.slow
def test_a_schedule_and_an_average_continue_where_they_were_saved(tmp_path: Path) -> None:
    after = "print_main('from', progress['step'] if progress else 0, schedule.get_last_lr())\n"
    program = f"{OWN}loss = 0.5\n{BLOCKS[0]}{BEFORE_A_SCHEDULE}{BLOCKS[3]}{after}"
    shown = run_on_two_ranks(tmp_path, program)
    assert re.search(r"^from 0 \[.*e-05\]$", shown, re.M)

    again = run_on_two_ranks(tmp_path, program.replace("STEPS = 6", "STEPS = 8"))
    assert re.search(r"^from 6 \[.*e-05\]$", again, re.M)
