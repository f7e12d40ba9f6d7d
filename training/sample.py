"""Generate text with a checkpoint of the built-in model:

    python -m training.sample CHECKPOINT [--prompt TEXT] [--length N] [--temperature T] [--seed N]

CHECKPOINT is a checkpoint, or the folder of a run, whose newest intact checkpoint is used.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from distributed import checkpoint
from distributed.checkpoint import CheckpointError
from training.config_file import SettingsError
from training.sections import read
from training.settings import BUILT_IN_TASK, LanguageModel
from training.tasks.data import find_corpus
from training.tasks.language_model import GPT, SAMPLE_PROMPT, SAMPLE_TOKENS, generate, printable
from training.tokenizer import Tokenizer


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompt", default=SAMPLE_PROMPT.decode(), help="text to continue")
    parser.add_argument("--length", type=int, default=SAMPLE_TOKENS, help="tokens")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: no randomness")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    chosen = parser.parse_args(arguments)
    if chosen.length < 1 or chosen.temperature < 0:
        parser.error("--length must be 1 or more, --temperature 0 or more")

    try:
        model, tokenizer = load(chosen.checkpoint)
    except (SettingsError, CheckpointError, OSError) as error:
        print(f"sample: {error}", file=sys.stderr)
        return 2

    prompt = tokenizer.encode(chosen.prompt.encode()) or [0]
    text = generate(model, prompt, chosen.length, temperature=chosen.temperature, seed=chosen.seed)
    print(printable(tokenizer.decode(text)))
    return 0


def load(folder: Path) -> tuple[GPT, Tokenizer]:
    """Return the model of a checkpoint and its tokenizer.

    Raises CheckpointError if none is intact, and SettingsError if it is from another task, or its
    tokenizer is not known or cannot be loaded.
    """
    state = checkpoint.load(folder)
    if state is None:
        raise CheckpointError(f"{folder} holds no checkpoint; give another run")
    settings = state.progress.get("settings", {})  # only those used below must be valid
    if settings.get("task") != BUILT_IN_TASK:
        raise SettingsError(f"{folder} was not trained with the task {BUILT_IN_TASK}")

    shape = read(LanguageModel, settings["model"], "model.")
    model = GPT(shape)
    model.load_state_dict(state.model)

    if shape.vocabulary == 256:
        return model, Tokenizer("bytes")
    corpus = find_corpus(settings["data"]["path"])
    if not corpus.tokenizer:
        raise SettingsError(f"{corpus.name} has no tokenizer; see training/prepare.py")
    return model, Tokenizer(corpus.tokenizer, corpus.folder)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C ends it without a traceback
    sys.exit(main(sys.argv[1:]))
