"""The rules of explain, and how much a matching line says about the cause."""

import functools
import re
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """How much a line says about the cause: the first line of the lowest kind is the cause."""

    CAUSE = 1
    EXCEPTION = 2  # of any program; no other rule matches
    WARNING = 3  # the program may have continued after it
    END = 4  # how a process ended, or that its wait timed out; the cause may be elsewhere
    LOST = 5  # another process is gone
    CODE = 6  # only the exit code of a failed process
    CONSEQUENCE = 7  # never a cause


@dataclass(frozen=True)
class Rule:
    """A fault, and the texts that show it."""

    kind: Kind
    fault: str
    expressions: str  # regular expressions, one per line, for one line of a log at a time

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """All expressions, compiled on first use: most runs do not fail."""
        return re.compile("|".join(map(str.strip, self.expressions.strip().splitlines())))


exception = functools.partial(Rule, Kind.EXCEPTION)
warning = functools.partial(Rule, Kind.WARNING)
end = functools.partial(Rule, Kind.END)
lost = functools.partial(Rule, Kind.LOST)
code = functools.partial(Rule, Kind.CODE)
consequence = functools.partial(Rule, Kind.CONSEQUENCE, "consequence")
