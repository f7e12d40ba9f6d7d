"""torch.compile around DDP: it compiles C++ for this machine, and logs what it has compiled."""

import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.compile(DistributedDataParallel(torch.nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile
    def norm(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + x.cos()).square().sum().sqrt()

    for _ in range(3):
        loss = norm(model(torch.ones(4, 8)))
        loss.backward()
        optimizer.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"rank {dist.get_rank()}: {graphs} graphs, loss {loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
