"""The message that tells a launcher on another machine how a node agent's part ended."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from typing import Any

import pytest

from launcher.agent.control import MESSAGES
from launcher.failure import Failure
from launcher.failure_block import End, RunSummary, print_end
from launcher.fanout.protocol import ANSWERS
from launcher.typed_json import MessageError, decode

FAILURE = Failure(
    fault="rank-error",
    cause='ValueError: "quoted", ümlaut\nand a second line',
    code=1,
    host="node2",
    node_rank=1,
    time=1000.5,
    rank=5,
    local_rank=1,
    frames=["task.py:8 in loss"],
    stacks=["rank 0, 1: a.py:1 in f"],
)
SUMMARY = RunSummary(
    started=986.0, lost_peer=6, stopped=1, left=0, run_id="r1", command="launch 'a b'"
)
END = End(code=1, failure=FAILURE, summary=SUMMARY, is_told=False)


@pytest.mark.parametrize(
    "end", [END, replace(END, code=75, failure=None, is_told=True)], ids=["failed", "stopped"]
)
def test_what_is_sent_is_what_is_read(end: End) -> None:
    assert ANSWERS.read(MESSAGES.write(end)) == end


def broken(path: str, value: object) -> Any:
    """A message with one field, `a.b.c`, set to another value; deleted for `...`."""
    message: Any = asdict(END)
    *outer, last = path.split(".")
    inner = message
    for name in outer:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("code", "1"),
        ("code", True),
        ("code", 1.0),
        ("code", None),
        ("code", ...),
        ("is_told", 0),
        ("failure", []),
        ("failure", "FAILED"),
        ("failure.time", "now"),
        ("failure.time", float("nan")),
        ("failure.time", 10**400),
        ("failure.frames", "a.py"),
        ("failure.frames", [1]),
        ("failure.host", None),
        ("failure.host", ...),
        ("failure.surprise", 1),
        ("summary", None),
        ("summary.lost_peer", 1.5),
        ("summary.started", False),
    ],
)
def test_any_other_shape_is_refused(path: str, value: object) -> None:
    with pytest.raises(MessageError, match=path.partition(".")[0]):
        decode(End, broken(path, value))


@pytest.mark.parametrize("message", [None, [], "end", 3])
def test_what_is_no_object_is_refused(message: object) -> None:
    with pytest.raises(MessageError, match="End"):
        decode(End, message)


@pytest.mark.parametrize(
    ("end", "first"),
    [
        (END, "FAILED   rank 5 (local rank 1, node2) 14 s after the start"),
        (replace(END, code=143, failure=None), "stopped  by SIGTERM (code 143); nothing"),
        (replace(END, code=0, failure=None), ""),
    ],
)
def test_the_launcher_prints_what_the_agent_would(end: End, first: str) -> None:
    out = io.StringIO()
    print_end(end, out)
    assert out.getvalue().startswith(first) and bool(out.getvalue()) == bool(first)
