"""Apptainer: image.sif. It passes the environment on, and the folders that its site binds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.container.container import Container


def wrap(container: Container, command: Sequence[str]) -> list[str]:
    """Return what runs a command inside."""
    gpus = "--rocm" if Path("/dev/kfd").exists() else "--nv"
    words = [
        "apptainer",
        "exec",
        *([gpus] if container.has_gpus else []),
        f"--pwd={container.directory}",
    ]
    words += [f"--bind={folder}" for folder in container.binds]
    return [*words, *container.arguments, container.image, *command]
