"""The folder of a run and its run.json: who may read it, and what it says while the run lives."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import AGENT, ROOT, Run, begun, eventually, execute, rarely

from launcher import processes
from launcher.plan.typed import Choices
from launcher.record import run_json
from launcher.record.run_ids import free_run_id, next_run_id
from launcher.record.run_json import LauncherProcess, Record
from launcher.wire import limits

STEPS = """
import os, sys, time
from distributed.heartbeat import beat
beat(3, saved=2)
print("beats", flush=True)
while not os.path.exists("go on"):
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[Run]) -> Callable[..., Run]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)

    def begin(*words: str, stdin: int | None = None, **environment: str) -> Run:
        arguments = ["--log-dir", "logs", "--rdzv-id", "r1", "steps.py", *words]
        runs.append(Run(arguments, stdin, **{"PYTHONPATH": str(ROOT), **environment}))
        return runs[-1]

    return begin


Start = Callable[..., Run]


def read() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path("logs/r1/run.json").read_text())
    return record


@pytest.mark.slow
def test_run_json_says_how_far_the_run_is_and_how_it_ended(start: Start) -> None:
    run_json.update(Path("logs/r1"), detached=True, state="starting")
    run = start("7", GRACE="12")
    run.wait_for("beats")
    record = read()
    assert (record["state"], record["exit_code"], record["ended"]) == ("running", None, None)
    assert (record["step"], record["grace"]) == (-1, 12)
    assert record["detached"] is True  # another's field stays
    assert record["launcher"] == {
        "process": run.process.pid,
        "birth": processes.start_ticks(run.process.pid),
        "host": socket.gethostname(),
    }
    eventually(lambda: (read()["step"], read()["saved_step"]) == (3, 2))
    Path("go on").touch()
    run.finish()
    record = read()
    assert (record["state"], record["exit_code"]) == ("ended", 7)
    assert (record["step"], record["saved_step"]) == (3, 2)
    assert record["started"] < record["ended"] <= time.time()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, *rarely(signal.SIGTERM)])
def test_the_supervisor_completes_the_record_of_an_agent_that_was_killed(
    start: Start, signum: int
) -> None:
    run = start("0")
    run.wait_for("beats")
    agent = run.agent_pid()
    if signum == signal.SIGTERM:  # before it can note it, as a stuck agent could not
        os.kill(agent, signal.SIGSTOP)
        run.process.send_signal(signum)
        os.kill(agent, signal.SIGKILL)
    else:
        os.kill(agent, signum)
    run.finish()
    record = read()
    assert (record["state"], record["exit_code"]) == ("ended", 137)
    assert record["ended"] > record["started"]


@pytest.mark.slow
def test_a_launcher_elsewhere_names_itself(start: Start) -> None:
    run_json.update(Path("logs/r1"), launcher=LauncherProcess(1, 2, "elsewhere"))
    Path("go on").touch()
    start("0", LAUNCH_START="step", LAUNCH_TOKEN="t", SLURM_NODEID="0").finish()
    assert read()["launcher"] == {"process": 1, "birth": 2, "host": "elsewhere"}


@pytest.mark.slow
def test_a_run_that_is_refused_has_ended(start: Start) -> None:
    """Where the launcher, which has become the supervisor, has recorded it before."""
    code = "import os, sys\nfrom pathlib import Path\nfrom launcher.record import run_json\n"
    code += "run_json.note_start(Path('logs/r1'), {})\n"
    code += "os.execv(sys.argv[1], sys.argv[1:])"
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = ["--master-port", str(server.getsockname()[1]), "--log-dir", "logs"]
        command = [sys.executable, "-c", code, *AGENT, *options, "--rdzv-id", "r1", "steps.py"]
        launched = {"LAUNCH_START": "local", "LAUNCH_TOKEN": random.randbytes(8).hex()}
        variables = {"PYTHONPATH": str(ROOT), **launched, "RUN_ID": "r1"}
        done = execute(Path.cwd(), *command, code=3, **variables)
    assert "[port-in-use]" in done.stderr
    assert (read()["state"], read()["exit_code"]) == ("ended", 3)


def test_writers_of_run_json_lose_nothing_of_each_other(tmp_path: Path) -> None:
    code = "import sys\nfrom pathlib import Path\nfrom launcher.record import run_json\n"
    code += "run_json._LOCK_S = 60\nfor number in range(50):\n"
    code += "    run_json.update(Path('r1'), **{sys.argv[1]: number})\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", code, name], cwd=tmp_path, env=environment)
        for name in ("step", "saved_step", "world_size")
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert run_json.read(tmp_path / "r1") == Record(step=49, saved_step=49, world_size=49)


def test_a_damaged_record_is_written_anew(tmp_path: Path) -> None:
    for damaged in ("", "[]", "{", "\xff"):
        (tmp_path / "run.json").write_text(damaged, encoding="latin-1")
        run_json.update(tmp_path, step=1)
        assert run_json.read(tmp_path) == Record(step=1)


def test_a_writer_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RECORD_LOCK_S", 0.1)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX)\n"
    code += "print('held', flush=True); sys.stdin.read()"
    with begun(code, tmp_path / ".run.json.lock"):
        run_json.update(tmp_path, step=1)
    assert run_json.read(tmp_path) == Record(step=1)


@pytest.mark.parametrize("choose", [next_run_id, free_run_id])
def test_launches_at_the_same_time_have_names_of_their_own(
    choose: Callable[..., str], tmp_path: Path
) -> None:
    first, dry = Choices(), Choices(is_dry_run=True)
    names = [choose(tmp_path, "7", asked) for asked in (dry, first, first, dry, first)]
    assert names == ["7", "7", "7.1", "7", "7.2"]  # a dry run takes none
    again = Choices(environ={"SLURM_RESTART_COUNT": "1"})  # the first start may live on, cut off
    assert [choose(tmp_path, "7", again) for _ in range(2)] == ["7", "7.1"]


def test_a_copy_of_the_terminal_outlives_every_signal_that_stops_the_run(tmp_path: Path) -> None:
    """A scheduler signals all processes of a job; what is then said of the saving is kept."""
    file = tmp_path / "copy"
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from distributed.stop_signals import STOP_SIGNALS\n"
        "from launcher.record import transcript\n"
        "file = Path(sys.argv[1])\n"
        "transcript.keep(file)\n"
        "print('first', flush=True)\n"
        "while not file.exists() or not file.read_bytes():\n"
        "    time.sleep(0.01)\n"
        "for signum in STOP_SIGNALS:\n"
        "    signal.signal(signum, signal.SIG_IGN)\n"
        "    os.killpg(0, signum)\n"
        "print('last', flush=True)\n"
    )
    command = ["setsid", "--wait", sys.executable, "-c", code, file]
    execute(ROOT, *command)  # until the copy ends, too
    assert file.read_text() == "first\nlast\n"
