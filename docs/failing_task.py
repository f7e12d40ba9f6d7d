"""The task of `make pictures` that fails: rank 1 runs out of samples at step 120."""

import os
from typing import Any

from torch import Tensor, nn

from training.tasks.language_model import LanguageModelTask


class Failing(LanguageModelTask):
    """The built-in task, up to a mistake."""

    batches = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.batches += model.training
        if self.batches == 120 and os.environ["RANK"] == "1":
            raise ValueError("batch 120 holds no samples")
        return super().loss(model, batch)
