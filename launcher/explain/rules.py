"""Which rule matches a line of a log, or of an error's message."""

from __future__ import annotations

from launcher.explain.causes import CAUSES
from launcher.explain.kinds import Rule
from launcher.explain.signs import SIGNS

RULES = (*CAUSES, *SIGNS)
UNKNOWN = "rank-error"  # an exception that no rule matches


def match(line: str) -> Rule | None:
    """Return the first rule that matches a line of a log, or an error's message."""
    return next((rule for rule in RULES if rule.pattern.search(line)), None)


def find_rule(message: str) -> Rule | None:
    """Return the rule that says most about the cause, of those that match a line of an error."""
    known = [rule for line in message.splitlines() if (rule := match(line))]
    return min(known, key=lambda rule: rule.kind, default=None)
