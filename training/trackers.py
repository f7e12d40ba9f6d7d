"""Where metrics go besides metrics.jsonl: the config's `tracking`. Used only on rank 0.

    tracking: [tensorboard, wandb, my_module:MyTracker]

Your own tracker needs the three methods of Tracker. A resumed run continues in the same place, and
records each step once.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from distributed.heartbeat import beat
from training.classes import load_class
from training.settings import TRACKERS

CLOSE_S = 300.0
GIT_S = 5  # git reads all changed files, and the other ranks wait meanwhile
_log = logging.getLogger(__name__)


@functools.cache
def is_installed(package: str, without: str) -> bool:
    """Return whether an optional package is installed; if not, log once what will be missing."""
    if importlib.util.find_spec(package) is None:
        _log.info(f"{package} is not installed: {without}")
        return False
    return True


@dataclass(frozen=True)
class RunFacts:
    """What a tracker is told about a run."""

    run_id: str
    folder: Path  # logs/<run id>
    config: Mapping[str, Any]  # all settings
    hosts: Sequence[str]
    first_step: int  # this process records the steps after it
    recorded: int = 0  # an earlier process already recorded the steps up to this one

    @property
    def commit(self) -> str:
        """The git commit of the working directory, plus `+` if files have changed, as in run.json.

        Runs git. Empty outside a git repository, or if git is missing or takes longer than GIT_S.
        """
        words = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        try:
            return subprocess.run(
                words, capture_output=True, timeout=GIT_S, errors="replace"
            ).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""


class Tracker(Protocol):
    """Receives the metrics of one run."""

    def start(self, facts: RunFacts) -> None:
        """Begin, or continue where an earlier process of the run stopped."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:
        """Flush everything: the process is about to exit."""


class TensorBoard:
    """Writes event files in logs/tensorboard/<run id>."""

    def start(self, facts: RunFacts) -> None:
        """Open a new event file in the run's folder: TensorBoard joins all files there."""
        # torch.utils.tensorboard does the same but takes 1.5 s to import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # Not in the run's folder, which TensorBoard would find again through the link `latest`.
        self._events = EventFileWriter(str(facts.folder.parent / "tensorboard" / facts.folder.name))
        begins = SessionLog(status=SessionLog.START)  # earlier events of later steps are ignored
        event = Event(step=facts.first_step + 1, wall_time=time.time(), session_log=begins)
        self._events.add_event(event)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=points))
        self._events.add_event(event)

    def close(self) -> None:
        self._events.close()


class WandB:
    """Weights & Biases: one run for all starts; WANDB_PROJECT and its other variables apply."""

    def start(self, facts: RunFacts) -> None:
        """Create the run with its settings, git commit and hosts, or continue it."""
        import wandb

        self._recorded = facts.recorded
        # Without a login, wandb would ask for one and wait.
        stdin = sys.stdin
        sys.stdin = io.StringIO()
        try:
            self._run = wandb.init(
                id=facts.run_id,
                name=facts.run_id,
                resume="allow",
                dir=str(facts.folder),
                config={**facts.config, "commit": facts.commit, "hosts": list(facts.hosts)},
            )
        finally:
            sys.stdin = stdin

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._recorded:  # wandb accepts each step once
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers of a run, which start with its first metrics. One that fails is dropped.

    If they are not `asked` for, but the default, one that is not installed causes no warning.
    """

    def __init__(self, names: Sequence[str], facts: RunFacts, *, asked: bool = True) -> None:
        self._names = names
        self._facts = facts
        self._asked = asked
        self._started = dict[str, Tracker]()
        self._has_begun = False
        self.recorded = 0  # for RunFacts

    def record(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Pass the metrics of a step to each tracker; returns whether this call started them."""
        is_first = not self._has_begun
        self._has_begun = True
        if is_first:
            self._each([*filter(self._is_wanted, self._names)], self._start)
        self._each([*self._started], lambda name: self._started[name].record(step, metrics))
        return is_first

    def close(self) -> bool:
        """Close each, and wait for CLOSE_S seconds at most; returns whether they had started.

        Beats meanwhile. After that time, it logs a warning.
        """
        arguments = ([*self._started], lambda name: self._started[name].close())
        closing = threading.Thread(target=self._each, args=arguments, daemon=True)
        closing.start()
        deadline = time.monotonic() + CLOSE_S
        while closing.is_alive() and time.monotonic() < deadline:
            closing.join(1.0)
            beat()  # a slow network must not look like a stuck run
        if closing.is_alive():
            _log.warning(f"trackers took more than {CLOSE_S:g} s to close; the run ends [log-lost]")
        return self._has_begun

    def _is_wanted(self, name: str) -> bool:
        """Return whether to start a tracker: not a default one that is not installed."""
        return self._asked or name != "tensorboard" or is_installed(name, "no event files")

    def _start(self, name: str) -> None:
        """Create and start a tracker; also if its start fails, _each() can drop it by its name."""
        self._started[name] = load_class(TRACKERS.get(name, name))()
        self._started[name].start(replace(self._facts, recorded=self.recorded))

    def _each(self, names: Sequence[str], do: Callable[[str], None]) -> None:
        """Call `do` with each name; if it raises, log a warning and drop that tracker."""
        for name in names:
            try:
                do(name)
            except (Exception, SystemExit) as error:
                self._started.pop(name, None)
                why = str(error).splitlines()[0] if str(error) else type(error).__name__
                _log.warning(f"tracker {name} failed ({why}); the run continues [log-lost]")
