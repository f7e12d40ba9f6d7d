"""The complete node agent: real forks, real gloo, real deaths."""

import contextlib
import importlib.metadata
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import AGENT, PROGRAM, ROOT, SAVES_ON_SIGTERM, Run, execute, rarely, run_agent, written
from torch._utils import ExceptionWrapper

from distributed.lock import update_link
from launcher import failure
from launcher.agent.control import AgentNote
from launcher.agent.supervisor import Agent, _explain_death, _report_death
from launcher.record.run_folder import RunFolder
from launcher.text import install_command
from launcher.typed_json import encode
from launcher.wire import limits

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, runs: list[Run]) -> Start:
    script = written(tmp_path / "program.py", PROGRAM)

    def begin(what: str, who: int = 1, *options: str, **environment: str) -> Run:
        arguments = ["--nproc-per-node", "2", *options, str(script), what, str(who)]
        runs.append(Run(arguments, **environment))
        return runs[-1]

    return begin


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "fault", "cause"),
    [
        ("raise", 1, "rank-error", "ValueError: batch 120 holds no samples"),
        ("kill", 137, "rank-killed", "SIGKILL"),
        *rarely(("segv", 139, "rank-crashed", "SIGSEGV")),
    ],
)
@pytest.mark.another_torch("failure block")
def test_one_dies_all_stop(
    start: Start, tmp_path: Path, what: str, code: int, fault: str, cause: str
) -> None:
    logs = tmp_path / "logs"
    words = ["--log-dir", str(logs), "--rdzv-id", "r1"]
    run = start(what, 1, *words, LAUNCH_COMMAND="launch 'a b'")
    run.wait_for("ready 0")
    err = run.finish()
    run.assert_gone()
    assert run.process.returncode == code
    block = err[err.index("FAILED") :]
    assert re.match(
        rf"FAILED   rank 1 \(local rank 1, \S+\) \d+ s after the start +\[{fault}\]", block
    )
    assert cause in block
    assert block.rstrip().endswith(f"see      TROUBLESHOOTING.md#{fault}")
    assert "resume " not in err  # the rank has reported no save
    assert "ready 0" in run.output and "ready 1" not in run.output
    assert (logs / "latest").resolve() == logs / "r1"
    lines = (logs / "node_0.log").read_text().splitlines()
    assert "[0] ready 0" in lines and "[1] ready 1" in lines
    record = json.loads((logs / "r1/run.json").read_text())
    assert (record["exit_code"], record["world_size"]) == (code, 2)
    assert record["ended"] > record["started"]
    if what == "raise":
        named = re.search(r"^log +\S*?(\d+)$", err, re.MULTILINE)
        assert named and "Traceback" in lines[int(named[1]) - 1]
        error = json.loads((logs / "r1/failures/rank_1.json").read_text())
        assert f"cause    {error['message']['message']}\n" in block


@pytest.mark.slow
def test_an_agent_that_fails_itself_says_so_in_a_block(tmp_path: Path) -> None:
    script = written(tmp_path / "idle.py", "import time; time.sleep(600)")
    run = Run(["--nproc-per-node", "16", str(script)], None, ["prlimit", "--nofile=40"])
    err = run.finish()
    run.assert_gone()
    assert run.process.returncode == 1
    block = err[err.index("FAILED") :]
    assert re.match(r"FAILED   node agent 0 \(\S+\) \d+ s after the start +\[low-nofile\]", block)
    assert "cause    the node agent failed: OSError: [Errno 24] Too many open files\n" in block


@pytest.mark.slow
def test_a_stop_that_ranks_ignore_ends_after_the_grace(start: Start) -> None:
    run = start("deaf", GRACE="1")
    run.wait_for("armed 0", "armed 1")
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    run.assert_gone()
    assert run.process.returncode == 143


@pytest.mark.slow
def test_a_notice_that_the_script_does_not_handle_ends_nothing(start: Start) -> None:
    run = start("sleep", GRACE="600")
    run.wait_for("asleep 0", "asleep 1")  # the agent would wait for a rank in a collective
    run.process.send_signal(signal.SIGUSR1)
    run.process.send_signal(signal.SIGTERM)  # any earlier signal but SIGUSR1 would be named instead
    err = run.finish()
    run.assert_gone()
    assert run.process.returncode == 143
    assert "stopped  by SIGTERM: ranks 0-1 ended by SIGTERM (code 143)" in err
    assert "FAILED" not in err


HANDLES_EACH = """
import os, signal, time
def tell(signum, _):
    os.write(1, f"{signal.Signals(signum).name}\\n".encode())
    if signum == signal.SIGTERM:
        os._exit(3)
for one in signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM:
    signal.signal(one, tell)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_one_notice_after_the_other_reaches_the_rank_and_a_stop_is_named_first(
    tmp_path: Path, runs: list[Run]
) -> None:
    run = Run([str(written(tmp_path / "x.py", HANDLES_EACH))])
    runs.append(run)
    run.wait_for("ready")
    run.process.send_signal(signal.SIGUSR1)
    run.wait_for("SIGUSR1")
    run.process.send_signal(signal.SIGUSR2)
    run.wait_for("SIGUSR2")
    run.process.send_signal(signal.SIGTERM)
    err = run.finish()
    run.assert_gone()
    assert run.output.split() == ["ready", "SIGUSR1", "SIGUSR2", "SIGTERM"]
    assert "stopped  by SIGTERM: rank 0 exited with code 3 (code 3)" in err


GOES_ON_THEN_FAILS = """
import os, signal, sys, time
came = []
signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
print("ready", flush=True)
while not came:
    time.sleep(0.01)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("after the notice")
print("restarted", flush=True)
"""


@pytest.mark.slow
def test_after_a_notice_a_failure_restarts_the_ranks_which_get_it_too(
    tmp_path: Path, runs: list[Run]
) -> None:
    run = Run(["--max-restarts=1", str(written(tmp_path / "x.py", GOES_ON_THEN_FAILS))])
    runs.append(run)
    run.wait_for("ready")
    run.process.send_signal(signal.SIGUSR1)
    err = run.finish()
    run.assert_gone()
    assert "restarted" in run.output and run.process.returncode == 0, err


HANDLES_ALL = """
import os, signal, sys, time
came = []
for name in ("SIGUSR2", "SIGALRM", "SIGXCPU", "SIGPROF", "SIGPWR", "SIGRTMIN"):
    signal.signal(getattr(signal, name), lambda signum, _: came.append(signum))
print("ready", flush=True)
while len({*came}) < 6:
    time.sleep(0.01)
sys.path.append(os.environ["KIT"])
from distributed.heartbeat import beat
beat(saved=1)
print("all came", flush=True)
sys.exit(75)
"""


@pytest.mark.slow
def test_a_signal_to_all_processes_as_slurm_sends_it_ends_none_of_ours(tmp_path: Path) -> None:
    run = Run(["--nproc-per-node", "1", str(written(tmp_path / "handles.py", HANDLES_ALL))])
    run.wait_for("ready")
    others = (signal.SIGALRM, signal.SIGXCPU, signal.SIGPROF, signal.SIGPWR, signal.SIGRTMIN)
    for pid in (run.process.pid, run.agent_pid(), *run.rank_pids()):
        for signum in (signal.SIGSTOP, *others, signal.SIGUSR2, signal.SIGCONT):
            os.kill(pid, signum)  # a stopped process gets them all at the same moment
    err = run.finish()
    run.assert_gone()
    assert (run.process.returncode, "all came" in run.output) == (75, True)
    assert "stopped  by SIGUSR2" in err or "(SIGUSR2)" in err


@pytest.mark.slow
def test_an_agent_that_does_not_stop_is_killed_and_that_is_told(start: Start) -> None:
    run = start("sleep", GRACE="1")
    run.wait_for("asleep 0", "asleep 1")
    run.look()
    os.kill(run.agent_pid(), signal.SIGSTOP)
    run.process.terminate()
    err = run.finish()
    run.assert_gone()
    assert run.process.returncode == 137
    told = "node agent: killed: it did not stop in time; it is stopped (SIGSTOP) or hangs"
    assert err.splitlines()[-1] == told


@pytest.mark.slow
def test_a_rank_dies_of_a_signal_that_it_does_not_handle(start: Start) -> None:
    run = start("sleep")
    run.wait_for("asleep 0", "asleep 1")
    os.kill(run.rank_pids()[1], signal.SIGXCPU)
    err = run.finish()
    run.assert_gone()
    assert run.process.returncode == 128 + signal.SIGXCPU
    assert "FAILED   rank 1 " in err and "SIGXCPU" in err


@pytest.mark.slow
def test_a_neighbour_run_never_notices(start: Start) -> None:
    neighbour, run = start("sleep"), start("sleep")
    neighbour.wait_for("ready 0", "ready 1")
    run.wait_for("ready 0", "ready 1")
    os.kill(run.agent_pid(), signal.SIGKILL)
    run.assert_gone()
    assert sorted(neighbour.survivors()) == sorted(neighbour.seen)


def test_hosts_with_one_process_id_point_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link, replace = tmp_path / "latest", os.replace

    def while_the_other_does(new: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(socket, "gethostname", lambda: "other")
        update_link(link, "theirs")
        replace(new, path)

    monkeypatch.setattr(os, "replace", while_the_other_does)
    update_link(link, "ours")
    assert link.readlink() == Path("ours")


def test_what_the_user_has_in_the_place_of_a_link_is_kept(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "latest").symlink_to("theirs")
    (tmp_path / "node_1.log").write_text("mine")
    RunFolder(tmp_path, "first", 1, {}).create()
    assert (tmp_path / "node_1.log").read_text() == "mine"
    (tmp_path / "node_0.log").symlink_to("gone/node_0.log")
    for run_id in ("first", "second"):
        RunFolder(tmp_path, run_id, 0, {}).create()
        assert (tmp_path / "latest").readlink() == Path("theirs")
        assert (tmp_path / "node_0.log").readlink() == Path(run_id, "node_0.log")
    (tmp_path / "latest").unlink()
    for run_id in ("third", "fourth"):
        RunFolder(tmp_path, run_id, 0, {}).create()
        assert (tmp_path / "latest").readlink() == Path(run_id)


@pytest.mark.slow
@pytest.mark.another_torch("restart")
def test_max_restarts_forks_the_ranks_anew(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "dist.barrier()\n"
        "print('attempt', attempt, flush=True)\n"
        "print('port', os.environ['MASTER_PORT'], flush=True)\n"
        "if attempt == 0: raise ValueError('of the first attempt')\n"
        "if attempt == 1: os._exit(9)\n"
    )
    run = Run(["--nproc-per-node", "2", "--max-restarts", "3", str(script)])
    err = run.finish()
    assert run.process.returncode == 0, err
    lines = run.output.splitlines()
    assert lines.count("attempt 2") == 2
    assert len({line for line in lines if line.startswith("port ")}) == 3  # a new port each time
    first, second = (line for line in err.splitlines() if "node agent: restart " in line)
    assert "restart 1 of 3 " in first and ": ValueError: of the first attempt; " in first
    assert "restart 2 of 3 " in second and ": exited with code 9" in second


@pytest.mark.slow
def test_a_terminal_reaches_rank_zero(tmp_path: Path) -> None:
    script = tmp_path / "tty.py"
    script.write_text(
        "import os, sys\nsys.stderr.write(f'bar 1\\rbar {sys.stderr.isatty()}\\n')\nsys.exit(0)\n"
    )
    ours, theirs = pty.openpty()
    logs = tmp_path / "logs"
    options = ["--nproc-per-node", "2", "--log-dir", str(logs), "--rdzv-id", "t"]
    command = [*AGENT, *options, str(script)]
    shown = b""
    with subprocess.Popen(command, stderr=theirs, stdout=theirs) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the end of the output
            while True:
                shown += os.read(ours, 65536)
    os.close(ours)
    assert process.returncode == 0
    assert shown == b"bar 1\rbar True\r\n"
    lines = sorted((logs / "node_0.log").read_bytes().split(b"\n"))
    assert lines == [b"", b"[0] bar True", b"[1] bar False"]


CUT_OFF = """
import json, os
from pathlib import Path
failures = Path(os.environ["LOG_DIR"], os.environ["RUN_ID"], "failures")
error = {"message": "OldError", "extraInfo": {"py_callstack": "", "timestamp": "0"}}
(failures / "rank_0.json").write_text(json.dumps({"message": error}))
os._exit(7)
"""


@pytest.mark.long
def test_the_error_of_a_rank_that_slurm_has_replaced_is_not_its_successors(tmp_path: Path) -> None:
    written(tmp_path / "x.py", CUT_OFF)  # what that rank does in the meantime
    words = ["--log-dir", "logs", "--rdzv-id", "r", "x.py"]
    done = execute(tmp_path, *AGENT, *words, code=7, SLURM_RESTART_COUNT="1")
    assert "OldError" not in done.stderr
    assert "cause    exited with code 7 without an exception" in done.stderr


@pytest.mark.slow
def test_a_full_disk_ends_the_log_but_not_the_run(tmp_path: Path) -> None:
    written(tmp_path / "x.py", "print('x' * 50_000); print('y' * 50_000); print('z')")
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash"]
    done = execute(tmp_path, *limited, *AGENT, "--log-dir", "logs", "--rdzv-id", "r", "x.py")
    assert done.stdout.endswith("y\nz\n")
    assert "_0.log is incomplete from here (File too large); the run" in done.stderr


@pytest.mark.slow
def test_a_rank_that_fails_after_its_log_is_lost_is_named_with_its_error(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text(
        "import os, shutil\n"
        "shutil.rmtree(os.path.join(os.environ['LOG_DIR'], os.environ['RUN_ID']))\n"
        "raise ValueError('batch 120 holds no samples')\n"
    )
    done = execute(tmp_path, *AGENT, "--log-dir", "logs", "--rdzv-id", "r", "x.py", code=1)
    block = done.stderr[done.stderr.index("FAILED   rank 0 ") :]
    assert "cause    ValueError: batch 120 holds no samples" in block
    assert "During handling" not in done.stderr


@pytest.mark.slow
def test_a_working_directory_that_is_deleted_hides_no_error(tmp_path: Path) -> None:
    (here := tmp_path / "here").mkdir()
    error = "raise ValueError('batch 120 holds no samples')"
    written(here / "x.py", f"import os, shutil\nshutil.rmtree(os.getcwd())\n{error}\n")
    done = execute(here, *AGENT, "x.py", code=1)
    assert "cause    ValueError: batch 120 holds no samples" in done.stderr


@pytest.mark.slow
def test_ranks_restart_although_their_log_disk_is_lost(tmp_path: Path) -> None:
    script = written(
        tmp_path / "x.py",
        "import os, pathlib, shutil\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    folder = pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).parent\n"
        "    shutil.rmtree(folder)\n"
        "    folder.touch()  # no file can be written or deleted below it\n"
        "    os._exit(9)\n",
    )
    options = ["--max-restarts", "1", "--log-dir", "logs", "--rdzv-id", "r"]
    assert "restart 1 of 1" in execute(tmp_path, *AGENT, *options, script).stderr


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        ("ValueError: bad\nand more", "ValueError: bad ..."),
        ("AssertionError: ", "AssertionError"),
        ("", "an exception without a message"),
        ("x" * 1000, "x" * 300 + " ..."),
    ],
)
def test_a_cause_is_one_line(cause: str, line: str) -> None:
    assert failure.one_line(cause) == line


def test_what_a_data_worker_raised_is_the_cause() -> None:
    try:
        try:
            raise KeyError("x")
        except KeyError as error:
            raise OSError(5, "cannot read broken.jpg") from error
    except OSError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")  # type: ignore[no-untyped-call]
    with pytest.raises(OSError) as raised:
        wrapped.reraise()  # type: ignore[no-untyped-call]
    told = failure.one_line(f"OSError: {raised.value}")
    assert told == "OSError: [Errno 5] cannot read broken.jpg (in DataLoader worker process 0)"


@pytest.mark.parametrize("has_pip", [True, False])
def test_what_installs_a_package_names_the_python(
    has_pip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    monkeypatch.setattr("launcher.text.PathFinder.find_spec", lambda name: has_pip or None)
    pip = "/env/bin/python -m pip install" if has_pip else "uv pip install --python /env/bin/python"
    missing = "ModuleNotFoundError: No module named"
    kept = f"torch=={importlib.metadata.version('torch')}"
    for name, package in (("pandas", "pandas"), ("sklearn", "scikit-learn")):
        told = failure.install_cure(f"{missing} '{name}'")
        assert told == f"; if it is a package: {pip} {package} {kept}"
    for name in ("distributed", "distributed.torch", "launcher", "training"):
        told = failure.install_cure(f"{missing} '{name}'")
        assert told == f"; if it is the launch kit's: from torch_launch_kit.{name} import ..."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src/own_package").mkdir(parents=True)
    (tmp_path / "src/own_package/loss.py").touch()
    (tmp_path / "own_data").mkdir()  # no code
    (tmp_path / "own_file.py").touch()
    for name, told in (
        ("own_package", "; it is in src: set PYTHONPATH=src"),
        ("own_file", "; it is in .: set PYTHONPATH=."),
        ("own_data", f"; if it is a package: {pip} own_data {kept}"),
    ):
        assert failure.install_cure(f"{missing} '{name}'") == told
    told = failure.install_cure(f"{missing} 'torch_launch_kit'")
    assert told.startswith("; start the script with scripts/launch.sh, or run ")
    for other in (f"{missing} 'a.b'", "ValueError: No module named 'a'"):
        assert failure.install_cure(other) == ""


@pytest.mark.slow
def test_a_printed_cure_keeps_the_torch_that_is_there(tmp_path: Path) -> None:
    """As torchvision does, the package requires another torch; pip refuses to replace ours."""
    (tmp_path / "setup.py").write_text(
        "from setuptools import setup\n"
        "setup(name='vision', version='1', py_modules=[], install_requires=['torch<2'])\n"
    )
    command = shlex.split(install_command(str(tmp_path)))
    assert command[-1] == f"torch=={importlib.metadata.version('torch')}"
    options = ["--dry-run", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "conflict" in done.stderr, done.stderr
    assert "Would install" not in done.stdout


def test_what_names_the_python_leaves_setuptools_whole() -> None:
    """torch.compile needs setuptools, whose finder on Python 3.11 checks whether pip starts."""
    script = "from launcher.text import install_command; install_command('x'); import setuptools"
    execute(ROOT, sys.executable, "-c", script)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("ImportError: cannot import name 'f' from 'model' (/me/model.py)", "rank-error"),
        ("ImportError: cannot import name 'f' from 'm' (unknown location)", "version-mismatch"),
        (
            "ImportError: cannot import name 'f' from 'x' (/env/lib/python3.12/site-packages/x.py)",
            "version-mismatch",
        ),
        (
            "ImportError: cannot import name 'Mapping' from 'collections' "
            "(/usr/lib/python3.12/collections/__init__.py)",
            "version-mismatch",
        ),
        ("ModuleNotFoundError: No module named 'pandas'", "env-missing"),
        ("RuntimeError: unexpected pos 704 vs 598", "disk-full"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "out-of-memory"),
        ("ValueError: a word [in-brackets]", "rank-error"),
        ("", "rank-error"),
    ],
)
def test_the_fault_of_an_error_that_names_none(message: str, fault: str) -> None:
    assert failure.fault_of(message) == fault


NOTE = AgentNote("", 0, 0.0, 0)  # of an agent that has recorded nothing


def supervised(pid: int, notes: socket.socket) -> Agent:
    return Agent(pid, notes, -1, NOTE, None, 30.0, frozenset(), None)


def test_a_question_before_the_ranks_start_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(["sleep", "600"]) as process:
        agent = supervised(process.pid, ours)
        agent.ask()
        assert capsys.readouterr().err == "node agent: the ranks have not started yet\n"
        theirs.sendall(b"note")
        agent.ask()
        assert process.wait() == -signal.SIGQUIT


@pytest.mark.parametrize("is_out_of_memory", [True, False])
def test_the_kernels_kill_of_an_agent_is_told_from_a_foreign_one(
    is_out_of_memory: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    why = _explain_death(137, [], has_torch=True, is_out_of_memory=is_out_of_memory)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode(AgentNote("r", 1, time.time(), 2)).encode())
        _report_death(supervised(-1, ours), 137, why, [], left=0)
    err = capsys.readouterr().err
    fault = "out-of-memory" if is_out_of_memory else "agent-killed"
    assert err.lstrip("\n").startswith("FAILED   node agent 1 (") and f"[{fault}]" in err
    assert ("from the kernel" in err) == is_out_of_memory


@pytest.mark.parametrize(
    ("last", "fault"),
    [
        ("torch.distributed.DistStoreError: Failed to init uv loop", "low-nofile"),
        ("OSError: [Errno 24] Too many open files: '/dev/null'", "low-nofile"),
        ("RuntimeError: can't start new thread", "low-nproc"),
        ("OSError: [Errno 28] No space left on device", "disk-full"),
        ("KeyError: 'x'", "agent-killed"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "agent-killed"),
    ],
)
def test_an_agent_that_fails_for_a_known_reason_names_it(last: str, fault: str) -> None:
    words = ["Traceback (most recent call last):", last]
    why = _explain_death(1, words, has_torch=True, is_out_of_memory=False)
    assert why == (fault, f"the node agent failed: {last}")


@pytest.mark.parametrize(
    ("last", "fault"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "env-missing"),
        ("ImportError: libtorch_cpu.so: failed to map segment from shared object", "out-of-memory"),
        ("RuntimeError: can't start new thread", "low-nproc"),
        ("PermissionError: [Errno 13] Permission denied: '/x/torch/version.py'", "env-missing"),
        ("ImportError: libtorch.so: undefined symbol: ncclCommRegister", "env-missing"),
        ("SyntaxError: invalid syntax", "env-missing"),
    ],
)
def test_an_agent_that_cannot_import_torch_for_a_known_reason_names_it(
    last: str, fault: str
) -> None:
    words = ["Traceback (most recent call last):", last]
    why = _explain_death(1, words, has_torch=False, is_out_of_memory=False)
    assert why == (fault, f"the node agent could not import torch: {last}")


CANNOT_EXIT = """
import os, sys, threading, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    threading.Thread(target=time.sleep, args=(10**5,)).start()
    if sys.argv[1] == "raise":
        raise ValueError("the label 11 is not in 0..9")
    sys.exit(7)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("raise", 1, "ValueError: the label 11 is not in 0..9"),
        *rarely(("exit", 7, "SystemExit: 7")),
    ],
)
def test_a_rank_that_has_failed_and_cannot_exit_is_reported(
    tmp_path: Path, runs: list[Run], how: str, code: int, cause: str
) -> None:
    script = written(tmp_path / "x.py", CANNOT_EXIT)
    runs.append(run := Run(["--nproc-per-node", "2", str(script), how]))
    err = run.finish()
    run.assert_gone()
    assert run.process.returncode == code
    assert "FAILED   rank 1 " in err and f"cause    {cause}\n" in err


FINISHES = """
import atexit, os, sys, time
sys.path.append(os.environ["KIT"])
from distributed.exit import finish

atexit.register(print, "cleaned up", flush=True)
atexit.register(time.sleep, float(sys.argv[2]))
finish(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "wait_s"), [(3, 0), *rarely((0, 2 * limits.RAISED_S), (75, 2 * limits.RAISED_S))]
)
def test_a_rank_that_calls_finish_runs_its_exit_handlers(
    tmp_path: Path, runs: list[Run], code: int, wait_s: float
) -> None:
    script = written(tmp_path / "x.py", FINISHES)
    runs.append(run := Run([str(script), str(code), str(wait_s)]))
    err = run.finish()
    assert (run.process.returncode, run.output) == (code, "cleaned up\n")
    assert code == 0 or (f"cause    SystemExit: {code}\n" in err and "x.py:8 in <module>" in err)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise KeyboardInterrupt", 130),
        *rarely(("1 / 0", 1), ("raise SystemExit(75)", 75), ("", 0)),
    ],
)
def test_what_a_script_has_open_is_whole_after_any_end(tmp_path: Path, end: str, code: int) -> None:
    lines = "import atexit\nf = open('out', 'w')\nf.write('x')\natexit.register(f.write, 'y')\n"
    done = run_agent(written(tmp_path / "x.py", lines + end), folder=tmp_path)
    assert done.returncode == code
    assert (tmp_path / "out").read_text() == "xy"


SAVES_TO_A_SLOW_DISK = """
import os, sys, time
from pathlib import Path
import torch
from distributed.checkpoint.saver import Saver
from distributed.torch import init_distributed, save

sync, waits = os.fsync, [float(sys.argv[1])]
os.fsync = lambda fd: time.sleep(waits.pop() if waits else 0) or sync(fd)
init_distributed()
net = torch.nn.Linear(2, 2)
save(Saver(Path("run"), keep_last=1), 5, net, torch.optim.SGD(net.parameters()))
exec(sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "disk_s"),
    [
        ("raise ValueError", 1, 2),
        *rarely(
            ("raise ValueError", 1, 1.5 * limits.RAISED_S),
            ("sys.exit(3)", 3, 1.5 * limits.RAISED_S),
            ("raise KeyboardInterrupt", 130, 2),
            ("pass", 0, 2),
        ),
    ],
)
def test_a_save_in_progress_is_finished_before_a_rank_exits(
    tmp_path: Path, end: str, code: int, disk_s: float
) -> None:
    script = written(tmp_path / "x.py", SAVES_TO_A_SLOW_DISK)
    done = run_agent(script, disk_s, end, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == code, done.stderr
    assert (tmp_path / "run/step-5/manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", *rarely("flag")])
def test_a_rank_that_saves_on_sigterm_has_time_after_another_ones_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[Run], how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script = written(tmp_path / "x.py", SAVES_ON_SIGTERM)
    grace = "600" if how == "flag" else "60"  # --shutdown-timeout, or GRACE
    runs.append(run := Run(["--nproc-per-node", "2", str(script), how], GRACE=grace))
    err = run.finish()
    run.assert_gone()
    assert "cause    ValueError: bad" in err
    if how == "save":
        assert (tmp_path / "emergency").read_text().endswith("whole\n")
