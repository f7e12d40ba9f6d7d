"""Find collectives that do not match, from torch's flight recorder in each rank (no torch).

A rank writes its latest collectives to a file when asked (flight_recorder.py).
"""

import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from launcher import typed_json
from launcher.own_time import turns
from launcher.text import group_ranks, name_ranks, read_text
from launcher.typed_json import MessageError
from launcher.wire.states import Calls, Collective

DUMP_SIGNAL = signal.SIGRTMIN + 10  # makes a rank write its collectives; not used by scripts
WINDOW = 20  # the latest calls kept for each process group


def file_of(error_file: Path) -> Path:
    """Return the file for a rank's collectives, in the folder of its error file."""
    return error_file.with_suffix(".collectives")


def read(files: Mapping[int, Path], limit_s: float) -> dict[int, Calls]:
    """Wait at most `limit_s` for the ranks to write these files. Returns their calls, by rank.

    Ranks that are late, or whose files are damaged, are left out.
    """
    found = dict[int, Calls]()
    for _ in turns(limit_s):
        for rank, file in files.items():
            with contextlib.suppress(MessageError):
                found[rank] = typed_json.parse(Calls, read_text(file))
        if len(found) == len(files):
            break
    return found


def find_mismatches(told: Mapping[int, Calls]) -> list[str]:
    """Return one line for each process group whose ranks are not in the same collective."""
    groups = {call.group: None for calls in told.values() for call in calls.calls}
    return [line for group in groups if (line := _find_difference(group, told))]


def _find_difference(group: str, told: Mapping[int, Calls]) -> str:
    """Return how the calls of a process group differ between its ranks; empty if they match.

    Only the earliest difference is described: calls with the same number that differ, or an
    unfinished call that some ranks have not reached.
    """
    calls = dict[int, dict[int, Collective]]()  # by rank and number
    for rank, latest in told.items():
        of_rank = {call.number: call for call in latest.calls if call.group == group}
        if of_rank or group == "default_pg":  # every rank is in that group
            calls[rank] = of_rank
    reached = {rank: max(of_rank, default=0) for rank, of_rank in calls.items()}
    last_common = min(reached.values())  # the latest call that all ranks have made

    for number in sorted({number for of_rank in calls.values() for number in of_rank}):
        here = {rank: of_rank[number] for rank, of_rank in calls.items() if number in of_rank}
        if len({call.must_match for call in here.values()}) > 1:
            return f"{group}: the ranks differ: {_group(here, str)}"
        if number > last_common and not all(call.is_done for call in here.values()):
            behind = {
                rank: calls[rank].get(last) for rank, last in reached.items() if last < number
            }
            where = _group(behind, lambda call: f"last called {call}" if call else "called none")
            return f"{group}: {_group(here, lambda call: f'in {call}')}; {where}"
    return ""


def _group(
    calls: Mapping[int, Collective | None], describe: Callable[[Collective | None], str]
) -> str:
    """Return each description with the ranks that have it, such as `ranks 0, 1 in #3 ...`."""
    ranks = group_ranks({rank: describe(call) for rank, call in calls.items()})
    return "; ".join(f"{name_ranks(numbers)} {text}" for text, numbers in ranks.items())


def newest(calls: Iterable[Collective]) -> Calls:
    """Return the latest calls of each process group."""
    groups = dict[str, list[Collective]]()
    for call in calls:
        groups.setdefault(call.group, []).append(call)
    return Calls([call for group in groups.values() for call in group[-WINDOW:]])
