"""--status, --stop and --stacks: list the runs in the log directory, stop one, show its stacks.

A run is stopped through its launcher; run.json names the process and the host. A file in the run's
folder asks node rank 0's agent for the stacks.
"""

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.environment import printable
from distributed.errors import BAD_INPUT, REFUSED
from launcher.command_line import split
from launcher.failure_block import find_kept, read_tail
from launcher.own_time import turns
from launcher.processes import ranks_of
from launcher.record.run_json import ASKED, LONGEST_FILE, SHOWN, Record, read
from launcher.text import count, did_you_mean, open_own, warn
from launcher.typed_json import parse_json
from launcher.wire import limits

TAIL_BYTES = 8192  # read from the end of a file, to find its last line
LONGEST = 100  # characters of that line to show
LONGEST_PROGRAM = 60
KILLED = "killed"  # the state of a run whose launcher, on this machine, recorded no end
ALL, MOST = "--all", 20  # runs that --status lists without --all


class CannotDo(Exception):
    """A run is not in the state that --stop or --stacks needs: `cause; cure`."""


@dataclass(frozen=True)
class Run:
    """One run in a log directory."""

    folder: Path
    record: Record

    @property
    def id(self) -> str:
        """The run id, which names its folder."""
        return self.folder.name

    @property
    def program(self) -> str:
        """The script and its arguments; empty until the agents have started."""
        return shlex.join(split(self.record.agent_arguments)[1])

    @property
    def written(self) -> float:
        """When run.json last changed, in seconds since the epoch."""
        return (self.folder / "run.json").stat().st_mtime

    @property
    def state(self) -> str:
        """The state in words; for a run on another machine, as recorded in run.json."""
        record = self.record
        if record.is_over:
            return f"ended, code {record.exit_code}"
        if record.launcher is None:
            return "unknown"
        if not record.launcher.is_here:
            return f"{record.state} on {record.launcher.host}, as of {date(self.written)}"
        return record.state if record.launcher.is_alive else KILLED

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, or its launcher was killed; unknown on another machine."""
        return self.record.is_over or self.state == KILLED

    @property
    def since(self) -> float:
        """When the run ended, or when it started if it has not ended."""
        return self.record.ended or self.record.started or self.written

    @property
    def cause(self) -> str:
        """Why the run failed, if it did, such as `[rank-error] ValueError: boom`."""
        record = self.record
        return f"[{record.fault}] {record.cause}" if record.exit_code and record.fault else ""


def find_all(log_dir: Path) -> list[Run]:
    """Return the runs in a log directory; the one that started or ended last comes first."""
    runs = []
    for folder in log_dir.iterdir() if log_dir.is_dir() else ():
        with contextlib.suppress(OSError):  # another user's, or a link
            if not folder.is_symlink() and (record := read(folder)):
                runs.append(Run(folder, record))
    return sorted(runs, key=lambda run: (run.since, run.id), reverse=True)


def find(log_dir: Path, run_id: str) -> Run:
    """Return the run with this id. Raises ValueError if there is none, naming a similar id."""
    runs = {run.id: run for run in find_all(log_dir)}
    if run_id in runs:
        return runs[run_id]
    raise ValueError(
        f"there is no run {run_id!r} in {log_dir}; "
        f"{did_you_mean(run_id, runs)}--status lists all runs"
    )


def describe(runs: Sequence[Run]) -> str:
    """Return a line for each run: its id, state and date, its step, its script and its progress.

    Columns that are empty for all runs are omitted.
    """
    rows = [
        (
            printable(run.id, LONGEST),
            printable(run.state, LONGEST),
            f"since {date(run.since)}",
            f"step {run.record.step}" if run.record.step >= 0 else "",
            printable(run.program, LONGEST_PROGRAM),
            printable(describe_progress(run), LONGEST),
        )
        for run in runs
    ]

    columns = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in columns]
    shown = zip(*columns, strict=True)
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in shown)


def describe_progress(run: Run) -> str:
    """Return why a run failed, otherwise its latest metrics, otherwise its last line of output.

    Empty if it has none of these. Metrics are numbers, without the step and the time.
    """
    if cause := run.cause:
        return cause

    with contextlib.suppress(ValueError, AttributeError, OSError):  # none, or not a JSON object
        values = parse_json(_last_line(run.folder / "metrics.jsonl"))
        newest = [
            f"{name} {value:.4g}"
            for name, value in values.items()
            # Not isinstance(): True and False are ints, too.
            if type(value) in (int, float) and name not in ("step", "time")
        ]
        return "  ".join(newest)

    logs = [run.folder / "node_0.log"]
    if run.record.state == "running":  # node rank 0's log may be only on that node's own disk
        logs += sorted(run.folder.glob("launcher_*.log"))
    for log in logs:
        with contextlib.suppress(OSError):
            if line := _last_line(log):
                return line
    return ""


def describe_goodput(record: Record, now: float) -> str:
    """Return a line with the share of the latest start's time that was spent on training.

    It names the time lost by starting, and by each fault that led to a restart, until the step of
    the failure was reached again. `now`, in seconds since the epoch, ends a live run.
    """
    started = record.started or now
    end = record.ended or now
    restarts = [restart for restart in record.restarts if restart.failed >= started]
    losses = {"start": record.first_step - started} if record.first_step else {}
    for restart in restarts:
        lost_s = restart.lost_s or end - restart.failed  # 0: the run has not caught up yet
        losses[restart.fault] = losses.get(restart.fault, 0.0) + lost_s
    share = max(0.0, 1 - sum(losses.values()) / max(end - started, 1e-9))
    lost = ", ".join(f"{seconds:.1f} s {kind}" for kind, seconds in losses.items())
    return f"goodput  {100 * share:.0f} %: {count(len(restarts), 'restart')}, {lost}"


def _last_line(file: Path) -> str:
    """Return the last non-blank line in the last TAIL_BYTES of a file; empty if there is none."""
    lines = reversed(read_tail(file, TAIL_BYTES, open_own).splitlines())
    return next(filter(None, map(str.strip, lines)), "")


def date(seconds: float) -> str:
    """Return a time in seconds since the epoch as the local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


# --- the command line ---------------------------------------------------------------------------


def main(task: str, words: Sequence[str], log_dir: Path, program: str, *, is_dry_run: bool) -> int:
    """Do what --status, --stop or --stacks asks for. `words` are those after it.

    Returns the exit code; prints a line for BAD_INPUT, if there is no such run, and for REFUSED.
    """
    try:
        if task == "status":
            return print_status(log_dir, words, program)
        if len(words) != 1:
            raise ValueError(f"--{task} needs one run id; --status lists all runs")
        run = find(log_dir, words[0])
        if task == "stacks":
            return show_stacks(run)
        return stop(run, program, is_dry_run=is_dry_run)
    except (ValueError, OSError, CannotDo) as error:
        warn(f"{program}: {error}")
        return BAD_INPUT if isinstance(error, ValueError) else REFUSED


def print_status(log_dir: Path, words: Sequence[str], program: str) -> int:
    """Print the newest runs or, if `words` name some, those, with failure blocks or process ids.

    Returns the exit code, 0. Raises ValueError if there is no such run.
    """
    run_ids = [word for word in words if word != ALL]
    found = [find(log_dir, run_id) for run_id in run_ids] or find_all(log_dir)

    if not found:
        warn(f"{program}: there are no runs in {log_dir}")
        return 0

    runs = found if run_ids or ALL in words else found[:MOST]
    print(describe(runs))
    if len(runs) < len(found):
        warn(f"{program}: the newest {MOST} of {len(found)} runs; --status {ALL} lists all")
    if run_ids:
        for run in runs:
            _print_details(run)
    return 0


def _print_details(run: Run) -> None:
    """Print what restarts have cost, then the failure block or stopped line that the run kept.

    A live run has kept none: print the process ids of its ranks on this machine, if any.
    """
    if run.record.restarts:
        print(describe_goodput(run.record, time.time()))
    if kept := find_kept(run.folder):
        print(kept)
    elif not run.record.is_over and (ranks := ranks_of(run.id)):
        print("here  " + "  ".join(f"{name} pid {pid}" for name, pid in ranks.items()))


def show_stacks(run: Run) -> int:
    """Print the stacks of all ranks of a run, which continues. Returns the exit code, 0.

    Asks node rank 0's agent with a file in the run's folder, and waits for the answer in SHOWN.
    Raises CannotDo if the run is not live, or if the agent does not answer in time; then the
    request is removed. Raises OSError if the folder is not writable.
    """
    if run.has_ended:
        raise CannotDo(f"run {run.id} is not running: {run.state}; it has no stacks")

    shown = run.folder / SHOWN
    size = shown.stat().st_size if shown.exists() else 0  # of earlier answers
    open_own(run.folder / ASKED, "a").close()

    limit_s = limits.for_nodes(limits.STACKS_SHOW_S, len(run.record.hosts))
    for _ in turns(limit_s, 5 * limits.POLL_S):
        with contextlib.suppress(OSError), open_own(shown, "rb") as file:
            file.seek(size)
            if (text := file.read(LONGEST_FILE)).endswith(b"\n"):
                print(*map(printable, text.decode(errors="replace").splitlines()), sep="\n")
                return 0

    (run.folder / ASKED).unlink(missing_ok=True)
    raise CannotDo(
        f"the node agent of run {run.id} did not answer within {limit_s:g} s; "
        "check that it is running, and that this is its LOG_DIR"
    )


def stop(run: Run, program: str, *, is_dry_run: bool) -> int:
    """Send SIGTERM to a run's launcher, wait until it has ended, and print the run's status.

    Its ranks may save first, so the wait takes up to the run's GRACE and STOP_COMMAND_S seconds;
    Ctrl-C ends it. A dry run prints the command. Returns the exit code, 0. Raises CannotDo if the
    run is not live on this machine, or has not ended after the wait.
    """
    launcher = run.record.launcher
    limit_s = run.record.grace + limits.STOP_COMMAND_S
    if run.has_ended or launcher is None:
        cause = ", ".join(filter(None, (run.state, printable(run.cause))))
        raise CannotDo(f"run {run.id} is not running: {cause}; there is nothing to stop")
    if not launcher.is_here:
        raise CannotDo(f"run {run.id} is {run.state}; stop it on {launcher.host}")
    if is_dry_run:
        print(f"kill -TERM {launcher.process}")
        return 0

    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(launcher.process, signal.SIGTERM)
    warn(f"{program}: asked run {run.id} to stop; waiting up to {limit_s:.0f} s for it to end")
    with contextlib.suppress(KeyboardInterrupt):  # the user stops waiting
        for _ in turns(limit_s, 5 * limits.POLL_S):
            if not launcher.is_alive:
                break

    if launcher.is_alive:
        cure = f"kill -KILL {launcher.process} ends it without saving"
        raise CannotDo(f"run {run.id} has not ended yet; {cure}")
    return print_status(run.folder.parent, [run.id], program)
