"""The built-in task: a small GPT that learns the bytes or tokens of text, which data.py reads."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.heartbeat import beat
from training import settings as config
from training.config_file import SettingsError
from training.progress import shown
from training.tasks import Task
from training.tasks.data import VALIDATION_TOKENS, Windows, find_corpus
from training.tokenizer import Tokenizer

SAMPLE_TOKENS = 240
SAMPLE_PROMPT = b"\n    def "
BITS = 1 / math.log(2)  # per nat
NGRAM_ROWS = 1 << 12  # for each length
HASH_FACTOR = 1_000_003  # a prime
SHOWN = 3  # names of skipped files


class GPT(nn.Module):
    """A decoder-only transformer over tokens (Radford et al. 2019) with tied embeddings.

    With `ngrams`, each position also gets embeddings of its last 2, 3, ... tokens, each found by a
    hash (Pagnoni et al. 2024), so attention need not learn what often follows a few bytes.
    """

    def __init__(self, shape: config.LanguageModel) -> None:
        super().__init__()
        self.context = shape.context
        width = shape.width  # of the residual stream; a block's MLP is 4 times as wide
        self.embedding = nn.Embedding(shape.vocabulary, width)
        self.position = nn.Embedding(shape.context, width)
        rows = (shape.ngrams - 1) * NGRAM_ROWS
        self.ngrams = nn.Embedding(rows, width) if rows > 0 else None

        block = nn.TransformerEncoderLayer(
            width, shape.heads, 4 * width, shape.dropout, F.gelu, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(block, shape.layers, norm, enable_nested_tensor=False)

        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:  # smaller for layers that add to the residual stream
                ends = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers if ends else 1))

    def forward(self, text: Tensor) -> Tensor:  # [batch, context] -> [..., vocabulary] logits
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        positions = torch.arange(length, device=text.device)
        x = self.embedding(text) + self.position(positions)  # [batch, context, width]
        if self.ngrams is not None:
            for rows in ngram_rows(text, self.ngrams.num_embeddings):
                x = x + self.ngrams(rows)
        return F.linear(self.blocks(x, mask=mask, is_causal=True), self.embedding.weight)


def ngram_rows(text: Tensor, rows: int) -> Iterator[Tensor]:
    """Yield the rows of the embeddings of the last 2, 3, ... tokens, each as [batch, context]."""
    hashes = before = text
    for first in range(0, rows, NGRAM_ROWS):
        before = F.pad(before, (1, 0))[:, :-1]
        hashes = hashes * HASH_FACTOR + before + 1
        yield first + (hashes ^ (hashes >> 15)) % NGRAM_ROWS


@torch.no_grad()
def generate(
    model: GPT, prompt: Sequence[int], length: int, *, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """Return the prompt, of at least one token, and `length` tokens sampled after it.

    Leaves the model in evaluation mode. Ranks that share a model must all call this.
    """
    model.eval()
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)], device=device)

    for _ in range(length):
        logits = model(text[:, -model.context :])[:, -1].float().cpu()
        shares = F.softmax(logits / max(temperature, 1e-6), -1)  # at 0: only the likeliest
        drawn = torch.multinomial(shares, 1, generator=generator)
        text = torch.cat([text, drawn.to(device)], 1)
        beat()  # a slow machine must not look like a stuck run
    return text[0].tolist()


class LanguageModelTask(Task):
    """The built-in task.

    Raises SettingsError if its data is missing or shorter than the context, or has more kinds of
    tokens than the model's vocabulary.
    """

    unit = "tokens"

    def __init__(self, settings: config.Settings) -> None:
        self.shape = settings.model
        self.corpus = corpus = find_corpus(settings.data.path)
        context = self.shape.context
        dtype = corpus.dtype
        most = VALIDATION_TOKENS + 1
        self.train = Windows(corpus.train, context, dtype)
        self.validation = Windows(corpus.validation, context, dtype, most)
        if not (len(self.train) and len(self.validation)):
            raise SettingsError(
                f"data.path: {corpus.name} is too short to fill model.context, {context} tokens"
            )
        vocabulary = corpus.vocabulary or self.validation.largest() + 1  # the least it can be
        if vocabulary > self.shape.vocabulary:
            raise SettingsError(
                f"model.vocabulary is {self.shape.vocabulary}, but {corpus.name} needs "
                f"at least {vocabulary}; raise it"
            )

        layers = self.shape.layers
        width = self.shape.width
        matrices = 12 * layers * width**2 + width * self.shape.vocabulary
        self.flops = 6.0 * matrices + 12 * layers * width * context  # the second term: attention

    def model(self) -> GPT:
        """Return a new model of the settings' size."""
        return GPT(self.shape)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token of windows [batch, context + 1]."""
        text = batch.long()
        logits = model(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def weight(self, batch: Tensor) -> int:
        """Return how many tokens of windows [batch, context + 1] are predicted."""
        return batch.shape[0] * (batch.shape[1] - 1)

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the loss in bits per byte, if the tokens are bytes."""
        return {"bits_per_byte": loss * BITS} if self.corpus.is_text else {}

    def describe(self) -> str:
        """Return the sizes of the data, its name, and the first files that were skipped."""
        unit = "B" if self.corpus.is_text else " tokens"
        sizes = [f"{side.size / 1e6:.2f} M{unit}" for side in (self.train, self.validation)]
        files = self.corpus.skipped
        more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
        skipped = f"; skipped: {', '.join(files[:SHOWN])}{more}" if files else ""
        return f"{sizes[0]} of {self.corpus.name}, and {sizes[1]} for validation{skipped}"

    def summary(self, model: nn.Module, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Return the loss, and a sample if the tokenizer is known.

        For text, the loss is in bits per byte, beside that of simpler models of the same bytes.
        """
        assert isinstance(model, GPT)
        windows = self.validation
        corpus = self.corpus
        measure = f"loss {shown(metrics['loss'], 4)}"
        if corpus.is_text:
            count = len(windows) * windows.context  # tokens that are predicted
            predicted = torch.frombuffer(windows.read(1, count), dtype=torch.uint8)
            measure = (
                f"{metrics['bits_per_byte']:.3f} bits per byte (order-0 entropy "
                f"{entropy(predicted):.3f}, zlib -9 {zlib_rate(predicted):.3f})"
            )

        found = [("validation", measure)]
        if corpus.tokenizer:
            found.append(("sample", self._sample(model)))
        return found

    def _sample(self, model: GPT) -> str:
        """Return text from the model, or the reason why its tokens cannot be decoded here.

        Ranks that share a model must all call this.
        """
        try:
            tokenizer = Tokenizer(self.corpus.tokenizer, self.corpus.folder)
        except SettingsError as error:  # its library may not be on this machine
            generate(model, [0], SAMPLE_TOKENS)  # ranks that share a model compute together
            return f"none: {error}"
        tokens = generate(model, tokenizer.encode(SAMPLE_PROMPT), SAMPLE_TOKENS)
        return printable(tokenizer.decode(tokens)).strip("\n")


def printable(text: bytes) -> str:
    """Return text that is safe to print on a terminal."""
    characters = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in characters)


def entropy(text: Tensor) -> float:
    """Return the order-0 entropy in bits per byte: the best that byte frequencies alone allow."""
    shares = torch.bincount(text, minlength=256) / len(text)
    return -(shares * shares.log2()).nan_to_num().sum().item()


def zlib_rate(text: Tensor) -> float:
    """Return the bits per byte that zlib needs at level 9."""
    return 8 * len(zlib.compress(bytes(text.tolist()), 9)) / len(text)
