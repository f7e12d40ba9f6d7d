"""The container of a run: CONTAINER names the image, and the kind of image selects the runtime.

    image.sif       Apptainer             podman:NAME     podman
    a folder        Charliecloud          image.sqsh      pyxis in a SLURM job, otherwise Enroot
                                          any other name  pyxis, from a registry, in a SLURM job

The launcher, srun and ssh run outside; the preflight, the agents and the ranks run inside. Each
runtime is a function here and a line in RUNTIMES. Folders have the same paths inside and outside.
"""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.text import Environ, PlanError

_PATH = re.compile(r"(?<![\w./~-])/[\w.+-][\w./+-]*")
_WORD = re.compile(r"[\w./-]+")
_OF_IMAGES = ("bin", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr")


@dataclass(frozen=True)
class Container:
    """An image, and the folders and GPUs of this machine that it can use."""

    runtime: str  # one of RUNTIMES, or pyxis
    image: str
    directory: Path  # the working directory of a command
    binds: Sequence[Path]  # folders to mount inside
    arguments: Sequence[str]  # more options for the runtime
    has_gpus: bool

    def wrap(self, command: Sequence[str]) -> list[str]:
        """Return the words that run a command inside; with pyxis, srun_options() does that."""
        if self.runtime == "pyxis":
            return list(command)
        return RUNTIMES[self.runtime](self, command)

    def srun_options(self, name: str) -> list[str]:
        """Return the srun options that run a step inside; none if `wrap` does that.

        On each node, steps of a job that use the same name share one container.
        """
        if self.runtime != "pyxis":
            return []
        mounts = ",".join(f"{folder}:{folder}" for folder in self.binds)
        return [
            f"--container-image={self.image}",
            f"--container-name={name}",
            f"--container-mounts={mounts}",
            f"--container-workdir={self.directory}",
            *self.arguments,
        ]

    def with_folder(self, folder: Path) -> "Container":
        """Return the container with one more folder, or with the nearest parent that exists."""
        return replace(
            self, binds=_outermost([*self.binds, _nearest_folder(self.directory / folder)])
        )

    def __str__(self) -> str:
        return f"{self.image} ({self.runtime})"


def read_container(
    environ: Environ,
    here: Path,
    directory: Path,
    paths: Iterable[Path | str],
    *,
    in_job: bool,
) -> Container | None:
    """Return the container that CONTAINER names, relative to `here`; None if it is not set.

    `paths` are what the run needs from this machine: folders, and texts that may name folders. If
    a folder does not exist yet, its parent is mounted, so that the run can create it. With
    `in_job`, the commands run in steps of a SLURM job. Raises PlanError if there is no such image,
    no runtime for it here, or CONTAINER_ARGS is not valid in a shell.
    """
    given = environ.get("CONTAINER", "")
    if not given:
        return None

    runtime, image = _choose_runtime(here, given, in_job=in_job)
    try:
        arguments = shlex.split(environ.get("CONTAINER_ARGS", ""))
    except ValueError as error:
        raise PlanError(f"CONTAINER_ARGS: {error}; quote it as for a shell") from None

    binds = _outermost(
        _nearest_folder(directory / path) for path in _find_paths([directory, *paths])
    )
    has_gpus = environ.get("BACKEND") != "gloo"
    return Container(runtime, image, directory, binds, arguments, has_gpus)


def config_texts(config: Path) -> list[str]:
    """Return the text of a config, and of the files beside it that it names, such as its defaults.

    Empty if the config is not a file. Raises OSError if one of them cannot be read.
    Any word counts as a possible name, with or without its ending: the config's parser may exist
    only inside the image.
    """
    if not os.path.isfile(config):  # Path.is_file() raises an error if the name is too long
        return []
    words = {config.name, *_WORD.findall(config.read_text(errors="replace"))}
    names = {*words, *(f"{word}{config.suffix}" for word in words)}
    files = (config.parent / name for name in sorted(names))
    return [file.read_text(errors="replace") for file in files if os.path.isfile(file)]


def _choose_runtime(here: Path, given: str, *, in_job: bool) -> tuple[str, str]:
    """Return the runtime for an image, and the name by which it loads the image.

    `given` is the value of CONTAINER, `here` the folder of a relative path. Raises PlanError.
    """
    if given.startswith("podman:"):
        return "podman", given.removeprefix("podman:")
    path = here / given
    if path.is_dir():
        return "charliecloud", str(path)
    if path.suffix in (".sif", ".sqsh") or given.startswith((".", "/")):
        if not path.is_file():
            raise PlanError(f"CONTAINER names {given!r}, which does not exist; correct its path")
        if path.suffix == ".sif":
            return "apptainer", str(path)
        return "pyxis" if in_job else "enroot", str(path)

    if not in_job:
        raise PlanError(
            f"CONTAINER is {given!r}, which only pyxis can load, and only in a SLURM job; "
            f"give an image file or folder, or podman:{given}"
        )
    return "pyxis", given


def _find_paths(paths: Iterable[Path | str]) -> Iterable[str]:
    """Yield each path, and every absolute path in each text."""
    for path in paths:
        yield from [str(path)] if isinstance(path, Path) else _PATH.findall(path)


def _nearest_folder(path: Path) -> Path:
    """Return a path if it is a folder, otherwise its nearest parent that is one."""
    while not os.path.isdir(path):  # unlike Path.is_dir, False if access is denied
        path = path.parent
    return Path(os.path.normpath(path))


def _outermost(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that no other folder contains, except those that an image provides.

    The root is also omitted: it has no second part.
    """
    ours = {folder for folder in folders if folder.parts[1:2] and folder.parts[1] not in _OF_IMAGES}
    return sorted(folder for folder in ours if not ours & {*folder.parents})


# --- the runtimes -------------------------------------------------------------------------------


def _apptainer(container: Container, command: Sequence[str]) -> list[str]:
    """Run image.sif. Apptainer forwards the environment, and mounts what the site configured."""
    gpus = "--rocm" if Path("/dev/kfd").exists() else "--nv"
    return [
        "apptainer",
        "exec",
        *([gpus] if container.has_gpus else []),
        f"--pwd={container.directory}",
        *(f"--bind={folder}" for folder in container.binds),
        *container.arguments,
        container.image,
        *command,
    ]


def _charliecloud(container: Container, command: Sequence[str]) -> list[str]:
    """Run an image folder. The command keeps its process id, and sees the host's /dev and /tmp.

    `ch-fromhost --nvidia` copies the driver's libraries into the image.
    """
    binds = (folder for folder in container.binds if folder.parts[1] != "tmp")  # always mounted
    words = ["ch-run", f"--cd={container.directory}", *(f"--bind={folder}" for folder in binds)]
    if Path(container.image, "ch/environment").exists():  # the image's variables
        words.append("--set-env")
    return [*words, *container.arguments, container.image, "--", *command]


# ps shows only the variables' names. The image sets its own values for the omitted variables.
_START_ENROOT = """\
options=()
for name in $(compgen -e); do
  case $name in
    PATH | HOME | LD_* | PYTHON* | VIRTUAL_ENV | CONDA_*) ;;
    *) options+=(--env "$name") ;;
  esac
done
exec enroot start "${options[@]}" "$@"
"""


def _enroot(container: Container, command: Sequence[str]) -> list[str]:
    """Run image.sqsh. Enroot forwards only the variables that are named with --env."""
    gpus = ["--env", "NVIDIA_VISIBLE_DEVICES=all"] if container.has_gpus else []
    mounts = [word for folder in container.binds for word in ("--mount", f"{folder}:{folder}")]
    return [
        "bash",
        "-c",
        _START_ENROOT,
        "enroot",
        *gpus,
        *mounts,
        *container.arguments,
        container.image,
        "env",
        f"--chdir={container.directory}",
        *command,
    ]


# Each node checks for its own devices. In the background, podman must not read from a terminal.
_NETWORK = 'if [ -e /dev/infiniband ]; then set -- --device=/dev/infiniband "$@"; fi'
_GPUS = 'if [ -e /dev/nvidiactl ]; then set -- --device=nvidia.com/gpu=all "$@"; fi'
_RUN_PODMAN = (
    "if [ -t 0 ]; then exec </dev/null; fi; LAUNCH_CLIENT=$$ exec podman run --rm --pull=never"
    " --read-only --interactive --env-host --entrypoint= --log-driver=none --network=host"
    ' --pid=host --ipc=host --uts=host --security-opt=label=disable "$@"'
)


def _podman(container: Container, command: Sequence[str]) -> list[str]:
    """Run an image from podman's store, with the host's network, process ids and /dev/shm.

    The command is not a child of podman, and would survive it. LAUNCH_CLIENT is podman's process
    id: the agent ends when podman does.
    """
    start = [_NETWORK, *([_GPUS] if container.has_gpus else []), _RUN_PODMAN]
    words = ["sh", "-c", "; ".join(start), "podman", f"--workdir={container.directory}"]
    if os.geteuid() != 0:
        words.append("--userns=keep-id")  # files that it writes belong to this user
    words += [f"--volume={folder}:{folder}" for folder in container.binds]
    return [*words, *container.arguments, container.image, *command]


RUNTIMES = {  # functions that make the command line, by runtime
    "apptainer": _apptainer,
    "charliecloud": _charliecloud,
    "enroot": _enroot,
    "podman": _podman,
}
