"""Our variables, and values of other programs in variables of the same name.

A service called `master` sets MASTER_PORT=tcp://10.0.0.1:80 in all pods of its namespace, and many
scripts export CONTAINER, GRACE or RUN_ID for other programs. launch.sh replaces torchrun, which
reads none of them: there, a value that we cannot use is ignored, with a warning. Other scripts
reject it, because only our users set these variables for them.
"""

from dataclasses import replace

from distributed.environment import LauncherError
from launcher.plan.settings import VARIABLES, read_value
from launcher.plan.typed import Typed
from launcher.text import Environ, PlanError, warn


def read_own(typed: Typed, *, is_guest: bool) -> Typed:
    """Return what was typed, with our variables in our spelling and --log-level as LOG_LEVEL.

    `is_guest` means that the script may have been meant for torchrun, and not for our launchers:
    then a value that cannot be ours is dropped, with a warning. So is a URL, in any case, because
    a service sets it. For other values that cannot be ours, raises PlanError or LauncherError.
    """
    if typed.log_level:
        typed = replace(typed, environ={**typed.environ, "LOG_LEVEL": typed.log_level})

    own = {}
    for name in filter(typed.environ.get, sorted(VARIABLES)):
        given = typed.environ[name]
        is_overridden = getattr(typed, VARIABLES[name].field, None) is not None
        if is_overridden and not is_guest:  # a guest's ranks could read it: see hide()
            continue
        try:
            own[name] = read_value(name, given)
        except (PlanError, LauncherError) as error:
            is_url = "://" in given
            if not (is_guest or is_url):
                raise
            typed = drop(typed, error, name)
    return replace(typed, environ={**typed.environ, **own})


def drop(typed: Typed, error: PlanError | LauncherError, *names: str) -> Typed:
    """Return what was typed without the named variables, and warn of the error in them."""
    cause = str(error).removesuffix(f" [{error.fault}]")
    warn(f"{typed.program}: warning: {cause}; ignored")
    environ = {name: value for name, value in typed.environ.items() if name not in names}
    return replace(typed, environ=environ)


def hide(typed: Typed, own: Environ) -> Typed:
    """Return what was typed, without the dropped values that an agent or a rank would read.

    `own` has the variables that were not dropped, in our spelling.
    """
    hidden = [name for name in typed.environ if name in VARIABLES and VARIABLES[name].hidden]
    environ = {name: value for name, value in typed.environ.items() if name not in hidden}
    environ |= {name: own[name] for name in hidden if name in own}
    return replace(typed, environ=environ)
