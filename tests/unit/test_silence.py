"""Silences, as the launcher remembers them: nodes whose connections are set back in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.fanout.connection import Connection
from launcher.fanout.loop import Loop
from launcher.fanout.nodes import Silence
from launcher.wire import limits

Connect = Callable[[str], Connection]


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec cat\n")  # it ends with its stdin
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    loop = Loop(2)

    def begin(node: str) -> Connection:
        return Connection(loop, node, connect_s=1, token="token", show=lambda text, is_error: None)

    yield begin
    for child in loop.children:
        child.close_input()
    while any(child.code is None for child in loop.children):
        loop.wait(1)
    loop.close()


@pytest.mark.parametrize(
    ("silent_s", "is_blamed"), [(limits.SILENCE_S * 0.8, True), (limits.SILENCE_S / 2 - 1, False)]
)
def test_a_node_that_is_silent_at_the_first_end_is_blamed(
    connect: Connect, silent_s: float, is_blamed: bool
) -> None:
    cut, other = connect("node1"), connect("node2")
    cut.heard -= silent_s  # its packets still wait for TCP to send them again
    Silence([cut, other]).recall()
    assert bool(cut.lost) == cut.is_silent == is_blamed
    assert not other.lost


@pytest.mark.parametrize(
    ("ago_s", "is_blamed"), [(limits.RECALL_S - 1, True), (limits.RECALL_S + 1, False)]
)
def test_a_node_that_was_silent_just_before_is_blamed(
    connect: Connect, ago_s: float, is_blamed: bool
) -> None:
    cut = connect("node1")
    cut.gap = time.monotonic() - ago_s, 9.0
    Silence([cut]).recall()
    assert cut.lost == ("no heartbeat for 9 s (network down?)" if is_blamed else "")
