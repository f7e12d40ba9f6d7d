"""Cause a fault, and watch the run that it affects."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fault_rows import Fault
from harness import CLUSTER, ROOT

START_S = 300.0  # for the ranks to take steps
SNIPPET_S = 600.0  # to cause a fault, or to undo it; only there to end a hang
PORTS = itertools.count(23100)


@dataclass(frozen=True)
class Sight:
    """What a run showed: the expected line, and after how many seconds."""

    line: str | None
    seconds: float
    code: int | None  # None: it was still running
    output: str  # since the fault was caused


class Case:
    """A fault caused for one run, in its own folder."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder = fault, folder
        own = f"/dev/shm/{folder.name}"
        self.environ = {
            **{name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
            "CLUSTER": CLUSTER,
            "ROOT": str(ROOT),
            "FOLDER": str(folder),
            "SCRIPT": str(ROOT / "bench/fault_steps.py"),
            "STEPS": str(fault.steps),
            "THIRD": "4 2",
            "MASTER_PORT": str(next(PORTS)),
            "PYTHON": sys.executable,
            "VENV_PYTHON": sys.executable,
            "LOG_DIR": "logs",
            "GRACE": "5",
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "NO_COLOR": "1",
            "OWN": own,
            **{name: text.replace("$OWN", own) for name, text in fault.variables.items()},
        }

    def __enter__(self) -> Case:
        self.run(self.fault.make)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.fault.undo)

    def command(self, text: str) -> list[str]:
        return ["bash", "-c", f'source "$ROOT/bench/faults.bash"\n{text}']

    def run(self, text: str) -> None:
        """Run the text as bash, with the functions of faults.bash."""
        if text:
            subprocess.run(
                self.command(text),
                cwd=self.folder,
                env=self.environ,
                check=True,
                timeout=SNIPPET_S,
                stdin=subprocess.DEVNULL,
            )

    def watch(
        self,
        command: str,
        during: str,
        find: Callable[[str], str | None],
        limit_s: float,
        *,
        is_whole: bool = True,
    ) -> Sight:
        """Run a command to its end or its limit or, unless `is_whole`, until `find` succeeds."""
        file = self.folder / "output"
        line, seconds, skipped = None, 0.0, 0
        with self._start(command, file) as run:
            began, is_made = time.monotonic(), not during
            while True:
                is_running = run.poll() is None
                output = file.read_text(errors="replace")[skipped:]
                now = time.monotonic()
                if not is_made and re.search(r"\bstep +([2-9]|\d\d)", output):
                    skipped, is_made, began = skipped + len(output), True, now
                    self.run(during)
                    continue
                if is_made and line is None:
                    line, seconds = find(output), now - began
                limit = limit_s if is_made else START_S
                if not is_running or now > began + limit or (line and not is_whole):
                    return Sight(line, seconds, run.poll(), output)
                time.sleep(0.05)

    @contextlib.contextmanager
    def _start(self, command: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
        with output.open("ab") as out:
            run = subprocess.Popen(
                self.command(command),
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield run
        finally:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                if run.poll() is None:
                    os.killpg(run.pid, signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(20)
