"""Our variables, and values of other programs in variables of the same name.

A service called `master` sets MASTER_PORT=tcp://10.0.0.1:80 in all pods of its namespace, and many
scripts export CONTAINER, GRACE or RUN_ID for other programs. launch.sh replaces torchrun, which
reads none of them: there, a value that we cannot use is ignored, with a warning. Other scripts
reject it, because only our users set these variables for them.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

from distributed.environment import LauncherError, check_run_id
from distributed.network import PROFILES
from launcher.plan.plan import MOST_RANKS, read_number
from launcher.plan.typed import Typed
from launcher.text import Environ, PlanError, did_you_mean, warn

NUMBERS = {  # the least and the most
    "GRACE": (0, 86_400),
    "HANG_SECONDS": (1, 10**6),
    "MASTER_PORT": (1, 65_535),
    "MAX_RESTARTS": (0, 1000),
    "MIN_NODES": (1, 100_000),
    "NPROC_PER_NODE": (1, MOST_RANKS),
    "PREFLIGHT_SECONDS": (5, 3600),
    "SILENCE_SECONDS": (10, 3600),
    "SPARES": (0, 1000),
}
WORDS = {
    "BACKEND": ("nccl", "gloo"),
    "FRESH": ("0", "1"),
    "LAUNCHER": ("agent", "srun"),
    "LOG_LEVEL": ("DEBUG", "INFO", "WARNING", "ERROR"),
    "MASTER_PORT": ("auto",),
    "NCCL_PROFILE": tuple(name for name in PROFILES if name),
    "NPROC_PER_NODE": ("auto", "gpu", "cpu"),
    "NUMA_BINDING": ("node", "socket", "exclusive", "core-complex"),
    "SHOW_RANKS": ("all", "0"),
    "SKIP_PREFLIGHT": ("0", "1"),
}
SHAPES = {"HOSTS": r"[^/=]+", "LOG_DIR": r"(?!\w+://).+"}
# The node agent and the ranks read these: they must not see another program's value.
_HIDDEN = (
    *("GRACE", "HANG_SECONDS", "HOSTS", "MASTER_ADDR", "MIN_NODES", "NUMA_BINDING", "RUN_ID"),
    *("SILENCE_SECONDS", "SPARES"),
)


def read_own(typed: Typed, *, is_guest: bool) -> Typed:
    """Return what was typed, with our variables in our spelling.

    Values of other programs are omitted; `is_guest`: the script may have been meant for torchrun.
    """
    read = {**typed.environ}
    if typed.log_level:
        read["LOG_LEVEL"] = typed.log_level
    arguments = {
        "MASTER_PORT": typed.port,
        "MAX_RESTARTS": typed.max_restarts,
        "NPROC_PER_NODE": typed.nproc,
    }

    for name in filter(read.get, sorted({"RUN_ID", *NUMBERS, *WORDS, *SHAPES})):
        if is_guest or arguments.get(name) is None:
            try:
                read[name] = read_value(name, read[name])
            except (PlanError, LauncherError) as error:
                ignore(typed, error, is_guest=is_guest or "://" in read[name])
                del read[name]

    return replace(typed, environ=read)


def find_value(name: str, environ: Environ) -> str:
    """Return a variable's value in our spelling; "" if it is not set, or cannot be ours."""
    with contextlib.suppress(PlanError, LauncherError):
        return read_value(name, environ.get(name, ""))
    return ""


def read_value(name: str, given: str) -> str:
    """Return a value in our spelling. Raises PlanError or LauncherError if it cannot be ours."""
    if name == "RUN_ID":
        return check_run_id(given)
    if name in SHAPES and re.fullmatch(SHAPES[name], given):
        return given
    words = WORDS.get(name, ())
    if found := [word for word in words if word.lower() == given.lower()]:
        return found[0]
    if name in NUMBERS:
        return str(read_number(name, given, *NUMBERS[name]))

    cure = f"choose from {', '.join(words)}" if words else "see --help"
    raise PlanError(f"{name} is {given!r}; {did_you_mean(given, words)}{cure}")


def ignore(typed: Typed, error: ValueError, *names: str, is_guest: bool) -> Typed:
    """Return what was typed without these variables, and warn.

    Raises the error if only our user can have set them.
    """
    if not is_guest:
        raise error
    cause = re.sub(r" \[[a-z-]+\]$", "", str(error))
    warn(f"{typed.program}: warning: {cause}; ignored")
    environ = {name: value for name, value in typed.environ.items() if name not in names}
    return replace(typed, environ=environ)


def hide(typed: Typed, own: Environ) -> Typed:
    """Return what was typed, without the ignored values that an agent or a rank would read."""
    environ = {
        name: own[name] if name in _HIDDEN else value
        for name, value in typed.environ.items()
        if name in own or name not in _HIDDEN
    }
    return replace(typed, environ=environ)
