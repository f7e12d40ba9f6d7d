"""What one rank does in a row of `make test-gpu`: python tests/gpu/probe.py WHAT.

On a machine without a GPU, only `holds_memory` works; it uses the CPU's memory.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def untouched() -> None:
    """Print how this rank and its agent used CUDA before and after the rank's first use of it."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = [used, *cuda_files(os.getppid())]
    is_shared = "torch._dynamo" in sys.modules  # the agent has imported it
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    after, own = cuda_files(os.getppid()), cuda_files(os.getpid())
    told = {"before": before, "after": after, "own": own, "is_shared": is_shared}
    print(json.dumps({**told, "cpus": len(os.sched_getaffinity(0))}))


def cuda_files(pid: int) -> list[str]:
    """Return the device file that only CUDA opens, if a process has it open; NVML opens others."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed by now, as the listing's own is
            found.add(os.readlink(link))
    return sorted(name for name in found if "nvidia-uvm" in name)


def all_reduce() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    ones = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(ones)
    assert bool((ones == dist.get_world_size()).all())
    print("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    dist.destroy_process_group()


def hang() -> None:
    """Take some steps, then wait for a kernel that never ends."""
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda._sleep(1 << 62)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()


def out_of_memory() -> None:
    kept = []
    while True:
        kept.append(torch.empty(4 << 30, dtype=torch.uint8, device="cuda"))


def illegal_access() -> None:
    """Write to memory that was returned to the driver."""
    size = 64 << 20
    pointer = torch.cuda.caching_allocator_alloc(size)
    interface = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}
    memory = type("Memory", (), {"__cuda_array_interface__": interface})()
    stale = torch.as_tensor(memory, device="cuda")
    torch.cuda.caching_allocator_delete(pointer)  # type: ignore[no-untyped-call]
    torch.cuda.empty_cache()
    stale.add_(1)
    torch.cuda.synchronize()


def bad_index() -> None:
    """Read past the end of an embedding, as with tokens beyond the vocabulary."""
    torch.nn.Embedding(10, 4).cuda()(torch.tensor([99], device="cuda"))
    torch.cuda.synchronize()


def holds_memory() -> None:
    """Hold 1 GB until someone ends the run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    held = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    print("holds", held.numel(), flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
