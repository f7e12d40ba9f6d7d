"""What only torch's own elastic agent supports is handed to it, once its options are checked."""

from argparse import Namespace
from collections.abc import Sequence

import torch.distributed.run as torchrun
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.multiprocessing import errors

from launcher.agent.torch_internals import rendezvous_backends
from launcher.command_line import read_for_torch


def read_arguments(arguments: Sequence[str]) -> Namespace:
    """Return the arguments for torch's agent.

    Raises ValueError, with a one-line cause and fix, for invalid values that torch itself would
    report with a traceback.
    """
    args = read_for_torch(torchrun.parse_args, arguments)
    known = rendezvous_backends()
    if args.rdzv_backend not in known:
        cause = f"--rdzv-backend {args.rdzv_backend}: unknown"
        raise ValueError(f"{cause}; give one of {', '.join(sorted(known))}")

    handler = vars(args).get("event_log_handler") or "null"  # older torch lacks it
    try:
        handlers.get_logging_handler(handler)
    except KeyError as error:
        raise ValueError(f"--event-log-handler {handler}: unknown; give null or console") from error

    try:
        torchrun.config_from_args(args)  # checks the rest; torchrun.run() calls it again
    except ValueError as error:
        raise ValueError(f"{error}; see --help") from error
    return args


def run(args: Namespace) -> None:
    """Have torch's elastic agent run the ranks; raises what ends the run."""
    errors.record(torchrun.run)(args)
