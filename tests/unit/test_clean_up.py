"""Whatever is killed or stopped, no process of a run is left, even if a rank forks twice."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from agents import Run, eventually, written

from launcher import processes

pytestmark = pytest.mark.slow

FORKS_TWICE = """
import os, time
import torch.distributed as dist

dist.init_process_group("gloo")
if os.fork() == 0:
    os.setsid()
    for _ in range(30):
        if os.fork() == 0:
            os._exit(0)  # a zombie of whoever adopts it
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
dist.barrier()
print(f"ready {dist.get_rank()}", flush=True)
time.sleep(600)
"""
VICTIMS = {  # -> the signals for supervisor and agent, in this order; 0: none
    "supervisor": (signal.SIGKILL, 0),
    "agent": (0, signal.SIGKILL),
    "both": (signal.SIGKILL, signal.SIGKILL),
    "supervisor, agent stopped": (signal.SIGKILL, signal.SIGSTOP),
}


def start_run(folder: Path, *through: str, **environment: str) -> Run:
    """Start two ranks as launcher/fanout/local.py does, and wait until they are ready."""
    script = written(folder / "program.py", FORKS_TWICE)
    reaper = {"LAUNCH_START": "local", "LAUNCH_TOKEN": random.randbytes(8).hex()}
    arguments = ["--nproc-per-node", "2", str(script)]
    run = Run(arguments, None, through, **reaper, **environment)
    run.wait_for("ready 0", "ready 1")
    return run


def hit(run: Run, victim: str) -> None:
    """Send each victim its signal, SIGSTOP first."""
    pids = run.process.pid, run.agent_pid()
    for pid, signum in sorted(zip(pids, VICTIMS[victim], strict=True), key=lambda one: -one[1]):
        if signum:
            os.kill(pid, signum)


@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_is_left(runs: list[Run], tmp_path: Path, victim: str) -> None:
    runs.append(run := start_run(tmp_path))
    assert len(run.seen) >= 2 + 2 + 2  # supervisor and agent, ranks, and their orphans
    kept = {run.process.pid, run.agent_pid()}
    eventually(lambda: not zombies_of(kept), "what is adopted is reaped")
    hit(run, victim)
    run.assert_gone()
    err = run.finish()
    if victim == "agent":
        assert run.process.returncode == 137 and "[agent-killed]" in err


def test_a_supervisor_that_dies_after_its_agent_is_cleaned_up_after_as_fast(
    runs: list[Run], tmp_path: Path
) -> None:
    runs.append(run := start_run(tmp_path))
    agent = run.agent_pid()
    os.kill(run.process.pid, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    time.sleep(0.5)  # between the two deaths; the reaper has seen the first
    os.kill(run.process.pid, signal.SIGKILL)
    run.assert_gone()


def zombies_of(parents: set[int]) -> int:
    stats = [processes.read_stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
    return sum(stat[0] == b"Z" and int(stat[1]) in parents for stat in stats if stat)


@pytest.mark.long
def test_a_python_without_the_newest_calls_will_do(runs: list[Run], tmp_path: Path) -> None:
    """conda's Pythons, and those built for older kernels, lack these calls."""
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.memfd_create, os.pidfd_open\n")
    runs.append(run := start_run(tmp_path, PYTHONPATH=str(tmp_path)))
    hit(run, "agent")
    err = run.finish()
    run.assert_gone()
    assert "[agent-killed]" in err and "Traceback" not in err


def test_a_process_without_descriptors_left_sees_no_other() -> None:
    code = """
import os, resource
from launcher import processes
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
try:
    while True:
        os.open("/dev/null", 0)
except OSError:
    pass
assert processes.descendants(1) == []
assert processes.end_descendants() == []
"""
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


SHARES = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

torch.multiprocessing.set_sharing_strategy("file_system")
dist.init_process_group("gloo")
kept = [batch for batch in DataLoader(TensorDataset(torch.ones(8, 4)), num_workers=1)]
names = {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/torch_" in line}
print("names", *(names or ["none"]), flush=True)
dist.barrier()
if dist.get_rank() == 1:
    if sys.argv[1] == "raise":
        raise ValueError("bad")
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
print("asleep", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["kill", "raise", "agent"])
def test_no_shared_memory_is_left(runs: list[Run], tmp_path: Path, how: str) -> None:
    script = written(tmp_path / "x.py", SHARES)
    runs.append(run := Run(["--nproc-per-node", "2", str(script), how]))
    run.wait_for("asleep")
    if how == "agent":
        os.kill(run.agent_pid(), signal.SIGKILL)
    run.finish()
    run.assert_gone()
    said = [line.split()[1:] for line in run.output.splitlines() if line.startswith("names")]
    files = [name for names in said for name in names]
    assert len(files) > 4 and "none" not in files
    assert [name for name in files if os.path.exists(name)] == []
