"""A minimal script for one process, in plain torch: on a GPU if there is one, otherwise on the CPU.

    python examples/one_gpu.py

docs/from-one-gpu.md turns it into examples/minimal_ddp.py.
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
inputs = torch.randn(4096, 8)  # [sample, feature]
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
loader = DataLoader(dataset, batch_size=32, shuffle=True)

model = torch.nn.Linear(8, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
for epoch in range(3):
    for features, target in loader:
        loss = mse_loss(model(features.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}  loss {loss.item():.6f}")
