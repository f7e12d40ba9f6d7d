"""What every script of scripts/ starts: read the command line, then launch.

python scripts/lib/start.py COMMAND ... WORDS      (run_command in scripts/lib/launch.sh)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from distributed.errors import BAD_INPUT
from launcher.cli.arguments import Call, parse
from launcher.outer_run import leave_outer_run
from launcher.plan.typed import UsageError
from launcher.text import mend_streams


def main(arguments: Sequence[str]) -> int:
    """Do what was typed; returns the exit code."""
    mend_streams()
    leave_outer_run(os.environ)
    size = len(Call._fields)
    call, words = Call(*arguments[:size]), arguments[size:]
    try:
        typed = parse(call, words)
        if typed.fanout in ("help", "version"):  # bash shows them, for that needs no Python
            os.execvp("bash", ["bash", call.file, f"--{typed.fanout}"])
        if typed.show is not None:
            os.environ["SHOW_RANKS"] = typed.show
    except UsageError as error:
        print(f"{call.program}: {error} [config-invalid]", file=sys.stderr)
        return BAD_INPUT
    return int(import_module("launcher.start").main(typed))  # imports most of launcher/
