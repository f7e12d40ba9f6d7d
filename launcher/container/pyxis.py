"""pyxis, in a SLURM job: image.sqsh, or the name of an image in a registry. srun takes it."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.container.container import Container


def wrap(container: Container, command: Sequence[str]) -> list[str]:
    """Return the command: srun's options put it inside."""
    return list(command)


def srun_options(container: Container, name: str) -> list[str]:
    """Return srun's options; the steps of a job share the container of a name on each node."""
    mounts = ",".join(f"{folder}:{folder}" for folder in container.binds)
    words = [f"--container-image={container.image}", f"--container-name={name}"]
    words += [f"--container-mounts={mounts}", f"--container-workdir={container.directory}"]
    return [*words, *container.arguments]
