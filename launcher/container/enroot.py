"""Enroot: image.sqsh. It passes no variable on but those that it is told of."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.container.container import Container

# Names alone show in the list of processes. The image has its own of those that are left out.
_START = """\
options=()
for name in $(compgen -e); do
  case $name in
    PATH | HOME | LD_* | PYTHON* | VIRTUAL_ENV | CONDA_*) ;;
    *) options+=(--env "$name") ;;
  esac
done
exec enroot start "${options[@]}" "$@"
"""


def wrap(container: Container, command: Sequence[str]) -> list[str]:
    """Return what runs a command inside."""
    gpus = ["--env", "NVIDIA_VISIBLE_DEVICES=all"] if container.has_gpus else []
    mounts = [word for folder in container.binds for word in ("--mount", f"{folder}:{folder}")]
    options = [*gpus, *mounts, *container.arguments]
    inside = ["env", f"--chdir={container.directory}", *command]
    return ["bash", "-c", _START, "enroot", *options, container.image, *inside]
