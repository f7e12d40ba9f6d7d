"""Fan-out to this machine only: check it, and become its node agent.

If the nodes are started separately, by hand or by srun, the launcher on each uses this fan-out.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from distributed.errors import REFUSED, Refused
from distributed.stop_signals import STOP_SIGNALS
from launcher.fanout import transcript
from launcher.plan.own import THREADS, find_own, read_begun
from launcher.plan.plan import AGENT, BeReady, Plan, node_comment, print_plan
from launcher.preflight import compare
from launcher.preflight.check_node import check_node, read_report
from launcher.text import count, print_row, short_host_name, warn
from launcher.typed_json import encode
from launcher.wire.messages import Report


def run(plan: Plan, be_ready: BeReady) -> int:  # noqa: RET503 - exec does not return
    """Check this node, print the plan, and execute the node agent, which starts the ranks.

    Returns only if nothing was started: REFUSED if a check failed, 0 after a dry run. Raises
    Refused if the preflight does not start in the container.
    """
    if plan.has_transcript and not plan.is_dry_run and not plan.is_detached:
        transcript.copy_output_to(transcript.new_file(plan))
    report = check_here(plan)
    outcome = compare.combine([report])
    is_ill = compare.print_findings(outcome, plan.program, is_strict=plan.is_strict, out=sys.stderr)
    if is_ill and not plan.is_dry_run:  # a dry run may be on a login node, which has no GPU
        return REFUSED

    nproc = report.nproc
    port = report.port
    counts = plan.rank_counts(nproc)
    print_plan(plan, report, outcome, counts)
    command = plan.inside(plan.agent_command(nproc=nproc, port=port, node_rank=plan.node_rank))

    if plan.is_dry_run:
        print(node_comment(plan, plan.node_rank, report.host, counts, port))
        print(plan.shell_line(plan.with_variables(command)))
        return 0
    if plan.has_health_check and plan.has_checks and not check_health(plan, nproc):
        return REFUSED

    # A signal that arrives now is left to the agent's supervisor, or ends a container's start.
    signal.pthread_sigmask(signal.SIG_UNBLOCK if plan.container else signal.SIG_BLOCK, STOP_SIGNALS)
    be_ready()
    # The agent's supervisor is the launcher; the token marks the run's processes.
    added = {"LAUNCH_START": "local", "LAUNCH_TOKEN": os.urandom(16).hex()}
    given = {**plan.environ, **plan.run_variables(), **added}
    if nproc > 1 and find_own(plan, read_begun()).is_default:
        del given[THREADS]  # PBS's choice, which is for one rank
    os.chdir(plan.directory)
    os.execvpe(command[0], command, given)


def check_here(plan: Plan) -> Report:
    """Return what the preflight finds on this machine, in the run's container if it has one.

    A dry run starts no container. Raises Refused if the preflight does not start in it.
    """
    if plan.is_dry_run or not plan.container:
        return check_node(plan.request(), plan.environ)

    check = [*plan.module_command("launcher.preflight.check_node"), encode(plan.request())]
    if report := read_report(plan.run_inside(check, stdout=subprocess.PIPE).stdout.encode()):
        return report
    raise Refused(
        "env-missing",
        f"the preflight did not start in {plan.container}, see above; its Python is {plan.python}: "
        "set PYTHON, or bind more folders with CONTAINER_ARGS",
    )


def check_health(plan: Plan, nproc: int) -> bool:
    """Start `nproc` ranks on this node alone, and wait until they have tested each other.

    Prints and returns whether they can work together.
    """
    start = time.monotonic()
    # --standalone limits the test to this node and a free port, even in a step of a SLURM job.
    agent = [plan.python, str(plan.root / AGENT), "--standalone", "--nproc-per-node", str(nproc)]
    command = [*agent, "-m", "distributed.selftest", "--test", "basic"]
    # `-m distributed.selftest` is found in the working directory.
    container = plan.container and replace(plan.container, directory=plan.root)
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    result = replace(plan, container=container).run_inside(command, cwd=plan.root, **output)

    if result.returncode != 0:
        sys.stderr.write(result.stdout)
        warn(
            f"{plan.program}: the processes on {short_host_name()} cannot work together "
            f"(exit code {result.returncode}, see above); see TROUBLESHOOTING.md"
        )
        return False

    print_row(
        "health",
        f"this node alone, {count(nproc, 'process', 'processes')}: "
        f"ok in {time.monotonic() - start:.0f} s",
    )
    return True
