"""Our variables, and values of other programs in variables of the same name.

A service called `master` sets MASTER_PORT=tcp://10.0.0.1:80 in all pods of its namespace, and many
scripts export CONTAINER, GRACE or RUN_ID for other programs. launch.sh replaces torchrun, which
reads none of them: there, a value that we cannot use is ignored, with a warning. Other scripts
reject it, because only our users set these variables for them.
"""

from __future__ import annotations

from dataclasses import replace

from distributed.environment import LauncherError
from launcher.plan.settings import VARIABLES, read_value
from launcher.plan.typed import Typed
from launcher.text import Environ, PlanError, warn


def read_own(typed: Typed, *, is_guest: bool) -> Typed:
    """Return what was typed, with our variables in our spelling and --log-level as LOG_LEVEL.

    A value that cannot be ours is omitted, with a warning, if it may be another program's. If not,
    raises PlanError or LauncherError. `is_guest` means that the script may have been meant for
    torchrun, and not for our launchers.
    """
    read = {**typed.environ}
    if typed.log_level:
        read["LOG_LEVEL"] = typed.log_level

    for name in filter(read.get, sorted(VARIABLES)):
        argument = getattr(typed, VARIABLES[name].field, None)
        # hide() keeps what is ignored from a guest's ranks, even if an argument overrides it.
        if is_guest or argument is None:
            try:
                read[name] = read_value(name, read[name])
            except (PlanError, LauncherError) as error:
                ignore(typed, error, is_guest=is_guest or "://" in read[name])  # a service's URL
                del read[name]

    return replace(typed, environ=read)


def ignore(typed: Typed, error: ValueError, *names: str, is_guest: bool) -> Typed:
    """Return what was typed without the variables `names`, and warn of `error`.

    Raises the error if `is_guest` is false: then only our user can have set them.
    """
    if not is_guest:
        raise error
    cause = str(error).removesuffix(f" [{getattr(error, 'fault', '')}]")
    warn(f"{typed.program}: warning: {cause}; ignored")
    environ = {name: value for name, value in typed.environ.items() if name not in names}
    return replace(typed, environ=environ)


def hide(typed: Typed, own: Environ) -> Typed:
    """Return what was typed, without the ignored values that an agent or a rank would read.

    `own` has the variables that were not ignored, in our spelling.
    """
    hidden = {name for name, setting in VARIABLES.items() if setting.hidden}
    environ = {
        name: own[name] if name in hidden else value
        for name, value in typed.environ.items()
        if name in own or name not in hidden
    }
    return replace(typed, environ=environ)
