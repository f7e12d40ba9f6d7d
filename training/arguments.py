"""train.py's command line. Needs no torch: what is wrong is refused before that second is spent."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from training.settings import Settings, SettingsError, load

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
DEBUG_VARIABLES = {  # torch's and NCCL's own output, unless the user chose otherwise
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "NCCL_DEBUG": "INFO",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(f"{message}; see train.py --help")


def refuse(cause: object) -> NoReturn:
    """Say in one line what the user got wrong, and leave."""
    print(f"train.py: {cause}", file=sys.stderr)
    sys.exit(2)


def start(description: str) -> tuple[argparse.Namespace, Settings]:
    """Read the arguments and the config; with --check, or where they are wrong, it ends here."""
    arguments = _parse(description)
    try:
        settings = load(arguments.config, arguments.overrides)
    except SettingsError as error:
        refuse(error)
    if arguments.check:
        _print_facts(settings)
        sys.exit(0)
    if arguments.log_level == "DEBUG":
        for name, value in DEBUG_VARIABLES.items():
            os.environ.setdefault(name, value)
    return arguments, settings


def _parse(description: str) -> argparse.Namespace:
    parser = _Parser(
        prog="train.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--config", "--config_path", metavar="FILE", type=Path)
    place.add_argument("--config-path", dest="folder", metavar="DIR", type=Path)
    parser.add_argument("--config-name", metavar="NAME", help="of the config in DIR")
    parser.add_argument("--check", action="store_true", help="check the config, start nothing")
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"))
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        default=os.environ.get("LOG_LEVEL") or "INFO",
        help=f"{', '.join(LOG_LEVELS)}; or the variable LOG_LEVEL (default: INFO)",
    )
    # torch.distributed.launch adds one of these.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    arguments = parser.parse_intermixed_args()
    if (arguments.folder is None) != (arguments.config_name is None):
        parser.error("--config-path DIR and --config-name NAME go together")
    if arguments.folder:
        arguments.config = arguments.folder / f"{arguments.config_name.removesuffix('.yaml')}.yaml"
    arguments.log_level = arguments.log_level.upper()
    if arguments.log_level not in LOG_LEVELS:
        parser.error(f"log level {arguments.log_level} is none of {', '.join(LOG_LEVELS)}")
    if arguments.distributed_backend:
        arguments.overrides.append(f"distributed.backend={arguments.distributed_backend}")
    return arguments


def _print_facts(settings: Settings) -> None:
    """Print what launchers need to know of the config."""
    print(f"backend={settings.distributed.backend}")
    print(f"strategy={settings.distributed.strategy}")
    print(f"join_timeout={settings.distributed.join_timeout:g}")
    print(f"checkpoint_dir={settings.checkpoint.dir}")
