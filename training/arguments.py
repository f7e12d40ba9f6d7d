"""train.py's command line. This file does not import torch, so it reports mistakes in 0.2 s."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from distributed import __version__
from distributed.environment import BACKENDS, Environment, LauncherError
from distributed.errors import BAD_INPUT, Leave, Refused
from distributed.job import in_slurm_step
from distributed.strategy import check_strategy
from training.config_file import SettingsError, with_ending
from training.settings import BUILT_IN_TASK, Settings, data_path, load

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, as the rest of train.py does, in place of the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the message, and exit with 2."""
        refuse(f"{message}; see train.py --help")


def refuse(cause: object) -> NoReturn:
    """Print one line with the mistake, and exit with 2. Of srun's tasks, only the first prints.

    The other tasks exit up to 2 s later, with the same code even if srun ends them first. Every
    task, however, prints a mistake that concerns only its host (a plain ValueError), and reports
    missing tasks (a TimeoutError), because the first task may be one of them.
    """
    fault, text = _split_fault(cause)
    # The exact types: subclasses such as SettingsError concern all tasks.
    if _is_first_task() or type(cause) in (ValueError, TimeoutError):
        _complain(fault, text)
    else:
        _wait_for_sigterm()
    raise Leave(BAD_INPUT, fault, text)


def _wait_for_sigterm() -> bool:
    """Wait up to 2 s for the SIGTERM by which the launcher ends this rank; return whether it came.

    The signal stays blocked, so this process exits with its own code.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    return signal.sigtimedwait([signal.SIGTERM], 2) is not None


def _is_first_task() -> bool:
    """Return whether this is the first of srun's tasks; True under any other launcher."""
    is_other = in_slurm_step(os.environ) and os.environ.get("SLURM_PROCID") != "0"
    return "RANK" in os.environ or not is_other


def _split_fault(cause: object) -> tuple[str, str]:
    """Return the name of the fault and the cause without it."""
    fault = getattr(cause, "fault", "") or "config-invalid"
    return fault, str(cause).removesuffix(f" [{fault}]")


def _complain(fault: str, cause: str) -> None:
    """Print the one line about a mistake on stderr."""
    print(f"train.py: {cause} [{fault}]", file=sys.stderr)


@contextlib.contextmanager
def refuse_together(environment: Environment) -> Iterator[None]:
    """Run the body on every rank; if any rank finds a mistake, rank 0 prints it and all exit.

    All ranks must call this; they wait for each other after the body. A mistake is a SettingsError,
    LauncherError, CheckpointError or Refused; other errors pass through. The exit code is 2.
    """
    from distributed.checkpoint import CheckpointError
    from distributed.torch import barrier, finish, gather_json

    mistake = None
    try:
        yield
    except (SettingsError, LauncherError, CheckpointError, Refused) as error:
        fault, cause = _split_fault(error)
        mistake = [fault, cause if environment.is_main else f"rank {environment.rank}: {cause}"]

    if mistakes := [one for one in gather_json(mistake) if one]:
        if environment.is_main:
            _complain(*mistakes[0])
        barrier()  # once one rank has exited, the launcher ends the others
        if not environment.is_main:
            with contextlib.suppress(RuntimeError):
                barrier()  # rank 0 exits first, which ends this wait
        # gloo's threads can abort an interpreter that is shutting down
        atexit.register(finish, BAD_INPUT)
        raise Leave(BAD_INPUT, *mistakes[0])


@contextlib.contextmanager
def refuse_alone(environment: Environment) -> Iterator[None]:
    """Run the body; if it raises SettingsError, print one line and exit with 2; no collective.

    If all ranks find the same mistake, rank 0 prints it and exits first: the others wait up to 2 s
    for the SIGTERM by which the launcher then ends them, and print only if none comes.
    """
    from distributed.torch import finish

    try:
        yield
    except SettingsError as error:
        fault, cause = _split_fault(error)
        if environment.is_main or not _wait_for_sigterm():
            _complain(fault, cause)
        atexit.register(finish, BAD_INPUT)
        raise Leave(BAD_INPUT, fault, cause) from None


def read_command_line(description: str) -> tuple[argparse.Namespace, Settings]:
    """Read the arguments and the config. With --check, or if they are invalid, exit here.

    Also adds the folders of the user's own task to sys.path, sets the variables of a debug log, and
    makes stdout and stderr escape characters that their encoding lacks.
    """
    arguments = _parse_arguments(description)
    for stream in sys.stdout, sys.stderr:  # the locale may lack characters of sampled text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    config = arguments.config
    # The user's own task may be in the working directory or beside the config, even behind a link.
    sys.path += map(str, (Path.cwd(), config.absolute().parent, config.resolve().parent))

    try:
        settings = load(config, arguments.overrides, os.environ)
        if arguments.check:
            _check_and_exit(arguments, settings)
    except (SettingsError, LauncherError) as error:
        refuse(error)

    if arguments.log_level == "DEBUG":  # torch and NCCL too, unless the user chose otherwise
        for name in ("TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "NCCL_DEBUG"):
            os.environ.setdefault(name, "INFO")
    return arguments, settings


def _check_and_exit(arguments: argparse.Namespace, settings: Settings) -> NoReturn:
    """Check everything else that can be checked before the start, print the result, and exit.

    Raises SettingsError or LauncherError for a mistake.
    """
    chosen = settings.distributed
    world_size = int(os.environ.get("WORLD_SIZE") or 1)  # set by the launcher, if it is known
    check_strategy(chosen.strategy, world_size, chosen.fsdp.shard)
    samples = settings.train.batch_size_on(world_size)
    if settings.task == BUILT_IN_TASK:
        data_path(settings.data.path)

    if arguments.json:
        print(json.dumps(_facts_for_launchers(settings)))
    else:
        print(
            f"ok: {arguments.config}, task {settings.task}, "
            f"{world_size} {'process' if world_size == 1 else 'processes'} x {samples} samples"
        )

    sys.exit(0)


def _facts_for_launchers(settings: Settings) -> dict[str, object]:
    """Return the settings that a launcher needs; --check --json prints them."""
    train = settings.train
    is_own = settings.task != BUILT_IN_TASK
    module = importlib.util.find_spec(settings.task.partition(":")[0]) if is_own else None
    return {
        "backend": settings.distributed.backend,
        "join_timeout_s": settings.distributed.join_timeout,
        "checkpoint_dir": os.path.expanduser(settings.checkpoint.dir),
        "task_file": (module and module.origin) or "",
        "prepare": settings.prepare or "",
        "resume": settings.resume,
        "num_workers": settings.data.num_workers,
        "batch": {
            "samples": train.batch_size or 0,
            "samples_in_all": train.global_batch_size or 0,
            "accumulation": train.grad_accumulation,
        },
    }


def _parse_arguments(description: str) -> argparse.Namespace:
    """Return the arguments; for mistakes, --help and --version, exit.

    A config can be given as DIR and NAME, too. --distributed-backend becomes an override.
    """
    parser = _Parser(
        prog="train.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    parser.add_argument("--version", action="version", version=f"train.py {__version__}")
    config = parser.add_mutually_exclusive_group(required=True)
    config.add_argument("--config", "--config_path", metavar="FILE", type=Path, help="the config")
    config.add_argument("--config-path", dest="folder", metavar="DIR", type=Path, help="its folder")
    parser.add_argument("--config-name", metavar="NAME", help="its name in DIR")
    parser.add_argument("--check", action="store_true", help="only check the config")
    parser.add_argument("--json", action="store_true", help="with --check, --evaluate: print JSON")
    parser.add_argument(
        "--evaluate", metavar="CHECKPOINT", help="only evaluate a checkpoint, or a run's newest"
    )
    parser.add_argument("--distributed-backend", choices=BACKENDS, help="default: the config's")
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        type=str.upper,
        default=os.environ.get("LOG_LEVEL") or "INFO",
        help=f"{', '.join(LOG_LEVELS)}; or the variable LOG_LEVEL (default: INFO)",
    )

    parser.add_argument("--nodes", metavar="N", type=int, help="fail unless there are N nodes")
    parser.add_argument(
        "--gpus-per-node", metavar="N", type=int, help="fail unless each node has N ranks"
    )
    # torch.distributed.launch adds one of these.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    parser.set_defaults(launch_command=os.environ.get("LAUNCH_COMMAND"))

    arguments = parser.parse_intermixed_args()
    if (arguments.folder is None) != (arguments.config_name is None):
        parser.error("--config-path DIR and --config-name NAME go together")
    if arguments.folder:
        arguments.config = arguments.folder / with_ending(arguments.config_name)
    if arguments.log_level not in LOG_LEVELS:
        parser.error(f"log level {arguments.log_level} is not one of {', '.join(LOG_LEVELS)}")
    if arguments.distributed_backend:
        arguments.overrides.append(f"distributed.backend={arguments.distributed_backend}")
    return arguments
