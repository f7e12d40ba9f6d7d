"""The built-in task: a small GPT that learns the text of a folder, byte by byte.

Without `data.path` it reads the sources of Python's standard library, without its tests and IDLE.
The SHA-256 of a file's name decides whether it is validation data, one file in sixteen, so files
keep their side when others come and go.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import os
import sysconfig
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from training import settings as config
from training.config_file import SettingsError
from training.settings import text_folder
from training.tasks import Task

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
VALIDATION_HASHES = 16  # of the 256 values of a hash's last byte
MAX_BYTES = 64_000_000  # read at most, in order of the files' hashes
VALIDATION_BYTES = 131_072  # used of the validation files
SAMPLE_BYTES = 240
SAMPLE_PROMPT = b"\n    def "
BITS = 1 / math.log(2)  # per nat


def text_files(folder: Path | None) -> list[tuple[bytes, Path]]:
    """Return (SHA-256 of the name, path) of each file, sorted by hash: a fixed shuffle.

    These are all files below the folder; without one, the standard library's *.py files.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    found = []
    for parent, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith(".")]
        for name in fnmatch.filter(names, "[!.]*" if folder else "[!.]*.py"):
            path = Path(parent, name)
            if path.is_file():
                digest = hashlib.sha256(os.fsencode(path.relative_to(root))).digest()
                found.append((digest, path))
    return sorted(found)


def load_text(path: str | None) -> tuple[bytes, bytes]:
    """Return the bytes to train and to validate on. Files with a NUL byte are not text."""
    folder = text_folder(path)
    train: list[bytes] = []
    validation: list[bytes] = []
    room = MAX_BYTES
    for digest, file in text_files(folder):
        if room == 0:
            break
        with file.open("rb") as opened:
            text = opened.read(room)
        if b"\0" not in text[:4096]:
            room -= len(text)
            (validation if digest[-1] < VALIDATION_HASHES else train).append(text)
    if len(train) + len(validation) < 2:
        raise SettingsError(f"data.path: {folder} holds fewer than two text files")
    for empty, other in ((train, validation), (validation, train)):
        if not empty:  # with few files, all can be on one side
            empty.append(other.pop(0))
    return b"".join(train), b"".join(validation)[: VALIDATION_BYTES + 1]


class Windows(Dataset[Tensor]):
    """A text cut into windows; window i is bytes i * context to (i + 1) * context inclusive.

    Neighbours share one byte, the last target of one and the first input of the next, so every
    byte but the first is predicted exactly once.
    """

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:  # [context + 1], uint8
        return self.bytes[index * self.context : (index + 1) * self.context + 1]


class GPT(nn.Module):
    """A decoder-only transformer over bytes (Radford et al. 2019) with tied embeddings."""

    def __init__(self, shape: config.LanguageModel) -> None:
        super().__init__()
        self.context = shape.context
        width = shape.width  # of the residual stream; a block's MLP is 4 times as wide
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(shape.context, width)
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

    def forward(self, text: Tensor) -> Tensor:  # [batch, context] of bytes -> [..., 256] logits
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        positions = torch.arange(length, device=text.device)
        x = self.embedding(text) + self.position(positions)  # [batch, context, width]
        return F.linear(self.blocks(x, mask=mask, is_causal=True), self.embedding.weight)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, *, temperature: float = 0.8) -> bytes:
    """Return the prompt and `length` bytes sampled after it, with a fixed seed."""
    model.eval()
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        logits = model(text[:, -model.context :])[:, -1].float().cpu()
        drawn = torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=generator)
        text = torch.cat([text, drawn.to(device)], 1)
    return bytes(text[0].tolist())


class LanguageModelTask(Task):
    unit = "tokens"  # one byte each

    def __init__(self, settings: config.Settings) -> None:
        self.shape = settings.model
        self.path = settings.data.path or "the standard library"
        texts = load_text(settings.data.path)
        self.train, self.validation = (Windows(text, self.shape.context) for text in texts)
        if not (len(self.train) and len(self.validation)):
            cause = f"no file fills model.context, {self.shape.context} bytes"
            raise SettingsError(f"data.path: {self.path} is too short: {cause}")

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
        """Compare the loss with simpler models of the same bytes, and show a sample."""
        assert isinstance(model, GPT)
        windows = self.validation
        predicted = windows.bytes[1 : len(windows) * windows.context + 1]
        yardsticks = f"order-0 entropy {entropy(predicted):.3f}, zlib -9 {zlib_rate(predicted):.3f}"
        return [
            ("validation", f"{validation_loss * BITS:.3f} bits per byte ({yardsticks})"),
            ("sample", printable(generate(model, SAMPLE_PROMPT, SAMPLE_BYTES)).strip("\n")),
        ]


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
