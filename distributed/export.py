"""A checkpoint's weights in a file of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .checkpoint_files import CheckpointError


def export(weights: Mapping[str, Tensor], file: str) -> None:
    """Write weights for torch.load, or for safetensors if the file's name ends in .safetensors.

    Raises CheckpointError if the package safetensors is missing.
    """
    if not file.endswith(".safetensors"):
        torch.save(weights, file)
        return
    try:
        from safetensors.torch import save_file
    except ImportError:
        cause = f"{file} needs the package safetensors, which is not installed"
        cure = "pip install safetensors, or export to a .pt file"
        raise CheckpointError(f"{cause}; {cure}") from None
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, file, metadata={"format": "pt"})  # as other programs expect of torch's
