"""What one rank does in a row of `make test-nccl`: python tests/gpu/nccl_probe.py WHAT [ARGS...].

It is plain torch, except where a function says so, because it also runs under torchrun. Ranks may
share a GPU; on a machine without one, they use gloo.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from probe import illegal_access, out_of_memory
from torch.nn.parallel import DistributedDataParallel

from distributed import torch as helper

HAS_GPU = torch.cuda.is_available()
FAULTY = 1
COUNT = 1 << 20  # numbers in an all-reduce
RESTARTS = 10
LIMIT_S = 12.0 if HAS_GPU else 8.0  # for a collective, in `outlives`


def share_gpu() -> torch.device:
    """Choose this rank's GPU; if ranks share it, each is a host of its own to NCCL."""
    if not HAS_GPU:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > count:
        os.environ.setdefault("NCCL_HOSTID", os.environ["RANK"])  # our launcher has set it
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % count)
    torch.cuda.set_device(device)
    return device


def join() -> torch.device:
    """Join the other ranks; returns this rank's device."""
    device = share_gpu()
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    return device


def add_line(file: str, *words: object) -> None:
    """Add a line to a file that other ranks write to as well."""
    with Path(file).open("a", buffering=1) as lines:
        lines.write(f"{' '.join(map(str, words))}\n")


class Training:
    """A small DDP model; each step ends with a collective of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(8, 64, device=self.device)).square().mean()
        loss.backward()
        self.optimizer.step()
        loss.item()  # waits for the GPU


# --- failures -----------------------------------------------------------------------------------


def fails(what: str, folder: str) -> None:
    """Train until FOLDER/fault exists, then let rank 1 do `what`; 3 steps done, write FOLDER/RANK.

    The file has the process ids of this rank and of its parent.
    """
    if what == "outlives":  # as with our helper
        device = share_gpu()
        helper.init_distributed(timeout_s=LIMIT_S)
    else:
        device = join()
    rank, training = dist.get_rank(), Training(device)
    for step in itertools.count(1):
        is_due = rank == FAULTY and Path(folder, "fault").exists()
        if is_due and what in FAULTS:
            FAULTS[what]()
        training.step()
        add_metric(device, what if is_due else "", is_gathered=what == "skips")
        if step == 3:
            new = Path(folder, f"{rank}.new")
            new.write_text(f"{os.getpid()} {os.getppid()}")
            new.rename(Path(folder, str(rank)))
        time.sleep(0.02)


def add_metric(device: torch.device, what: str, *, is_gathered: bool) -> None:
    """Exchange a tensor with the other ranks, unless `what` says otherwise."""
    kind = torch.float64 if what == "types" else torch.float32
    ones = torch.ones(COUNT * (2 if what == "shapes" else 1), dtype=kind, device=device)
    if is_gathered and what != "skips":
        dist.all_gather([torch.empty_like(ones) for _ in range(dist.get_world_size())], ones)
    elif not is_gathered:
        dist.all_reduce(ones)
    ones.sum().item()  # waits for the GPU


def fail() -> None:
    raise ValueError("batch 120 holds no samples")


def leave() -> None:
    sys.exit(0)


def outlive() -> None:
    time.sleep(600)


def run_out_of_memory() -> None:
    if not HAS_GPU:
        torch.empty(1 << 50, dtype=torch.uint8)
    out_of_memory()


FAULTS = {
    "raise": fail,
    "leaves": leave,
    "outlives": outlive,
    "memory": run_out_of_memory,
    "illegal": illegal_access,
}


def lasts(seconds: str, folder: str) -> None:
    """Train until rank 0 has done so for `seconds`; 3 steps done, write FOLDER/RANK."""
    device = join()
    training = Training(device)
    began = time.monotonic()
    last = began
    longest = 0.0
    for step in itertools.count(1):
        training.step()
        now = time.monotonic()
        longest = max(longest, now - last)
        last = now
        is_over = torch.tensor([now - began > float(seconds)], dtype=torch.uint8, device=device)
        dist.broadcast(is_over, src=0)
        if step == 3:
            Path(folder, str(dist.get_rank())).touch()
        if is_over.item():
            break
        time.sleep(0.02)
    if dist.get_rank() == 0:
        print(f"{step} steps, the longest took {longest:.1f} s", flush=True)
    dist.destroy_process_group()


# --- the rest -----------------------------------------------------------------------------------


def reduces() -> None:
    """Reduce 4 MB with a known answer."""
    ones = torch.ones(COUNT, device=join())
    dist.all_reduce(ones)
    assert bool((ones == dist.get_world_size()).all())
    print("the sum is right", flush=True)
    dist.destroy_process_group()


def restarts(file: str) -> None:
    """Kill rank 1 in each attempt but the last; write when its first step was done, and memory."""
    attempt, training = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), Training(join())
    training.step()
    dist.barrier()  # now all ranks use their memory
    if dist.get_rank() == 0:
        add_line(file, attempt, time.time(), used_bytes())
    dist.barrier()
    if dist.get_rank() == FAULTY and attempt < RESTARTS:
        os.kill(os.getpid(), signal.SIGKILL)
    training.step()


def used_bytes() -> int:
    """Return what is in use on the GPU or, without one, in shared memory, by all processes."""
    if HAS_GPU:
        free, total = torch.cuda.mem_get_info()
        return total - free
    status = os.statvfs("/dev/shm")
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def ends(how: str, file: str) -> None:
    """Use two process groups, write the time, and end: with `finish`, or as scripts do."""
    device = join()
    for group in (dist.group.WORLD, dist.new_group()):
        ones = torch.ones(COUNT, device=device)
        dist.all_reduce(ones, group=group)
        ones.sum().item()
    add_line(file, time.time())
    if how == "finish":
        helper.finish()
    dist.destroy_process_group()


def first_step(file: str) -> None:
    """Take a step, and write when it was done."""
    Training(join()).step()
    add_line(file, time.time())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
