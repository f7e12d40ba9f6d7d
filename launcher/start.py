"""Start a run: the program behind every script in scripts/.

python scripts/lib/start.py COMMAND ... WORDS      (run_command in scripts/lib/launch.sh)

It reads the command line, makes the plan, has the config checked, and lets the fan-out do the rest:
check the nodes, print the plan, start the agents, wait for them. A fan-out is a module with one
function, `run`, which calls `be_ready()` after the last check, before it starts the first agent.
"""

import importlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from distributed.environment import DEFAULT_LOG_DIR, LauncherError
from distributed.errors import BAD_INPUT, REFUSED, Refused
from distributed.hostlist import HostlistError
from distributed.job import job_id
from distributed.lock import is_locked, locked_by
from distributed.stop_signals import NOTICES, handled_signals
from launcher.cli.arguments import Call, parse
from launcher.fanout import detach
from launcher.interrupt import leave_unstarted
from launcher.outer_job import leave_outer_job
from launcher.outer_run import leave_outer_run
from launcher.own_time import turns
from launcher.plan import pbs, resume, slurm, submit_with_config
from launcher.plan.check_config import check_config
from launcher.plan.idle import find_idle
from launcher.plan.make_plan import make_plan
from launcher.plan.plan import BeReady, Plan
from launcher.plan.script import check_script, show_help
from launcher.plan.settings import read_value
from launcher.plan.typed import Typed
from launcher.processes import outlive_others
from launcher.record import run_json, runs
from launcher.text import Environ, OwnEnviron, PlanError, short_host_name, warn
from launcher.wire import limits


def main(arguments: Sequence[str], environ: OwnEnviron) -> int:
    """Run the command that was typed. Returns the exit code. Prints one line if it is refused.

    At the end, cancels the later jobs of a chain that are not needed. If nothing was started, ends
    the step of which this process is a task. Changes `environ`.
    """
    outlive_others()
    leave_outer_run(environ)
    size = len(Call._fields)
    call = Call(*arguments[:size])

    code = 1  # of an exception that none of these cases expects
    try:
        code = _start(call, arguments[size:], environ)
    except Refused as error:
        warn(f"{call.program}: {short_host_name()}: {error}")
        if error.fault == "run-is-live":
            environ.pop("CHAIN", None)  # the live run needs the jobs of its chain
        code = REFUSED
    except (PlanError, LauncherError, HostlistError) as error:
        has_fault = getattr(error, "fault", "")  # then the text ends with it
        warn(f"{call.program}: {error}{'' if has_fault else ' [config-invalid]'}")
        code = BAD_INPUT
    except PermissionError as error:
        warn(
            f"{call.program}: {short_host_name()}: {error.filename!r}: {error.strerror}; "
            "correct its permissions, or choose another (logs: LOG_DIR) [dir-unwritable]"
        )
        code = REFUSED
    except SystemExit as leave:  # a wrong config, or a stop before the start
        code = int(leave.code or 0)
    finally:
        slurm.end_chain(code, environ)

    if code in (BAD_INPUT, REFUSED):
        slurm.end_step(environ)
    return code


def _start(call: Call, words: Sequence[str], environ: OwnEnviron) -> int:
    """Do what was typed: show something, submit a job, or run. Returns the exit code.

    Raises what main() catches.
    """
    leave_outer_job(environ)
    typed = parse(call, words, environ)
    if typed.fanout in ("help", "version"):  # bash prints these, because that needs no Python
        os.execvp("bash", ["bash", call.file, f"--{typed.fanout}"])
    if typed.show is not None:
        environ["SHOW_RANKS"] = read_value("SHOW_RANKS", typed.show)

    if typed.fanout in ("status", "stop", "stacks"):
        return runs.main(
            typed.fanout,
            typed.rest,
            Path(typed.log_dir or environ.get("LOG_DIR") or DEFAULT_LOG_DIR),
            typed.program,
            is_dry_run=typed.is_dry_run,
        )
    if typed.fanout == "submit":
        return submit_with_config.run(typed)
    return _launch(typed, environ)


def _launch(typed: Typed, environ: OwnEnviron) -> int:
    """Make the plan, warn of what does not suit the job, and let the fan-out run it.

    Returns the exit code: the run's, or that of a script that only shows its help. With the fan-out
    `local`, a run does not return: this process executes the node agent. Until the fan-out handles
    them, a stop signal ends this process, and a notice is pending.
    """
    for signum in handled_signals():
        signal.signal(signum, leave_unstarted)
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)  # pending until the fan-out handles them
    pbs.add_tools_to_path(environ)
    pbs.set_launch_job(environ)
    resume.forward_given(environ, pbs.names_from_qsub(environ))

    plan = make_plan(typed)
    check_script(plan)
    if (shown := show_help(plan)) is not None:
        return shown

    warnings = [find_idle(plan)]
    if plan.node_rank == 0:
        warnings.append(pbs.describe_missing_qstat(environ))
        if not typed.module:
            warnings.append(pbs.describe_short_delay(plan.grace_s, environ))
    for warning in filter(None, warnings):
        warn(f"{typed.program}: warning: {warning}")

    be_ready = claim_run(plan, typed.typed[0])
    fanout = importlib.import_module(f"launcher.fanout.{plan.fanout}")
    code: int = fanout.run(check_config(plan), be_ready)
    run_json.note_end(plan.folder, code % 256)
    return code


def end_earlier_start(folder: Path, environ: Environ, grace_s: float) -> None:
    """If an earlier start of this job is still running the run, have it save and stop.

    A scheduler that has lost contact with a node starts its job again elsewhere, and cannot end the
    first start. Its agent reads run.json, to which this adds the new start. Waits for GRACE and
    STOP_COMMAND_S at most, and then returns even if the earlier start has not stopped.
    """
    if not (job_id(environ) and is_locked(folder)):  # outside a job, refuse_live() has refused
        return

    wait_s = grace_s + limits.STOP_COMMAND_S
    _, host = locked_by(folder)
    warn(f"waiting up to {wait_s:g} s for this job's earlier start, on {host}, to save and stop")
    run_json.update(folder, job=run_json.this_start(environ))
    for _ in turns(wait_s, limits.LOOK_S):
        if not is_locked(folder):
            break


def claim_run(plan: Plan, script: str) -> BeReady:
    """Make this launch the only one of its run. Returns the function that notes the start.

    A fan-out calls the returned function after its last check, before it starts the first agent.
    With --detach, this function forks and returns only in the child, which the returned function
    then detaches from the terminal. Raises PlanError if a detached run has no id, and Refused if a
    live run has the same id.
    """
    if plan.is_dry_run:
        return lambda: None

    is_first = plan.node_rank == 0
    if is_first:
        run_json.refuse_live(plan.folder, plan.environ)
        end_earlier_start(plan.folder, plan.environ, plan.grace_s)
    leave_terminal = detach.fork_launcher(plan, script) if plan.is_detached else lambda: None

    def be_ready() -> None:
        """Record the start, on node rank 0; let a detached run leave the terminal."""
        if is_first:
            run_json.note_start(
                plan.folder,
                plan.environ,
                detached=plan.is_detached,
                grace=plan.grace_s,
                command=plan.command,
            )
        leave_terminal()

    return be_ready
