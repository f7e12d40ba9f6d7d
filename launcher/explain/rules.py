"""Which rule matches a line of a log, or of an error's message."""

import re
from collections.abc import Sequence

from launcher.explain.causes import CAUSES
from launcher.explain.kinds import Rule
from launcher.explain.signs import SIGNS

RULES = *CAUSES, *SIGNS
UNKNOWN = "rank-error"  # an exception that no rule matches
_STACK_LINES = 6  # at the end of a traceback
# Modules of Python that use /dev/shm; "No space left on device" does not name it.
_SHARED = re.compile(r"/multiprocessing/(synchronize|shared_memory)\.py")


def match_rule(line: str) -> Rule | None:
    """Return the first rule that matches a line of a log, or an error's message."""
    return next((rule for rule in RULES if rule.pattern.search(line)), None)


def find_rule(message: str) -> Rule | None:
    """Return the rule that says most about the cause, of those that match a line of an error."""
    known = [rule for line in message.splitlines() if (rule := match_rule(line))]
    return min(known, key=lambda rule: rule.kind, default=None)


def refine(fault: str, stack: Sequence[str]) -> str:
    """Return the fault of an error: small-shm, not disk-full, if its stack shows shared memory.

    `stack` has the lines of its traceback.
    """
    is_shared = _SHARED.search("\n".join(stack[-_STACK_LINES:]))
    return "small-shm" if fault == "disk-full" and is_shared else fault
