"""The resume line: what was typed, with the variables that shaped the run."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from distributed.job import is_task
from launcher.plan import pbs, slurm
from launcher.plan.own import asked_names, find_own, read_begun
from launcher.plan.plan import ROOT
from launcher.plan.settings import TABLE, VARIABLES, in_order
from launcher.plan.typed import Typed, is_same
from launcher.text import OwnEnviron

# The names of other programs' variables that are sent over ssh, and repeated in a resume line.
_SENT = "|".join(name.replace("*", ".*") for setting in TABLE.values() for name in setting.sent)
FORWARDED = re.compile(f"(?!({'|'.join(TABLE['machines'].own)})$)({_SENT})")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS")


def resume_line(typed: Typed, fanout: str) -> str:
    """Return what was typed, with the variables that shaped the run; this line resumes the run.

    In a job, the line requests a job like this one; empty if that is not possible (see
    _repeat_words).
    """
    environ = typed.environ
    words = _repeat_words(typed, fanout)
    if not words:
        return ""

    # In a run, the failure block and the stopped line add RUN_ID themselves.
    names = ["RUN_ID"] if fanout == "job_command" else []
    names += in_order("resume")
    if fanout in ("ssh", "pdsh") or typed.nodefile:
        names += in_order("resume_over_ssh")
    is_batch = environ.get("PBS_ENVIRONMENT") == "PBS_BATCH"
    if typed.nodefile or is_batch:  # qsub -v passes CONFIG; secrets are omitted
        names += ["CONFIG", "PBS_ARRAY_INDEX", "PBS_ARRAYID"]
        names += [name for name in asked_names(environ) if not _SECRET.search(name)]
    names += _names_set_for_launch(typed)

    # read_own() has set LOG_LEVEL from --log-level, which the words repeat.
    given = {**environ, "LOG_LEVEL": ""} if typed.log_level else environ
    set_names = filter(given.get, dict.fromkeys(names))
    variables = [f"{name}={shlex.quote(given[name])}" for name in set_names]
    if environ.get("CONTAINER"):
        variables.append(f"PYTHON={shlex.quote(typed.python)}")
    return " ".join([*variables, shlex.join(words)])


def _repeat_words(typed: Typed, fanout: str) -> list[str]:
    """Return what was typed; in a job, preceded by the request of a job like this one.

    For that, SLURM or PBS is asked: the list is empty if the answer lacks what is needed, or if the
    user's own file asks PBS for a job array.
    """
    environ = typed.environ
    own = len(typed.typed) - len(typed.rest)  # the rest belongs to the training script
    # The line must start the run, and continue it from its checkpoints.
    words = [word for word in typed.typed[:own] if word not in ("--dry-run", "resume=never")]
    words += typed.typed[own:]

    script = resolve_script(typed.batch_script) if typed.batch_script else None
    if script and typed.nodefile:
        return pbs.job_command(environ, typed.here / script, words)
    if environ.get("PBS_ENVIRONMENT") == "PBS_BATCH":
        return pbs.own_command(environ, words)
    if script or fanout == "srun":
        return slurm.job_command(environ, script, words)
    return slurm.step_command(environ, words) if is_task(environ) else words


def _names_set_for_launch(typed: Typed) -> Iterator[str]:
    """Yield the names of PYTHON, PYTHONPATH and other programs' variables, if set for this launch.

    Secrets are omitted, and so is what the next launch gets anyway: the shell's initial variables,
    and those set by the scheduler, a site or an environment. May ask qstat.
    """
    environ = typed.environ
    begun = read_begun()
    omitted = {*typed.activated, *find_own(typed, begun).names, "PYTHON"}
    # resume_line() adds PYTHON for a container; the project's own environment is the default.
    if not environ.get("CONTAINER") and typed.python != str(ROOT / ".venv/bin/python"):
        omitted.remove("PYTHON")

    for name in sorted({*environ} - omitted):
        is_other = FORWARDED.fullmatch(name) and not _SECRET.search(name)
        is_wanted = is_other or name in ("PYTHON", "PYTHONPATH")
        if is_wanted and f"{name}={environ[name]}" not in begun:
            yield name


def forward_given(environ: OwnEnviron, given: Sequence[str]) -> None:
    """Add to FORWARD_ENV the variables that the user passed to the job (`given`).

    Those that the launcher reads, or forwards in any case, are not added.
    """
    asked = asked_names(environ)
    for name in given:
        if name in environ and name not in VARIABLES and not FORWARDED.fullmatch(name):
            asked.append(name)
    if asked:
        environ["FORWARD_ENV"] = " ".join(asked)


def resolve_script(script: str) -> str:
    """Return the path of one of the project's scripts; relative if run in the project's folder."""
    path = ROOT / script
    return script if is_same(path, Path(script)) else str(path)
