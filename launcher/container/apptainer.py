"""Apptainer: image.sif. It passes the environment on, and the folders that its site binds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.container.container import Container


def wrap(box: Container, command: Sequence[str]) -> list[str]:
    """Return what runs a command inside."""
    gpus = "--rocm" if Path("/dev/kfd").exists() else "--nv"
    words = ["apptainer", "exec", *([gpus] if box.has_gpus else []), f"--pwd={box.directory}"]
    words += [f"--bind={folder}" for folder in box.binds]
    return [*words, *box.arguments, box.image, *command]
