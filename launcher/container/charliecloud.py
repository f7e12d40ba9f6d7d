"""Charliecloud: a folder. The command keeps its process id, and sees the host's /dev and /tmp.

`ch-fromhost --nvidia` puts a driver's libraries into the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.container.container import Container


def wrap(container: Container, command: Sequence[str]) -> list[str]:
    """Return what runs a command inside."""
    binds = (folder for folder in container.binds if folder.parts[1] != "tmp")  # all of it is there
    words = ["ch-run", f"--cd={container.directory}", *(f"--bind={folder}" for folder in binds)]
    if Path(container.image, "ch/environment").exists():
        words.append("--set-env")
    return [*words, *container.arguments, container.image, "--", *command]
