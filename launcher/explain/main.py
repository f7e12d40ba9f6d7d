"""Find the first real cause in a training log of any launcher:

    scripts/explain.sh             what ended the newest run of LOG_DIR (default: logs)
    scripts/explain.sh RUN         what ended a run of LOG_DIR, by its id
    scripts/explain.sh LOG...      log files, of any launcher; - reads standard input
    scripts/explain.sh FAULT       a fault's section of TROUBLESHOOTING.md

Prints the fault's name, the rank, the line and which section of TROUBLESHOOTING.md to read. If the
log or the run ends with this project's own failure block, prints that block; if this project
refused the start, prints the refusals and their sections. Exits with 0 if it finds a cause, with 1
if there is none, and with 2 if a file cannot be read.
"""

import shutil
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from distributed.environment import DEFAULT_LOG_DIR, printable
from distributed.errors import BAD_INPUT
from launcher.descriptors import anonymous_file
from launcher.explain.kinds import Kind
from launcher.explain.reading import (
    Sighting,
    find_ranks,
    find_refusals,
    read,
    sections,
    shape_of,
    strip_prefix,
)
from launcher.failure import one_line
from launcher.failure_block import find_end
from launcher.record.run_json import KEPT
from launcher.record.run_json import read as read_record
from launcher.record.runs import KILLED, describe, find_all
from launcher.text import Environ, count, did_you_mean, name_ranks, warn

STDIN = "-"  # as the name of a log
COPIES = Path("/proc/self/fd")


def main(arguments: Sequence[str], environ: Environ, program: str = "explain") -> int:
    """Run the command line, on the newest run if it names nothing. Returns the exit code.

    If a name leads to no log, prints the state of the run with that id, or what to give instead.
    """
    log_dir = Path(environ.get("LOG_DIR") or DEFAULT_LOG_DIR)
    names = arguments or [find_newest(log_dir)]

    try:
        return explain([*map(_copy_if_pipe, names)], log_dir)
    except OSError as error:
        name = str(error.filename)
        runs = find_all(log_dir)
        if starting := [run for run in runs if run.id == name]:
            print(describe(starting))  # the run has no log yet
            return 1

        cure = "there is no run yet; give a FILE, or correct LOG_DIR"
        if arguments or runs:
            known = [*sections(), *(run.id for run in runs)]
            cure = f"{did_you_mean(name, known)}give a RUN, a FILE or a FAULT"
        warn(f"{program}: {name}: {error.strerror}; {cure}")
        return BAD_INPUT


def find_newest(log_dir: Path) -> str:
    """Return the id of the newest run; if that run has no record, the path of the link to it."""
    link = log_dir / "latest"
    ids = [run.id for run in find_all(log_dir)]  # the newest comes first
    lacks_record = link.is_dir() and link.resolve().name not in ids
    return str(link) if lacks_record or not ids else ids[0]


def _copy_if_pipe(name: str) -> str:
    """Return the path of a copy of a pipe or of standard input; any other name as it is.

    A log is read several times, and a pipe can be read only once. The copy has no name; its path
    leads to a descriptor, which stays open. Raises OSError with this name.
    """
    if name != STDIN and not Path(name).is_fifo():
        return name
    try:
        source = open(0 if name == STDIN else name, "rb", closefd=name != STDIN)  # noqa: SIM115
        fd = anonymous_file("log")
        with open(fd, "wb", closefd=False) as copy:
            shutil.copyfileobj(source, copy)
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None
    return str(COPIES / str(fd))


def explain(names: Sequence[str], log_dir: Path) -> int:
    """Print what ended the runs or logs that are named, or the section of a fault.

    That is a failure block or stopped line that ends a log; without one, the lines that refused the
    start, or the best cause. Returns the exit code: 1 if there is no failure. Raises OSError if a
    log cannot be read.
    """
    # The logs of a run that ended well may contain the failure of an earlier start.
    if all(has_ended_well(name, log_dir) for name in names):
        print(f"no failure: {', '.join(names)} ended with code 0")
        return 1

    files = [file for name in names for file in find_logs(name, log_dir)]
    if not files[0].exists() and names[0] in sections():
        print(sections()[names[0]])
        return 0

    first_end = next(filter(None, [find_end(file, strip_prefix) for file in files]), "")
    has_stopped = first_end.startswith("stopped")
    refusals = dict[str, str]()
    for file in files:
        refusals |= find_refusals(file, has_stopped=has_stopped)

    if first_end:
        if has_stopped:  # perhaps because one node had refused, and the others waited for it
            print_refusals(refusals)
        print(first_end)
        return 0

    sightings = [seen for file in files for seen in read(file) if seen.text not in refusals]
    cause = find_cause(sightings)
    says_less = cause is None or cause.kind >= Kind.WARNING  # than a refusal
    if refusals and says_less:
        print_refusals(refusals)
        return 0
    if cause is None:
        print(f"no failure found in {count(len(files), 'file')}")
        print_states({file.resolve().parent for file in files}, log_dir)
        return 1

    print_cause(cause, sightings, find_ranks(cause, files))
    return 0


def print_states(folders: Container[Path], log_dir: Path) -> None:
    """Print the states of the runs in these folders, and for a killed launcher the resume line."""
    runs = [run for run in find_all(log_dir) if run.folder.resolve() in folders]
    if runs:
        print(describe(runs))
    for run in runs:
        if run.state == KILLED and (gone := run.record.launcher):
            print(
                f"the launcher (pid {gone.process} on {gone.host}) is gone "
                f"[launcher-killed]\nresume   RUN_ID={run.id} {run.record.command}"
            )


def print_refusals(refusals: Mapping[str, str]) -> None:
    """Print the lines that refused a start, and the sections of their faults."""
    for line in refusals:
        print(printable(line))
    for fault in dict.fromkeys(refusals.values()):
        print(sections()[fault])


def has_ended_well(name: str, log_dir: Path) -> bool:
    """Return whether a word of the command line names a run that ended with code 0."""
    record = read_record(Path(name)) or read_record(log_dir / name)
    return record is not None and record.exit_code == 0


def find_logs(name: str, log_dir: Path) -> list[Path]:
    """Return the logs that a word of the command line names.

    For a run or its folder, that is the block that its launcher kept; without one, the logs of its
    nodes. Any other word is returned as a path, which may not exist.
    """
    for place in (Path(name), log_dir / name):
        if (place / KEPT).is_file():
            return [place / KEPT]
        if place.is_dir() and (files := sorted(filter(Path.is_file, place.glob("node_*.log")))):
            return files
    return [Path(name)]


def find_cause(sightings: Sequence[Sighting]) -> Sighting | None:
    """Return the sighting that states the cause best; the first, if there are several."""
    causes = [sighting for sighting in sightings if sighting.kind != Kind.CONSEQUENCE]
    return min(causes, key=lambda sighting: sighting.kind, default=None)


def print_cause(cause: Sighting, sightings: Sequence[Sighting], ranks: Sequence[int]) -> None:
    """Print a cause in the form of the failure block.

    `sightings` are all that the logs have, of which others are counted; `ranks` printed the same
    error as the cause.
    """
    where = f" ({cause.host})" if cause.host else ""
    also = []
    if same := [rank for rank in ranks if f"rank {rank}" != cause.rank]:
        also.append(f"{name_ranks(same)} with the same error")
    if others := sum(shape_of(seen.text) != shape_of(cause.text) for seen in sightings):
        lines = count(others, "other line mentions", "other lines mention")
        also.append(f"{lines} a failure, probably as a consequence")

    file = STDIN if cause.file.is_relative_to(COPIES) else cause.file
    rows = [
        ("FAILED", f"{cause.rank or 'a rank'}{where}       [{cause.fault}]"),
        ("cause", one_line(cause.text)),
        *(("", frame) for frame in cause.frames),
        ("others", "; ".join(also)),
        ("log", f"{file}:{cause.line}"),
        ("see", f"TROUBLESHOOTING.md#{cause.fault}"),
    ]

    for name, text in rows:
        if text:
            print(f"{name:<8} {printable(text)}")
