"""Finding the processes of a run among all others; Ctrl-C and Ctrl-Z."""

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from agents import (
    PATIENCE_S,
    ROOT,
    begun,
    children,
    eventually,
    execute,
    rarely,
    run_agent,
    written,
)

from launcher import processes
from launcher.outer_run import leave_outer_run

# A 16-byte name like the fields of /proc/PID/stat: the kernel cuts it inside its last letter.
NAMED = """
import ctypes, signal
ctypes.CDLL(None).prctl(15, ("x) S 1" + "é" * 5).encode(), 0, 0, 0)
print("named", flush=True)
signal.pause()
"""


@pytest.fixture
def foreign() -> Iterator[subprocess.Popen[str]]:
    """A process that belongs to no run, with a name that is not text."""
    with begun(NAMED) as process:
        yield process


@pytest.mark.slow
def test_a_foreign_process_with_a_cut_name_harms_no_run(
    foreign: subprocess.Popen[str], tmp_path: Path
) -> None:
    name = Path(f"/proc/{foreign.pid}/comm").read_bytes().rstrip(b"\n")
    assert len(name) == 15 and name.decode(errors="ignore") == "x) S 1" + "é" * 4
    script = written(tmp_path / "x.py", "print('ran')")
    done = run_agent(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_descendants_and_their_states(foreign: subprocess.Popen[str]) -> None:
    assert foreign.pid in processes.descendants(os.getpid())
    assert not processes.is_stopped(foreign.pid)
    os.kill(foreign.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, foreign.pid, os.WSTOPPED)
    assert processes.is_stopped(foreign.pid)
    assert processes.start_ticks(foreign.pid) == processes.start_ticks(foreign.pid) is not None
    foreign.kill()
    os.waitid(os.P_PID, foreign.pid, os.WEXITED | os.WNOWAIT)
    assert processes.start_ticks(foreign.pid) is None  # a zombie
    assert foreign.pid not in processes.descendants(os.getpid())


RANK = {
    **{"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
    **{"RUN_ID": "outer", "LAUNCH_TOKEN": "t.0", "LAUNCH_COMMAND": "x", "HEARTBEAT_FILE": "f"},
    **{"TORCHELASTIC_RUN_ID": "outer", "PET_NNODES": "2", "SLURM_STEP_ID": "1"},
}
USERS = {"SLURM_JOB_ID": "7", "LOG_DIR": "logs", "GRACE": "5", "CUDA_VISIBLE_DEVICES": "1"}


def test_a_launch_by_a_rank_inherits_nothing_of_its_run() -> None:
    environ = {**RANK, **USERS}
    leave_outer_run(environ)
    assert environ == {**USERS, "LAUNCH_OUTER": "t.0"}
    given = {name: value for name, value in RANK.items() if name != "TORCHELASTIC_RUN_ID"}
    environ = dict(given)
    leave_outer_run(environ)
    assert environ == given  # set for this launch, not by a rank


def test_an_inner_run_ends_with_the_outer_one() -> None:
    inner = subprocess.Popen(["sleep", "600"], env={"LAUNCH_OUTER": "t.0", "PATH": os.defpath})
    assert processes.end_marked("t.0", 0) == 1
    assert inner.wait() == -signal.SIGKILL


SUSPENDED = """
import os, signal, sys, threading, time
from launcher import processes
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, *processes.WAKING})
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("waits", flush=True)
while (came := processes.await_signal({signal.SIGUSR1}, 0.01)) is None:
    pass
print(came, flush=True)
"""


def test_a_wait_for_a_signal_outlives_a_suspension() -> None:
    """A process suspended for longer than its wait does not report a signal that was not sent."""
    with begun(SUSPENDED) as process:
        for _ in range(20):
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=PATIENCE_S)[0] == f"{signal.SIGUSR1:d}\n"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_what_may_not_be_seen_or_signalled_is_left_out() -> None:
    code = "import os, signal\nfrom launcher import processes\nos.setuid(65534)\n"
    code += "processes.send([1], signal.SIGTERM); print(processes.descendants(1) != [])"
    assert execute(ROOT, sys.executable, "-c", code).stdout == "True\n"


def test_ctrl_c_while_the_agent_begins_is_a_stop_like_any_other(tmp_path: Path) -> None:
    early = "import os, signal, sys\n"
    early += "if any(word.endswith('lib/agent.py') for word in sys.orig_argv):\n"
    early += "    os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "sitecustomize.py").write_text(early)
    (tmp_path / "x.py").write_text("import time\ntime.sleep(600)\n")
    words = [ROOT / "scripts/launch.sh", "x.py"]
    done = execute(tmp_path, *words, code=130, PYTHONPATH=str(tmp_path))
    assert done.stderr.endswith("\nstopped  by SIGINT (code 130); nothing is left running\n")
    assert "Traceback" not in done.stderr


CALL = ["launch_singlenode", "x.sh", "x.sh", "/", sys.executable, "", "", "x.sh"]


@pytest.mark.parametrize(
    ("program", "words"),
    [("agent.py", ["x.py"]), ("start.py", [*CALL, "-", "1"])],
    ids=["agent", "launcher"],
)
def test_ctrl_c_while_our_own_modules_are_imported_shows_no_traceback(
    program: str, words: list[str], tmp_path: Path
) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "tempfile.py").write_text(kill)  # replaces Python's own module
    command = ["env", sys.executable, ROOT / "scripts/lib" / program, *words]  # is not forked
    done = execute(tmp_path, *command, code=-signal.SIGINT, PYTHONPATH=str(tmp_path))
    assert done.stderr == ""


# --- Ctrl-Z stops all of a run on one machine, and `fg` continues it ------------------------------


COUNT = """
import time
number = 0
while True:
    number += 1
    print("at", number, flush=True)
    time.sleep(0.01)
"""


class Shell:
    """A bash with job control, on its own terminal."""

    def __init__(self, folder: Path) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "-i"], {**os.environ, "PS1": "$ "})
        self.shown = ""

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self.terminal, text.encode())

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.shown):
            assert time.monotonic() < deadline, self.shown
            self.shown += os.read(self.terminal, 65536).decode(errors="replace")

    def close(self) -> None:
        processes.send(processes.descendants(self.pid), signal.SIGKILL)
        processes.send([self.pid], signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)


def are_stopped(pids: Sequence[int]) -> bool:
    return all(map(processes.is_stopped, pids))


@pytest.mark.slow
def test_it_stops_every_process_and_fg_continues_them(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(COUNT)
    shell = Shell(tmp_path)
    try:
        words = [f"{ROOT}/scripts/launch.sh", "--nproc-per-node", "2", "count.py"]
        shell.type(f"PYTHON={shlex.quote(sys.executable)} {shlex.join(words)}\n")
        shell.wait_for(r"at \d+")
        for _ in range(2):
            shell.type("\x1a")
            shell.wait_for("Stopped")
            (supervisor,) = children(shell.pid)
            below = processes.descendants(supervisor)
            assert len(below) == 3  # the agent and two ranks
            eventually(partial(are_stopped, [supervisor, *below]), "a process that is not stopped")
            shell.type("fg\n")
            shell.wait_for(r"at \d+\s[\s\S]*at \d+\s")
        shell.type("\x03")
        shell.wait_for(r"stopped  by SIGINT: ranks 0-1 ended by SIGINT \(code 130\)")
    finally:
        shell.close()


SAVES = """
import signal, sys, time
from torch_launch_kit.distributed.heartbeat import beat
signal.signal(signal.SIGINT, lambda *_: (beat(1, saved=1), sys.exit(75)))
beat(0)
print("at 1", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_script_that_exits_with_the_code_of_a_ctrl_c_ends_no_loop(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("raise SystemExit(130)\n")
    shell = Shell(tmp_path)
    try:
        launch = f"PYTHON={shlex.quote(sys.executable)} {ROOT}/scripts/launch.sh x.py"
        shell.type(f"for i in a b; do {launch}; echo co''de: $?; done; echo o''ver\n")
        shell.wait_for(r"over")
        assert shell.shown.count("code: 130") == 2
    finally:
        shell.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (SAVES, r"after saving a checkpoint \(code 75\)"),
        *rarely((COUNT, r"ended by SIGINT \(code 130\)")),
    ],
    ids=["saves", "ends"],
)
def test_ctrl_c_ends_the_loop_of_the_shell_too(program: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(program)
    shell = Shell(tmp_path)
    try:
        launch = f"PYTHON={shlex.quote(sys.executable)} {ROOT}/scripts/launch.sh x.py"
        shell.type(f"for i in a b; do {launch}; done; echo o''ver\n")
        shell.wait_for(r"at 1")
        shell.type("\x03")
        shell.wait_for(rf"stopped  by SIGINT.* {said}")
        shell.type("echo code: $?\n")
        shell.wait_for(r"code: \d+")
        assert "code: 130" in shell.shown and "over" not in shell.shown
    finally:
        shell.close()


@pytest.mark.slow
def test_a_run_that_no_shell_could_continue_does_not_stop(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(COUNT)
    words = [f"{ROOT}/scripts/launch.sh", "--nproc-per-node", "1", "count.py"]
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHON": sys.executable},
    ) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.send_signal(signal.SIGTSTP)
        for _ in range(100):  # more than the pipe and the agent hold
            assert run.stdout.readline().startswith("at ")
        run.send_signal(signal.SIGTERM)
        run.stdout.read()
    assert run.returncode == 143
