"""train.py's command line. Needs no torch: what is wrong is refused before that second is spent."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from distributed import __version__
from distributed.environment import Environment, LauncherError
from training.settings import Settings, SettingsError, load

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(f"{message}; see train.py --help")


def refuse(cause: object) -> NoReturn:
    """Say in one line what the user got wrong, and leave. Of an srun's tasks the first says it.

    The others leave after it, with the same code also where they are ended with it.
    """
    other_task = "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_PROCID") != "0"
    of_this_host = type(cause) is ValueError
    if other_task and "RANK" not in os.environ and not of_this_host:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.sigtimedwait([signal.SIGTERM], 2)
    else:
        _complain(str(cause))
    sys.exit(2)


def _complain(cause: str) -> None:
    fault = "" if cause.endswith("]") else " [config-invalid]"
    print(f"train.py: {cause}{fault}", file=sys.stderr)


@contextlib.contextmanager
def refuse_together(environment: Environment) -> Iterator[None]:
    """Where any rank finds a mistake of the user's in here, rank 0 says it, and all leave."""
    import torch.distributed as dist

    from distributed.checkpoint import CheckpointError
    from distributed.errors import Refused
    from distributed.torch import barrier, finish

    mistake = None
    try:
        yield
    except (SettingsError, LauncherError, CheckpointError, Refused) as error:
        mistake = str(error) if environment.is_main else f"rank {environment.rank}: {error}"
    mistakes = [mistake] * environment.world_size
    if environment.world_size > 1:
        dist.all_gather_object(mistakes, mistake)
    if first := next(filter(None, mistakes), None):
        if environment.is_main:
            _complain(first)
        barrier()  # as soon as one leaves, the launcher ends the others
        if not environment.is_main:
            with contextlib.suppress(RuntimeError):
                barrier()  # ended by rank 0, which has said why and leaves first
        atexit.register(finish, 2)  # gloo's threads can abort an interpreter that is taken down
        sys.exit(2)


def start(description: str) -> tuple[argparse.Namespace, Settings]:
    """Read the arguments and the config; with --check, or where they are wrong, it ends here."""
    arguments = _parse(description)
    # A task of the user's own may lie in this folder or in the config's.
    sys.path += [str(Path.cwd()), str(arguments.config.resolve().parent)]
    try:
        settings = load(arguments.config, arguments.overrides)
        if arguments.check and (world_size := os.environ.get("WORLD_SIZE")):  # where it is known
            settings.train.batch_size_on(int(world_size))
    except SettingsError as error:
        refuse(error)
    if arguments.check and arguments.json:  # for launchers
        facts = settings.distributed.model_dump(include={"backend", "strategy", "join_timeout"})
        print(json.dumps(facts | {"checkpoint_dir": settings.checkpoint.dir}))
        sys.exit(0)
    if arguments.check:  # what the bash launchers still read
        print(f"backend={settings.distributed.backend}")
        print(f"strategy={settings.distributed.strategy}")
        print(f"join_timeout={settings.distributed.join_timeout:g}")
        print(f"checkpoint_dir={settings.checkpoint.dir}")
        sys.exit(0)
    if arguments.log_level == "DEBUG":  # torch and NCCL too, unless the user chose otherwise
        for name in ("TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "NCCL_DEBUG"):
            os.environ.setdefault(name, "INFO")
    return arguments, settings


def _parse(description: str) -> argparse.Namespace:
    parser = _Parser(
        prog="train.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"train.py {__version__}")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--config", "--config_path", metavar="FILE", type=Path)
    place.add_argument("--config-path", dest="folder", metavar="DIR", type=Path)
    parser.add_argument("--config-name", metavar="NAME", help="of the config in DIR")
    parser.add_argument("--check", action="store_true", help="check the config, start nothing")
    parser.add_argument("--json", action="store_true", help="with --check: the result as JSON")
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"))
    level = os.environ.get("LOG_LEVEL") or "INFO"
    levels = f"{', '.join(LOG_LEVELS)}; or the variable LOG_LEVEL (default: INFO)"
    parser.add_argument("--log-level", metavar="LEVEL", type=str.upper, default=level, help=levels)
    parser.add_argument("--nodes", metavar="N", type=int, help="how many there must be")
    parser.add_argument("--gpus-per-node", metavar="N", type=int, help="ranks on each, likewise")
    # torch.distributed.launch adds one of these.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    arguments = parser.parse_intermixed_args()
    if (arguments.folder is None) != (arguments.config_name is None):
        parser.error("--config-path DIR and --config-name NAME go together")
    if arguments.folder:
        arguments.config = arguments.folder / f"{arguments.config_name.removesuffix('.yaml')}.yaml"
    if arguments.log_level not in LOG_LEVELS:
        parser.error(f"log level {arguments.log_level} is none of {', '.join(LOG_LEVELS)}")
    if arguments.distributed_backend:
        arguments.overrides.append(f"distributed.backend={arguments.distributed_backend}")
    return arguments
