#!/usr/bin/env python3
"""A small stand-in for OpenPBS on the cluster in a box: jobs and their ends look as they do there.

    tests/cluster/pbs.py FOLDER     make FOLDER/bin with PBS's commands, and pbs_mom for each node

All hosts see FOLDER. Commands leave requests in a job's folder; the mom of the job's first node
acts on them. It does what OpenPBS 23.06 was seen to do; tests/README.md lists what it leaves out.
"""

from __future__ import annotations

import contextlib
import fcntl
import getopt
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

NAME, BIN = Path(sys.argv[0]).name, Path(sys.argv[0]).absolute().parent  # the link's
HOST = os.uname().nodename
PBS = BIN.parent
QUEUE = "workq"
KILL_DELAY_S = 10  # where the queue says nothing else
LOOK_S = 0.1  # a real mom looks every 7 to 11 s
LETTERS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:v:VW:Xz"
USAGE = "usage: qsub [-l resource_list] [-o path] [-v variable_list] ... [script | -- command]"
Job = dict[str, Any]  # attributes as qstat shows them, and "own": what it does not show


def fail(code: int, text: str) -> NoReturn:
    print(f"{NAME}: {text}", file=sys.stderr)
    sys.exit(code)


def write(path: Path, value: Any) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(value))
    new.replace(path)  # whole, or not at all


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def find(name: str, *, history: bool = False) -> Path:
    """Return the folder of a job."""
    job, old = (PBS / one / name for one in ("jobs", "history"))
    if not job.is_dir() and old.is_dir() and not history:
        fail(35, f"{name} Job has finished, use -x or -H to obtain historical job information")
    return job if job.is_dir() else old if old.is_dir() else fail(153, f"Unknown Job Id {name}")


# --- qsub ---------------------------------------------------------------------------------------


def read_options(words: Sequence[str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return qsub's options by letter, its resources, and the rest."""
    try:
        pairs, rest = getopt.getopt(words, LETTERS)
    except getopt.GetoptError as error:
        fail(2, f"invalid option -- '{error.opt}'\n{USAGE}")
    given = [part for name, value in pairs if name == "-l" for part in value.split(",")]
    return dict(pairs), dict(part.split("=", 1) for part in given), rest


def qsub(words: Sequence[str]) -> None:
    options, resources, rest = read_options(words)
    is_command = words[-len(rest) - 1 : len(words) - len(rest)] == ["--"]
    if not rest or (len(rest) > 1 and not is_command):
        fail(2, USAGE)
    if not is_command:  # the script's own lines; the command line wins
        lines = re.findall(r"^#PBS (.*)", Path(rest[0]).read_text(), re.MULTILINE)
        own = read_options([word for line in lines for word in line.split()])
        options, resources = {**own[0], **options}, {**own[1], **resources}
    chunks = place(resources.setdefault("select", "1:ncpus=1"))
    title = options.get("-N") or ("STDIN" if is_command else Path(rest[0]).name[:15])
    number, here = next_number(), os.getcwd()
    name = f"{number}.head"
    output = options.get("-o", f"{title}.o{number}")
    job = {
        "Job_Name": title,
        "job_state": "Q",
        "queue": QUEUE,
        "ctime": time.ctime(),
        "exec_host": "+".join(f"{one['host']}/0*{one['ncpus']}" for one in chunks),
        "Join_Path": options.get("-j", "n"),
        "Output_Path": str(Path(here, output)) + "/" * output.endswith("/"),
        **{f"Resource_List.{key}": value for key, value in sorted(resources.items())},
        "run_count": 0,
        "Submit_arguments": shlex.join(words),
        "own": {
            **{"command": rest if is_command else [], "chunks": chunks},
            "variables": forwarded(options, here),
        },
    }
    folder = PBS / "jobs" / name
    folder.mkdir()
    if not is_command:
        shutil.copy(rest[0], folder / f"{name}.SC")
        (folder / f"{name}.SC").chmod(0o700)
    write(folder / "job", job)
    print(name)


def next_number() -> int:
    """Take the next job number, also where others submit at the same time."""
    with (PBS / "numbers").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("\n")
        return file.tell() - 1


def forwarded(options: dict[str, str], here: str) -> dict[str, str]:
    """Return the variables of a job that come from its submission."""
    names = [one.partition("=") for one in options.get("-v", "").split(",") if one]
    return {
        **(os.environ if "-V" in options else {}),
        **{name: value if is_set else os.environ.get(name, "") for name, is_set, value in names},
        **{f"PBS_O_{name}": os.environ.get(name, "") for name in ("HOME", "LOGNAME", "PATH")},
        **{"PBS_O_WORKDIR": here, "PBS_O_QUEUE": QUEUE, "PBS_O_HOST": HOST},
    }


def place(select: str) -> list[dict[str, str]]:
    """Return the host and the resources of each chunk: the nodes in turn."""
    hosts, chunks = itertools.cycle(sorted(os.listdir(PBS / "moms"))), []
    for group in select.split("+"):
        number, *parts = group.split(":")
        for _ in range(int(number)):
            chunks.append(
                {"host": next(hosts), "ncpus": "1", **dict(one.split("=") for one in parts)}
            )
    return chunks


def request(words: Sequence[str]) -> None:
    """Be qdel, qrerun, qsig or qalter: ask the mom of a job."""
    pairs, jobs = getopt.getopt(words, "W:s:l:")
    options, asked = dict(pairs), dict[str, Any]()
    if NAME == "qalter":
        asked["changes"] = dict([f"Resource_List.{options['-l']}".split("=")])
    elif NAME == "qsig":
        asked["signum"] = signal.Signals[f"SIG{options['-s'].removeprefix('SIG')}"]
    else:
        asked |= {"end": NAME, "signum": 9 if options.get("-W") == "force" else 15}
    for name in jobs:
        write(find(name) / f"request.{time.time_ns()}", asked)


def qstat(words: Sequence[str]) -> None:
    pairs, names = getopt.getopt(words, "fxQ")
    options = {letter for letter, _ in pairs}
    if "-Q" in options:
        show(f"Queue: {QUEUE}", {"queue_type": "Execution", **read(PBS / "queue"), "started": True})
        return
    for name in names or sorted(os.listdir(PBS / "jobs")):
        job = read(find(name, history="-x" in options) / "job")
        own = job.pop("own")
        job["Variable_List"] = ",".join(f"{key}={one}" for key, one in own["variables"].items())
        show(f"Job Id: {name}", job if "-f" in options else {"job_state": job["job_state"]})


def show(head: str, attributes: dict[str, Any]) -> None:
    """Print attributes as qstat -f does, which folds long lines."""
    print(head)
    for key, value in attributes.items():
        line = f"    {key} = {value}"
        print("\n\t".join([line[:79], *(line[at : at + 78] for at in range(79, len(line), 78))]))
    print()


def pbsdsh(words: Sequence[str]) -> None:
    """Run a command on each chunk of this job; the output goes to the job's."""
    _, command = getopt.getopt(words, "v")
    folder = find(os.environ["PBS_JOBID"])
    number = len(read(folder / "job")["own"]["chunks"])
    ends = [folder / f"end.{os.getpid()}.{chunk}" for chunk in range(number)]
    for chunk, end in enumerate(ends):
        write(folder / f"task.{chunk}.{os.getpid()}", [command, str(end)])
    while not all(end.exists() for end in ends):
        time.sleep(LOOK_S)
    raise SystemExit(max(read(end) for end in ends))


# --- the mom ------------------------------------------------------------------------------------


def session_of(leader: int) -> Iterator[int]:
    """Yield the living processes of a session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                yield int(path.parent.name)


def send(leader: int, signum: int) -> None:
    """Signal every process of a session, all at once."""
    for pid in list(session_of(leader)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


class Task:
    """The leader of a session that a mom has started: a job's first, or pbsdsh's on a node."""

    def __init__(self, name: str, job: Job, number: int, command: Sequence[str]) -> None:
        chunks, own = job["own"]["chunks"], job["own"]["chunks"][number]
        hosts = [one["host"] for one in chunks for _ in range(int(one.get("mpiprocs", 1)))]
        aux, folder, home = PBS / "aux" / name, PBS / "tmp" / f"pbs.{name}", os.environ["HOME"]
        aux.write_text("".join(f"{host}\n" for host in hosts))
        folder.mkdir(exist_ok=True)
        gpus = [f"GPU-of-{own['host']}-{gpu}" for gpu in range(int(own.get("ngpus", 0)))]
        environ = {
            **{"HOME": home, "LOGNAME": "root", "USER": "root", "SHELL": "/bin/bash"},
            **{"PATH": f"/usr/local/bin:/usr/bin:/bin:{BIN}", **job["own"]["variables"]},
            **{"NCPUS": own["ncpus"], "OMP_NUM_THREADS": own.get("ompthreads", own["ncpus"])},
            **{"ENVIRONMENT": "BATCH", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_QUEUE": QUEUE},
            **{"PBS_JOBID": name, "PBS_JOBNAME": job["Job_Name"], "PBS_NODEFILE": str(aux)},
            **{"PBS_JOBDIR": home, "PBS_NODENUM": str(number), "TMPDIR": str(folder)},
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),  # as the cgroups hook
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
        with self.leader.stdin as stdin:  # where a login shell reads what its child is to be
            stdin.write(b"" if command else f"{PBS}/jobs/{name}/{name}.SC\n".encode())
        self.began, self.kill_at, self.why = time.time(), 0.0, ""

    @property
    def status(self) -> int | None:
        """The leader's end as PBS tells it, once the session is empty."""
        code = self.leader.poll()
        if code is None or any(session_of(self.leader.pid)):
            return None
        return code if code >= 0 else 256 - code

    def signal(self, signum: int, why: str) -> None:
        """Signal the session; where that is to end the job, SIGKILL follows."""
        send(self.leader.pid, signum)
        if why and not self.why:
            delay_s = read(PBS / "queue").get("kill_delay", KILL_DELAY_S)
            self.why, self.kill_at = why, time.time() + int(delay_s)


class Mom:
    """A node's: it starts the jobs whose first chunk is here, and pbsdsh's tasks for this node."""

    def __init__(self) -> None:
        self.jobs: dict[str, Task] = {}
        self.tasks: dict[Path, Task] = {}  # by the file that tells pbsdsh of the end

    def look(self) -> None:
        for folder in sorted((PBS / "jobs").iterdir()):
            with contextlib.suppress(FileNotFoundError):  # not there yet, or history by now
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
    (PBS / "moms" / HOST).touch()
    Path.home().joinpath(".profile").write_text(f"PATH=$PATH:{BIN}\n")  # as /etc/profile.d/pbs.sh
    if os.fork():
        return
    os.setsid()
    os.closerange(0, 256)  # bats waits for whoever holds them
    for _ in range(3):
        os.open(PBS / f"mom-{HOST}.log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    mom = Mom()
    while True:
        mom.look()
        time.sleep(LOOK_S)


def make(words: Sequence[str]) -> None:
    folder = Path(words[0])
    for name in ("bin", "jobs", "history", "spool", "aux", "moms", "tmp", "undelivered"):
        (folder / name).mkdir(parents=True)
    for name in COMMANDS:
        (folder / "bin" / name).symlink_to(Path(__file__).resolve())
    write(folder / "queue", {})


COMMANDS = {one.__name__: one for one in (qsub, qstat, pbsdsh, pbs_mom)}
COMMANDS |= dict.fromkeys(("qdel", "qrerun", "qsig", "qalter"), request)
if __name__ == "__main__":
    COMMANDS.get(NAME, make)(sys.argv[1:])
