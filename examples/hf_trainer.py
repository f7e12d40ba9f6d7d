"""Hugging Face's Trainer trains a tiny language model; nothing in it is ours.

pip install transformers accelerate
scripts/launch.sh --nproc-per-node 2 examples/hf_trainer.py --output_dir out --max_steps 4
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 50
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    result = trainer.train()
    trainer.save_model()
    print(f"rank {arguments.process_index}: loss {result.training_loss:.5f}", file=sys.stdout)


if __name__ == "__main__":
    main()
