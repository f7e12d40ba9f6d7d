"""podman: an image of its own store. The host's network, process ids and /dev/shm are kept.

The command is no child of podman, and would survive it: LAUNCH_CLIENT tells the agent whose end to
wait for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.container.container import Container

_START = 'LAUNCH_CLIENT=$$ exec podman run "$@"'
_OPTIONS = (
    *("--rm", "--interactive", "--env-host", "--entrypoint=", "--log-driver=none"),
    *("--network=host", "--pid=host", "--ipc=host", "--uts=host", "--security-opt=label=disable"),
)


def wrap(box: Container, command: Sequence[str]) -> list[str]:
    """Return what runs a command inside."""
    words = ["sh", "-c", _START, "podman", *_OPTIONS, f"--workdir={box.directory}"]
    if os.geteuid() != 0:
        words.append("--userns=keep-id")
    if box.has_gpus and Path("/dev/nvidiactl").exists():
        words.append("--device=nvidia.com/gpu=all")
    words += [f"--volume={folder}:{folder}" for folder in box.binds]
    return [*words, *box.arguments, box.image, *command]
