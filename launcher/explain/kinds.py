"""What a rule of explain is, and how much the lines that it matches say about the cause."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """How much a line says of the cause: the first of the lowest kind is it."""

    CAUSE = 1
    EXCEPTION = 2  # of any program; no rule says more of it
    WARNING = 3  # that a program may have lived on with
    END = 4  # how a process ended, or that its wait timed out; the cause may be elsewhere
    LOST = 5  # that another process is gone
    CODE = 6  # the code of one that failed, and nothing else of it
    CONSEQUENCE = 7  # never a cause


@dataclass(frozen=True)
class Rule:
    """One fault by the texts that show it."""

    kind: Kind
    fault: str
    find: str  # regular expressions, one per line, for one line of a log at a time

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """All of them, compiled when the first line is looked at: most runs do not fail."""
        return re.compile("|".join(map(str.strip, self.find.strip().splitlines())))


cause = functools.partial(Rule, Kind.CAUSE)
exception = functools.partial(Rule, Kind.EXCEPTION)
warning = functools.partial(Rule, Kind.WARNING)
end = functools.partial(Rule, Kind.END)
lost = functools.partial(Rule, Kind.LOST)
code = functools.partial(Rule, Kind.CODE)
consequence = functools.partial(Rule, Kind.CONSEQUENCE)
