"""Find the first real cause in a training log, whoever wrote it (scripts/explain.sh):

    python -m launcher.explain             what ended the newest run of LOG_DIR (default: logs)
    python -m launcher.explain RUN         what ended a run of LOG_DIR, by its id
    python -m launcher.explain LOG...      files, of any launcher
    python -m launcher.explain FAULT       a fault's section of TROUBLESHOOTING.md

Prints the fault's name, the rank, the line and the section of TROUBLESHOOTING.md; or, where this
project's own block ends the log or the run, that block; or, where it refused to start, its lines
and their sections. Ends with 0 if it found a cause, with 1 if
there is none, and with 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from distributed.environment import DEFAULT_LOG_DIR, printable
from distributed.errors import BAD_INPUT
from launcher.explain.kinds import Kind
from launcher.explain.reading import Sighting, find_ranks, find_refusals, read, shape_of
from launcher.failure import one_line
from launcher.failure_block import find_end
from launcher.record.run_json import KEPT
from launcher.record.run_json import read as read_record
from launcher.text import count, name_ranks


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m launcher.explain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("logs", metavar="LOG|RUN|FAULT", nargs="*")
    names = parser.parse_args(arguments).logs or [str(_log_dir() / "latest")]
    try:
        if all(map(has_ended_well, names)):  # an earlier start of it may have failed
            print(f"no failure: {', '.join(names)} ended with code 0")
            return 1
        files = [file for name in names for file in find_logs(name)]
        if not files[0].exists() and (section := find_section(names[0])):
            print(section)
            return 0
        if ends := [*filter(None, map(find_end, files))]:
            print(ends[0])
            return 0
        refusals = {line: name for file in files for line, name in find_refusals(file).items()}
        seen = [one for file in files for one in read(file)]
    except OSError as error:
        print(f"explain: {error.filename}: {error.strerror}", file=sys.stderr)
        return BAD_INPUT
    sightings = [one for one in seen if one.text not in refusals]
    cause = find_cause(sightings)
    if refusals and (cause is None or cause.kind >= Kind.WARNING):
        sections = map(find_section, dict.fromkeys(refusals.values()))
        print(*map(printable, refusals), *sections, sep="\n")
        return 0
    if cause is None:
        print(f"no failure found in {count(len(files), 'file')}")
        return 1
    print_cause(cause, sightings, find_ranks(cause, files))
    return 0


def has_ended_well(name: str) -> bool:
    """Return whether a word of the command line means a run that ended with code 0."""
    records = [
        record for place in (Path(name), _log_dir() / name) if (record := read_record(place))
    ]
    return bool(records) and records[0].exit_code == 0


def find_logs(name: str) -> list[Path]:
    """Return the logs that a word of the command line means."""
    for place in (Path(name), _log_dir() / name):
        if (place / KEPT).exists():
            return [place / KEPT]
        if place.is_dir() and (files := sorted(place.glob("node_*.log"))):
            return files
    return [Path(name)]


def find_section(fault: str) -> str:
    """Return a fault's section of TROUBLESHOOTING.md; "" if there is none."""
    text = (Path(__file__).parents[2] / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(fault)}\n.*?(?=\n+##? )", text, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def _log_dir() -> Path:
    return Path(os.environ.get("LOG_DIR") or DEFAULT_LOG_DIR)


def find_cause(sightings: Sequence[Sighting]) -> Sighting | None:
    """Return the sighting that states the cause best, and of several the first."""
    causes = [one for one in sightings if one.kind != Kind.CONSEQUENCE]
    return min(causes, key=lambda one: one.kind, default=None)


def print_cause(cause: Sighting, sightings: Sequence[Sighting], ranks: Sequence[int]) -> None:
    """Print a cause in the shape of the failure block; `ranks` say the same."""
    where = f" ({cause.host})" if cause.host else ""
    others = sum(shape_of(one.text) != shape_of(cause.text) for one in sightings)
    lines = count(others, "other line mentions", "other lines mention")
    equal = [rank for rank in ranks if f"rank {rank}" != cause.rank]
    told = [f"{name_ranks(equal)} with the same error"] if equal else []
    told += [f"{lines} a failure, probably as a consequence"] if others else []
    rows = [
        ("FAILED", f"{cause.rank or 'a rank'}{where}       [{cause.fault}]"),
        ("cause", one_line(cause.text)),
        *(("", frame) for frame in cause.frames),
        ("others", "; ".join(told)),
        ("log", f"{cause.file}:{cause.line}"),
        ("see", f"TROUBLESHOOTING.md#{cause.fault}"),
    ]
    for name, text in rows:
        if text:
            print(f"{name:<8} {printable(text)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
