"""Data workers from spawn and from a fork server, and a pool that uses the script's own class."""

import multiprocessing
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info


@dataclass
class Point:
    x: int


def square(point: Point) -> Point:
    return Point(point.x**2)


class Numbers(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, get_worker_info().id


if __name__ == "__main__":
    dist.init_process_group("gloo")
    method = sys.argv[1]
    for numbers, workers in DataLoader(
        Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method
    ):
        print(f"rank {dist.get_rank()}: {numbers.tolist()} from worker {workers.unique().tolist()}")
    with multiprocessing.get_context(method).Pool(2) as pool:
        print(f"rank {dist.get_rank()}: {pool.map(square, [Point(2), Point(3)])}")
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    print(f"sum {total}")
    dist.destroy_process_group()
