"""The moms of the stand-in for PBS, which run its jobs, and code that its commands share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BIN = Path(sys.argv[0]).absolute().parent  # the folder of the links
HOST = os.uname().nodename
PBS = BIN.parent
QUEUE = "workq"
KILL_DELAY_S = 10  # unless the queue sets another
LOOK_S = 0.1  # a real mom looks every 7 to 11 s
# As in the file that OpenPBS's installer writes; PBS_CONF_FILE replaces /etc/pbs.conf, which the
# hosts share with the machine.
PBS_ENVIRONMENT = {"TZ": "UTC", "PATH": "/bin:/usr/bin", "PBS_CONF_FILE": str(PBS / "pbs.conf")}
Job = dict[str, Any]  # attributes as qstat shows them, and "own": those that qstat does not show


def write(path: Path, value: Any) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(value))
    new.replace(path)  # atomically


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def lines_of(job: Job) -> list[int]:
    """Return the chunk of each line of a job's node file."""
    chunks = job["own"]["chunks"]
    return [place for place, one in enumerate(chunks) for _ in range(int(one.get("mpiprocs", 1)))]


def session_of(leader: int) -> Iterator[int]:
    """Yield the live processes of a session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                yield int(path.parent.name)


def send(leader: int, signum: int) -> None:
    """Signal all processes of a session at once."""
    for pid in list(session_of(leader)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


class Task:
    """The leader of a session started by a mom: a job's first process, or a task of pbsdsh."""

    def __init__(self, name: str, job: Job, number: int, command: Sequence[str]) -> None:
        chunks, own = job["own"]["chunks"], job["own"]["chunks"][number]
        hosts = [chunks[place]["host"] for place in lines_of(job)]
        numbers = list(dict.fromkeys(one["host"] for one in chunks))  # PBS_NODENUM numbers hosts
        aux, folder, home = PBS / "aux" / name, PBS / "tmp" / f"pbs.{name}", os.environ["HOME"]
        aux.write_text("".join(f"{host}\n" for host in hosts))
        folder.mkdir(exist_ok=True)
        gpus = [f"GPU-of-{own['host']}-{gpu}" for gpu in range(int(own.get("ngpus", 0)))]
        environ = {
            **{"HOME": home, "LOGNAME": "root", "USER": "root", "SHELL": "/bin/bash"},
            **{**PBS_ENVIRONMENT, **job["own"]["variables"]},
            **{"NCPUS": own["ncpus"], "OMP_NUM_THREADS": own.get("ompthreads", own["ncpus"])},
            **{"ENVIRONMENT": "BATCH", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_QUEUE": QUEUE},
            **{"PBS_JOBID": name, "PBS_JOBNAME": job["Job_Name"], "PBS_NODEFILE": str(aux)},
            **{"PBS_JOBCOOKIE": "0" * 16, "PBS_MOMPORT": "15003", "PBS_TASKNUM": "1"},
            **{
                "PBS_JOBDIR": home,
                "PBS_NODENUM": str(numbers.index(own["host"])),
                "TMPDIR": str(folder),
            },
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),  # like the cgroups hook
        }
        words, program = (command, command[0]) if command else (["-bash"], "/bin/bash")
        with (PBS / "spool" / f"{name}.OU").open("ab") as out:
            try:
                self.leader = subprocess.Popen(
                    *(words, -1, program, subprocess.PIPE, out, out),
                    **{"env": environ, "cwd": home, "umask": 0o077, "start_new_session": True},
                )
            except OSError as error:
                out.write(f"pbs_mom, exec of {program} failed: {error.strerror}\n".encode())
                self.leader = subprocess.Popen(["sh", "-c", "exit 254"], stdin=subprocess.PIPE)
        assert self.leader.stdin is not None
        with self.leader.stdin as stdin:  # where a login shell reads its command
            stdin.write(b"" if command else f"{PBS}/jobs/{name}/{name}.SC\n".encode())
        self.began, self.kill_at, self.why = time.time(), 0.0, ""

    @property
    def status(self) -> int | None:
        """The leader's exit status as PBS reports it, once the session is empty."""
        code = self.leader.poll()
        if code is None or any(session_of(self.leader.pid)):
            return None
        return code if code >= 0 else 256 - code

    def signal(self, signum: int, why: str) -> None:
        """Signal the session; if that is meant to end the job, SIGKILL follows."""
        send(self.leader.pid, signum)
        if why and not self.why:
            delay_s = read(PBS / "queue").get("kill_delay", KILL_DELAY_S)
            self.why, self.kill_at = why, time.time() + int(delay_s)


class Mom:
    """A node's mom: starts the jobs whose first chunk is here, and pbsdsh's tasks for this node."""

    def __init__(self) -> None:
        self.jobs: dict[str, Task] = {}
        self.tasks: dict[Path, Task] = {}  # keyed by the file in which pbsdsh finds the status

    def look(self) -> None:
        for folder in sorted((PBS / "jobs").iterdir()):
            with contextlib.suppress(FileNotFoundError):  # not there yet, or already in the history
                job = read(folder / "job")
                hosts = [one["host"] for one in job["own"]["chunks"]]
                for path in folder.glob("task.*"):
                    if hosts[number := int(path.name.split(".")[1])] == HOST:
                        command, end = read(path)
                        path.unlink()
                        self.tasks[Path(end)] = Task(folder.name, job, number, command)
                if hosts[0] == HOST:
                    self.tend(folder, job)
        for end, task in list(self.tasks.items()):
            if not end.parent.is_dir():  # the job has ended
                send(task.leader.pid, signal.SIGKILL)
                del self.tasks[end]
            elif (kill := end.with_name(end.name.replace("end", "kill", 1))).exists():
                send(task.leader.pid, read(kill))
                kill.unlink()
            elif (status := task.status) is not None:
                write(end, status % 256)
                del self.tasks[end]

    def tend(self, folder: Path, job: Job) -> None:
        name = folder.name
        if name not in self.jobs:
            task = self.jobs[name] = Task(name, job, 0, job["own"]["command"])
            job |= {"job_state": "R", "run_count": job["run_count"] + 1}
            write(folder / "job", {**job, "session_id": task.leader.pid})
        task = self.jobs[name]
        for path in sorted(folder.glob("request.*")):
            asked = read(path)
            path.unlink()
            if "signum" in asked:
                task.signal(asked["signum"], asked.get("end", ""))
            job |= asked.get("changes", {})
            write(folder / "job", job)
        parts = reversed(job.get("Resource_List.walltime", "0").split(":"))
        limit_s = sum(int(part) * 60**place for place, part in enumerate(parts))
        used_s = time.time() - task.began
        if 0 < limit_s < used_s and not task.why:
            with (PBS / "spool" / f"{name}.OU").open("a") as out:
                out.write(f"=>> PBS: job killed: walltime {used_s:.0f} exceeded limit {limit_s}\n")
            task.signal(signal.SIGTERM, "walltime")
        has_ended = task.leader.poll() is not None
        if time.time() > task.kill_at if task.kill_at else has_ended:
            send(task.leader.pid, signal.SIGKILL)
        if task.status is not None:
            self.finish(folder, job, self.jobs.pop(name))

    def finish(self, folder: Path, job: Job, task: Task) -> None:
        """Put a job back into the queue, or deliver its output and keep it as history."""
        if task.why == "qrerun":
            write(folder / "job", {**job, "job_state": "Q"})
            return
        status = -29 if task.why == "walltime" else task.status
        write(folder / "job", job | {"job_state": "F", "Exit_status": status})
        target, spooled = job["Output_Path"], PBS / "spool" / f"{folder.name}.OU"
        place = Path(target, spooled.name) if target.endswith("/") else Path(target)
        shutil.move(spooled, place if place.parent.is_dir() else PBS / "undelivered")
        folder.rename(PBS / "history" / folder.name)


def pbs_mom(_words: Sequence[str]) -> None:
    """Serve this node in the background, until the host goes down."""
    pid = PBS / "moms" / HOST
    pid.touch()
    Path.home().joinpath(".profile").write_text(f"PATH=$PATH:{BIN}\n")  # as /etc/profile.d/pbs.sh
    if os.fork():
        return
    os.setsid()
    pid.write_text(str(os.getpid()))
    os.closerange(0, 256)  # bats waits for every process that holds them
    for _ in range(3):
        os.open(PBS / f"mom-{HOST}.log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    mom = Mom()
    while True:
        mom.look()
        time.sleep(LOOK_S)
