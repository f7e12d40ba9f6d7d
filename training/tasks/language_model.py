"""The built-in task: a small GPT that learns to write the text of a folder, byte by byte.

Without `data.path` the text is the source files of Python's own standard library, which every
machine has (its tests and IDLE left out). A file belongs to the validation set where the SHA-256
of its name says so, one in sixteen, so that the split stays when files come and go.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from training import settings as config
from training.settings import SettingsError
from training.tasks import Task

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
VALIDATION_HASHES = 16  # of the 256 values of a hash's last byte
SAMPLE_BYTES = 240
SAMPLE_PROMPT = b"\n    def "
BITS = 1 / math.log(2)  # in a nat


# --- text ---------------------------------------------------------------------------------------


def text_files(folder: Path | None) -> list[tuple[bytes, Path]]:
    """Return (SHA-256 of the name, path) of each candidate, sorted by hash: a fixed shuffle.

    Args:
        folder: takes every file below it; None takes the standard library's *.py files.

    Raises:
        SettingsError: there is no such folder.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise SettingsError(f"data.path: there is no folder {root}")
    found = []
    for path in _walk(root):
        if folder is not None or path.suffix == ".py":
            name = path.relative_to(root).as_posix()
            found.append((hashlib.sha256(os.fsencode(name)).digest(), path))
    return sorted(found)


def _walk(root: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def load_text(settings: config.Data) -> tuple[bytes, bytes]:
    """Return the bytes to train on and to validate on. Files with a NUL byte are no text.

    Raises:
        SettingsError: the folder is missing, or holds fewer than two text files.
    """
    folder = Path(settings.path).expanduser() if settings.path else None
    train: list[bytes] = []
    validation: list[bytes] = []
    room = settings.max_bytes
    for digest, path in text_files(folder):
        if room <= 0:
            break
        with path.open("rb") as file:
            text = file.read(room)
        if b"\0" in text[:4096]:
            continue
        room -= len(text)
        (validation if digest[-1] < VALIDATION_HASHES else train).append(text)
    if len(train) + len(validation) < 2:
        raise SettingsError(f"data.path: {folder} holds fewer than two text files")
    for empty, other in ((train, validation), (validation, train)):
        if not empty:  # so few files that chance gave them all to one side
            empty.append(other.pop(0))
    return b"".join(train), b"".join(validation)[: settings.validation_bytes + 1]


class Windows(Dataset[Tensor]):
    """A text cut into windows; window i is bytes [i * context, (i + 1) * context], ends included.

    Neighbours share one byte, the last target of one and the first input of the next, so that
    every byte but the first is predicted once.
    """

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:  # [context + 1], uint8
        return self.bytes[index * self.context : (index + 1) * self.context + 1]


# --- model --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to what came before, then a small network; each adds to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.network_norm = nn.LayerNorm(width)
        self.network_in = nn.Linear(width, 4 * width)
        self.network_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width], in and out
        x = x + self.drop(self.attention_out(self.attend(self.attention_norm(x))))
        network = self.network_out(F.gelu(self.network_in(self.network_norm(x))))
        return x + self.drop(network)

    def attend(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = self.query_key_value(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [batch, heads, context, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, context, width)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """A decoder-only transformer over bytes (Radford et al. 2019), input and output tied."""

    def __init__(self, shape: config.LanguageModel) -> None:
        super().__init__()
        self.context = shape.context
        self.embedding = nn.Embedding(256, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(
            *(Block(shape.width, shape.heads, shape.dropout) for _ in range(shape.layers))
        )
        self.norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:  # the two that end in the residual stream start smaller
                depth = 2 * shape.layers if name.endswith("out.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth))

    def forward(self, text: Tensor) -> Tensor:  # [batch, context] of bytes -> [..., 256] logits
        places = torch.arange(text.shape[1], device=text.device)
        x = self.embedding(text) + self.position(places)
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, *, temperature: float = 0.8) -> bytes:
    """Return the prompt and `length` bytes drawn after it, the same ones for the same weights."""
    model.eval()
    place = model.embedding.weight.device
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(prompt)], device=place)
    for _ in range(length):
        logits = model(text[:, -model.context :])[:, -1].float().cpu()
        drawn = torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=generator)
        text = torch.cat([text, drawn.to(place)], 1)
    return bytes(text[0].tolist())


# --- task ---------------------------------------------------------------------------------------


class LanguageModelTask(Task):
    unit = "tokens"  # bytes, here

    def __init__(self, settings: config.Settings) -> None:
        assert isinstance(settings.model, config.LanguageModel)
        self.shape = settings.model
        self.path = settings.data.path or "the standard library"
        train, validation = load_text(settings.data)
        self.train = Windows(train, self.shape.context)
        self.validation = Windows(validation, self.shape.context)
        for windows in (self.train, self.validation):
            if len(windows) == 0:
                raise SettingsError(
                    f"data.path: {self.path} is too short: no file fills model.context, "
                    f"{self.shape.context} bytes"
                )

    def model(self) -> GPT:
        return GPT(self.shape)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte of windows [batch, context + 1]."""
        text = batch.long()
        logits = model(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def weight(self, batch: Tensor) -> int:
        return batch.shape[0] * (batch.shape[1] - 1)

    def metrics(self, loss: float) -> dict[str, float]:
        return {"bits_per_byte": loss * BITS}

    def describe(self) -> str:
        train, validation = (len(windows.bytes) / 1e6 for windows in (self.train, self.validation))
        return f"{train:.2f} MB of {self.path}, and {validation:.2f} MB to validate on"

    def summary(self, model: nn.Module, validation_loss: float) -> list[tuple[str, str]]:
        assert isinstance(model, GPT)
        yardsticks = self.yardsticks()
        return [
            ("validation", f"{validation_loss * BITS:.3f} bits per byte ({yardsticks})"),
            ("sample", printable(generate(model, SAMPLE_PROMPT, SAMPLE_BYTES)).strip("\n")),
        ]

    def yardsticks(self) -> str:
        """Return what simpler models need for the bytes that the validation predicts."""
        windows = self.validation
        predicted = windows.bytes[1 : len(windows) * windows.context + 1]
        return f"order-0 entropy {entropy(predicted):.3f}, zlib -9 {zlib_rate(predicted):.3f}"


def printable(text: bytes) -> str:
    """Return text that does a terminal no harm, whatever the bytes are."""
    characters = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in characters)


def entropy(text: Tensor) -> float:
    """Return the order-0 entropy in bits per byte: the best that byte frequencies alone can do."""
    shares = torch.bincount(text, minlength=256) / len(text)
    return -(shares * shares.log2()).nan_to_num().sum().item()


def zlib_rate(text: Tensor) -> float:
    """Return the bits per byte that zlib needs at level 9."""
    return 8 * len(zlib.compress(bytes(text.tolist()), 9)) / len(text)
