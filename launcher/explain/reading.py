"""The lines of a log that say something about a failure, with the rank and host that wrote them."""

import functools
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from launcher.explain.kinds import Kind
from launcher.explain.rules import RULES, UNKNOWN, match_rule, refine
from launcher.failure import user_frames
from launcher.failure_block import FIRST_ROW

LONGEST = 4096  # bytes of a line that are read
TABLE = 8  # lines of torch's report on the first failure
LONGEST_ABOVE = 400  # bytes of a line above an exception
MOST_SIGHTINGS = 5000
_PIECE = 1 << 20  # bytes that are read at a time
ABOVE = 200  # lines above an exception that may be its traceback
# Every line that a rule matches contains one of these; a test checks that.
HINT = re.compile(
    rb"rror|xception|nterrupt|ailed|ailure|illed|illing|efused|imed out|imeout|CANCELLED|ignal|WARN"
    rb"|fault|exceed|esolve| found|No such|No module|No space|xitcode|xit code|xit status"
    rb"|return code|nable to|NVRM|Abort|invalid|rank |driver|closed|oom|slurm|srun|nan|NaN|No route"
    rb"|lost|only|not defined|world size|denied|nrecognized|mismatch|compiled|slots|firewall"
    rb"|shut down|subset of|EXIT CODE|KILLED|terminated|bad_alloc| dead|unavailable|new thread"
)
_DIGITS = b"0123456789"
# What launchers and torch put before a line: [rank3]: (torch), [default3]: (its launcher), stderr:
# (accelerate), ERROR 12-31 01:06:23 [core.py:603] (vLLM), 3: (srun --label), (node-1 pid=9) (Ray),
# [1,3]<stderr>: (mpirun), node1: (pdsh), [3] and [rank0-2,5] (ours), [3]: (torchx), a timestamp.
# Not sqlite3.Error: and the like, which begin an exception.
_PREFIX = re.compile(
    r"(?:\[(?:rank|default|trainer|worker)(?P<torch>\d+)(?P<more>(?:[-,]\d{1,5})*)\]:?"
    r"|\[?stderr(?:\]|: )"
    r"|(?:ERROR|INFO|WARNING|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[\S+\]|\S+:\d+\])"
    r"|\((?:\S+ )?pid=\d+[^)]*\)"
    r"|\[\d+,(?P<mpi>\d+)\]<std(?:err|out)>:"
    r"|0{0,5}(?P<srun>\d{1,5}):(?= )"
    r"|(?P<host>(?![\w.]*\.[A-Z]\w*[a-z]\w*:)[a-z][\w.-]*\d[\w.-]*):(?= )"
    r"|\[(?P<ours>\d{1,5})\](?:(?= )|:)"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*Z?\]?:?"
    r")(?:(?<!>:) | (?=(?:  )*\S))?"  # mpirun adds no space, and indentation is even
)
_OTHERS = ("mpi", "srun", "ours")  # groups of _PREFIX that name a rank, beside torch's
_TAG = re.compile(r"\[rank(\d+)\]")  # of torch; the other prefixes may number nodes or processes
# A frame of a traceback, also of a group of errors, with lines of its code at the end.
_SOURCE = re.compile(r'(?m)^(?: +\| )?  File ".+", line \d+.*(?:\n(?: +\| )?    .*)+\Z')
_EXCEPTION = re.compile(
    r"(?:|.{0,80}(?:[\]):>|] ?| - |E {3,}|: \*\*|\"))"
    r"(?:(?:[a-z_]\w*\.)+(?:errors|exceptions)\.[A-Z]\w+"
    r"|[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|TimeoutExpired))(?:\(\w+\))?(?:: |:?$)"
)
_RANK = re.compile(r"(?<!local_)(?<!local )\b[Rr]ank ?:? ?(\d+)|: task (\d+): Exited")
# Warnings that quote an error, as of a download or a connection that is tried again.
_WARNED = re.compile(
    r"Warning: |\b[Rr]etrying\b|\[W.*socket\.cpp|thrown while requesting|mkdir -p failed"
    r"|^wandb: .*[Nn]etwork error"
)
_NAMED = re.compile(r" \[([a-z-]+)\]$")  # how our own lines name a fault
_PROGRAM = re.compile(r"(?:node agent|[\w.-]+): ")  # begins a line that refuses a start
# In a log of several starts, a row that begins or ends a start.
_BEFORE = re.compile(
    f"{FIRST_ROW}|see {{6}}TROUBLESHOOTING|stopped  .*; nothing is left running".encode()
)
# Where launchers report which process failed first: torch's two tables and its single line,
# torch.multiprocessing.spawn, DeepSpeed, DDP's message about parameters, and srun.
_FIRST = re.compile(
    r"Root Cause(?s:.{0,99}?)time *: (?P<time>\S+)\s+(?:host *: (?P<host>\S+)\s+)?"
    r"rank *: (?P<rank>\d+).*\s+exitcode *: (?P<code>-?\d+)"
    r"|failed \(exitcode: -?\d+\) local_rank: (?P<torch>\d+)"
    r"|(?:-- P|\bp)rocess (?P<spawn>\d+) terminated"
    r"|'--local_rank=(?P<deepspeed>\d+)'.* exits with"
    r"|did not receive grad for rank (?P<reducer>\d+)"
    r"|srun: error: (?P<node>\S+): tasks? (?P<task>\d+): (?!Terminated|Aborted)"
)


@functools.cache
def sections() -> Mapping[str, str]:
    """Return the sections of TROUBLESHOOTING.md by the names of their faults."""
    text = (Path(__file__).parents[2] / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
    matches = re.finditer(r"^## ([a-z-]+)\n.*?(?=\n+##? )", text, re.MULTILINE | re.DOTALL)
    return {section[1]: section[0] for section in matches}


def own_fault(line: str) -> str:
    """Return the fault that one of our lines names at its end; "" for warnings and other lines."""
    named = _NAMED.search(line.rstrip())
    return named[1] if named and named[1] in sections() and "warning: " not in line else ""


@dataclass(frozen=True)
class Sighting:
    """A line that says something about a failure."""

    kind: Kind
    fault: str
    text: str  # without what launchers put before it
    rank: str  # "rank 3", or "local rank 3" if only that is known; "": unknown
    host: str
    file: Path = Path()
    line: int = 0  # from 1
    frames: Sequence[str] = ()  # of the traceback above it, innermost first


class First(NamedTuple):
    """The process that failed first, as its launcher reports."""

    time: str
    rank: str  # as in Sighting
    host: str
    code: str  # exit code, from torch's table; "": unknown


def read(file: Path) -> list[Sighting]:
    """Return the lines about a failure of the last start in a log, with what is known of each.

    Of lines that differ only in numbers, only the first is returned, and of all at most
    MOST_SIGHTINGS. If a launcher reports which rank failed first, the report is applied to them.
    Raises OSError.
    """
    shapes = set[int]()  # hashes of the lines so far, without their digits
    recent = deque([b""] * TABLE, maxlen=ABOVE + 1)
    sightings = list[Sighting]()
    first_seen = None
    tables = list[First]()
    lines = chain(_lines_of_last_start(file), [(0, b"")] * TABLE)  # they complete the last table

    for row, text in lines:
        recent.append(text[:LONGEST_ABOVE])
        if b"Root Cause" in text:
            shapes.clear()  # how this rank ended may differ from the others only in a number
        if b"Root Cause" in recent[-TABLE]:  # the table is complete
            table = b"\n".join([*recent][-TABLE:]).decode(errors="replace")
            if first := _read_first(table):
                tables.append(first)

        shape = text.translate(None, _DIGITS)
        if hash(shape) in shapes:
            continue
        shapes.add(hash(shape))
        if not (shape.endswith(b"]") or HINT.search(shape)):  # quick, and most lines end here
            continue

        line = text.decode(errors="replace")
        seen = find_sighting(line)
        if not seen:
            continue
        above = b"\n".join([*recent][:-1]).decode(errors="replace")
        if known := _add_traceback(seen, above, line):
            sightings.append(replace(known, file=file, line=row))
            first_seen = first_seen or _read_first(f"{above}\n{line}")
        if len(sightings) == MOST_SIGHTINGS:
            break

    earliest = min(tables, default=first_seen)  # a table has a time; other reports have none
    return [*_apply_first(earliest, sightings)] if earliest else sightings


def _add_traceback(seen: Sighting, above: str, line: str) -> Sighting | None:
    """Return a sighting with the frames above its line, and the fault that they refine.

    None if a traceback quotes the line: then the program has not printed it.
    """
    mine = _lines_of_same(above, line)
    if _SOURCE.search("\n".join([*mine, strip_prefix(line)])):
        return None
    return replace(seen, fault=refine(seen.fault, mine), frames=_frames(mine))


def find_sighting(line: str) -> Sighting | None:
    """Return what one line says about a failure, without file, number and frames; None if nothing.

    Its rank is that which wrote the line or, if no prefix names one, that which the line mentions.
    """
    prefix, text = split_prefix(line)
    # A line of ours, which ends with its fault, gets the lowest kind of that fault's rules.
    if fault := own_fault(text):
        kind = min((rule.kind for rule in RULES if rule.fault == fault), default=Kind.CAUSE)
    elif rule := match_rule(text):
        kind = max(rule.kind, Kind.WARNING) if _WARNED.search(text) else rule.kind
        fault = rule.fault
    elif _EXCEPTION.match(text):
        kind = Kind.EXCEPTION
        fault = UNKNOWN
    else:
        return None

    found = _RANK.search(text)
    mentioned = (found[1] or found[2]) if found else ""
    number = _rank_in(prefix, text) or mentioned
    rank = f"rank {number}" if number else ""
    return Sighting(kind, fault, text.strip(), rank, prefix.get("host", ""))


def _rank_in(prefix: Mapping[str, str], text: str) -> str:
    """Return the rank that wrote a line, by its prefixes; "" if they name none."""
    ranks = [prefix.get("torch"), *_TAG.findall(text), *map(prefix.get, _OTHERS)]
    return next(filter(None, ranks), "")


def find_refusals(file: Path, *, has_stopped: bool) -> dict[str, str]:
    """Return the lines that refused a start, each with its fault. Raises OSError.

    `has_stopped` means that a stopped line ends the log: the start before it is read.
    """
    refusals = {}
    for _, row in _lines_of_last_start(file, has_stopped=has_stopped):
        stripped = row.rstrip()
        if not stripped.endswith(b"]"):  # quick to check, and most lines fail it
            continue

        line = strip_prefix(stripped.decode(errors="replace"))
        fault = own_fault(line)
        # In a rank, our own exceptions end with a fault, too, but they refuse no start.
        if fault and _PROGRAM.match(line) and not _EXCEPTION.match(line):
            refusals[line] = fault
    return refusals


def _lines_of_last_start(file: Path, *, has_stopped: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a log with their numbers, without those of earlier starts.

    With `has_stopped`, the last row that ends a start is the stopped line of the start to read.
    Reads the log twice. Raises OSError.
    """
    marks = deque([0], maxlen=2)  # the numbers of the last two rows that begin or end a start
    marks.extend(number for number, row in lines_of(file) if _BEFORE.match(row))
    before = marks[0 if has_stopped else -1]
    return ((number, row) for number, row in lines_of(file) if number > before)


def lines_of(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the first LONGEST bytes of each line with its number. Raises OSError.

    A progress bar's states, which end with a carriage return, are lines with the same number.
    """
    number, begun = 1, b""
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            for place, row in enumerate((begun + piece).split(b"\n")):
                if place > 0:  # a newline has ended the row before
                    yield number, begun
                    number += 1
                *states, rest = row.split(b"\r")
                for state in states:
                    yield number, state[:LONGEST]
                begun = rest[:LONGEST]
    yield number, begun


def find_ranks(cause: Sighting, files: Sequence[Path]) -> list[int]:
    """Return the ranks that printed the cause's line, ignoring digits. Raises OSError."""
    shape = shape_of(cause.text)
    # The longest part without bytes that are not text: searching each line for it is quick.
    sign = max(shape.split("\N{REPLACEMENT CHARACTER}"), key=len).encode()

    ranks = set[int]()
    for file in files:
        for _, line in lines_of(file):
            if sign not in line.translate(None, _DIGITS):
                continue
            prefix, text = split_prefix(line.decode(errors="replace"))
            if shape_of(text) != shape:
                continue

            named = _rank_in(prefix, text) + prefix.get("more", "")  # such as 3,5-7
            for low, high in re.findall(r"(\d+)(?:-(\d+))?", named):
                ranks |= {*range(int(low), int(high or low) + 1)}
    return sorted(ranks)


def shape_of(text: str) -> str:
    """Return a text without its digits."""
    return re.sub("[0-9]", "", text).strip()


def split_prefix(line: str) -> tuple[dict[str, str], str]:
    """Return what the launchers' prefixes of a line say, by group of _PREFIX, and the rest of it.

    A group that occurs twice has its last value.
    """
    named = dict[str, str]()
    while at := _PREFIX.match(line):
        named |= {name: value for name, value in at.groupdict().items() if value is not None}
        line = line[at.end() :]
    return named, line


def strip_prefix(line: str) -> str:
    """Return a line without what launchers and torch have put before it."""
    return split_prefix(line)[1]


def _lines_of_same(above: str, line: str) -> list[str]:
    """Return the lines above a line that name the same rank and host, without their prefixes."""
    prefix, _ = split_prefix(line)
    rows = map(split_prefix, above.splitlines())
    return [text for its_prefix, text in rows if its_prefix == prefix]


def _frames(above: Sequence[str]) -> list[str]:
    """Return the user's frames of the last traceback in these lines; empty if there is none."""
    starts = [number for number, row in enumerate(above) if row.startswith("Traceback (most")]
    return user_frames(above[starts[-1] :]) if starts else []


def _read_first(text: str) -> First | None:
    """Return the first failure that a launcher reports in these lines; None if it reports none."""
    first = _FIRST.search("\n".join(map(strip_prefix, text.split("\n"))))
    if not first:
        return None

    local = first["torch"] or first["spawn"] or first["deepspeed"]
    number = local or first["rank"] or first["reducer"] or first["task"]
    rank = f"{'local ' if local else ''}rank {number}"
    host = first["host"] or first["node"] or ""
    return First(first["time"] or "", rank, host, first["code"] or "")


def _apply_first(first: First, sightings: Sequence[Sighting]) -> Iterator[Sighting]:
    """Yield the sightings, changed by a launcher's report on the process that failed first.

    - If a sighting names no rank or that rank, it gets the rank and its host.
    - If the report has an exit code, so does a sighting of only an exit code.
    - If that code shows that the rank was not killed, other ranks were killed as a consequence.
    """
    has_killed_others = first.code not in ("", "-9")  # torch's agent kills the other ranks then
    for seen in sightings:
        changed = seen
        is_its_code = first.code and seen.kind == Kind.CODE
        if is_its_code or seen.rank in ("", first.rank):
            changed = replace(seen, rank=first.rank, host=seen.host or first.host)
        if has_killed_others and seen.fault == "rank-killed":
            changed = replace(changed, kind=Kind.CONSEQUENCE)
        yield changed
