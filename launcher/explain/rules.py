"""The rules of rules.yaml: which text names which fault, and what only follows from another's."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import yaml

UNKNOWN = "rank-error"  # an exception that no rule knows


class Kind(IntEnum):
    """How much a line says of the cause: the first of the lowest kind is it."""

    CAUSE = 1
    EXCEPTION = 2  # of any program; no rule knows it
    WARNING = 3  # that a program may have lived on with
    END = 4  # how a process ended, or that it waited in vain; the cause may stand elsewhere
    LOST = 5  # that another process is gone
    CODE = 6  # the code of one that failed, and nothing else of it
    CONSEQUENCE = 7  # never a cause


@dataclass(frozen=True)
class Rule:
    """One fault by the texts that show it."""

    fault: str
    kind: Kind
    pattern: re.Pattern[str]
    made_from: Sequence[tuple[str, str]]  # real texts, and where they were published


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Return the rules in their order: of several that know a line, the first counts."""
    file = Path(__file__).with_name("rules.yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(
        Rule(
            fault=one["fault"],
            kind=Kind[one.get("kind", "cause").upper()],
            pattern=re.compile("|".join(one["find"])),
            made_from=[(each["text"], each["source"]) for each in one["made_from"]],
        )
        for one in yaml.load(file.read_text(encoding="utf-8"), loader)
    )


def match(line: str) -> Rule | None:
    """Return the first rule that knows a line of a log, or an error's message."""
    return next((rule for rule in rules() if rule.pattern.search(line)), None)


def find_rule(message: str) -> Rule | None:
    """Return the rule that says most of the cause, of those that know a line of an error."""
    known = [rule for line in message.splitlines() if (rule := match(line))]
    return min(known, key=lambda rule: rule.kind, default=None)
