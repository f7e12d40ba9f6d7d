"""podman: an image of its own store. The host's network, process ids and /dev/shm are kept.

The command is no child of podman, and would survive it: LAUNCH_CLIENT tells the agent whose end to
wait for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from launcher.container.container import Container

# Each node looks for its devices. podman in the background would be stopped for reading a terminal.
_NETWORK = 'if [ -e /dev/infiniband ]; then set -- --device=/dev/infiniband "$@"; fi'
_GPUS = 'if [ -e /dev/nvidiactl ]; then set -- --device=nvidia.com/gpu=all "$@"; fi'
_RUN = 'if [ -t 0 ]; then exec </dev/null; fi; LAUNCH_CLIENT=$$ exec podman run "$@"'
_OPTIONS = (
    *("--rm", "--pull=never", "--read-only", "--interactive"),
    *("--env-host", "--entrypoint=", "--log-driver=none"),
    *("--network=host", "--pid=host", "--ipc=host", "--uts=host", "--security-opt=label=disable"),
)


def wrap(container: Container, command: Sequence[str]) -> list[str]:
    """Return what runs a command inside."""
    start = [_NETWORK, *([_GPUS] if container.has_gpus else []), _RUN]
    words = ["sh", "-c", "; ".join(start), "podman", *_OPTIONS, f"--workdir={container.directory}"]
    if os.geteuid() != 0:
        words.append("--userns=keep-id")
    words += [f"--volume={folder}:{folder}" for folder in container.binds]
    return [*words, *container.arguments, container.image, *command]
