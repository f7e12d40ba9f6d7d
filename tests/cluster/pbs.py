#!/usr/bin/env python3
"""A small stand-in for OpenPBS on the cluster in a box: jobs look the same, and end the same way.

    tests/cluster/pbs.py FOLDER     create FOLDER/bin: PBS's commands, and pbs_mom for each node

All hosts see FOLDER. Commands leave requests in a job's folder; the mom of the job's first node
acts on them. Both do what OpenPBS 23.06 was observed to do; tests/README.md lists what they omit.
"""

from __future__ import annotations

import fcntl
import getopt
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pbs_mom import HOST, LOOK_S, PBS, QUEUE, lines_of, pbs_mom, read, write

NAME = Path(sys.argv[0]).name  # the name of the link
LETTERS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:v:VW:Xz"
USAGE = "usage: qsub [-l resource_list] [-o path] [-v variable_list] ... [script | -- command]"


def fail(code: int, text: str) -> NoReturn:
    print(f"{NAME}: {text}", file=sys.stderr)
    sys.exit(code)


def find(name: str, *, history: bool = False) -> Path:
    """Return the folder of a job."""
    job, old = (PBS / one / name for one in ("jobs", "history"))
    if not job.is_dir() and old.is_dir() and not history:
        fail(35, f"{name} Job has finished, use -x or -H to obtain historical job information")
    return job if job.is_dir() else old if old.is_dir() else fail(153, f"Unknown Job Id {name}")


# --- qsub ---------------------------------------------------------------------------------------


def read_options(words: Sequence[str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return qsub's options by letter, its resources, and the remaining words."""
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
    if not is_command:  # the script's own options; the command line takes precedence
        lines = re.findall(r"^#PBS (.*)", Path(rest[0]).read_text(), re.MULTILINE)
        own = read_options([word for line in lines for word in line.split()])
        options, resources = {**own[0], **options}, {**own[1], **resources}
    chunks = place(resources.setdefault("select", "1:ncpus=1"))
    title = options.get("-N") or ("STDIN" if is_command else Path(rest[0]).name[:15])
    number, here = next_number(), os.getcwd()
    output = options.get("-o", f"{title}.o{number}")
    job: dict[str, Any] = {
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
    for task, more in tasks_of(number, options.get("-J", "")):
        folder = PBS / "jobs" / task
        folder.mkdir()
        if not is_command:
            shutil.copy(rest[0], folder / f"{task}.SC")
            (folder / f"{task}.SC").chmod(0o700)
        own = job["own"] | {"variables": job["own"]["variables"] | more}
        write(folder / "job", job | {"own": own})
    print(f"{number}[].head" if "-J" in options else f"{number}.head")


def tasks_of(number: int, span: str) -> list[tuple[str, dict[str, str]]]:
    """Return the name of a job, or of each task of an array, and the variables that a task gets."""
    if not span:
        return [(f"{number}.head", {})]
    first, last = map(int, span.split("-"))
    return [
        (
            f"{number}[{task}].head",
            {"PBS_ARRAY_INDEX": f"{task}", "PBS_ARRAY_ID": f"{number}[].head"},
        )
        for task in range(first, last + 1)
    ]


def next_number() -> int:
    """Take the next job number, which is unique even if others submit at the same time."""
    with (PBS / "numbers").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("\n")
        return file.tell() - 1


def forwarded(options: dict[str, str], here: str) -> dict[str, str]:
    """Return the variables of a job that come from its submission."""
    names = [one.partition("=") for one in options.get("-v", "").split(",") if one]
    told = ("HOME", "LANG", "LOGNAME", "MAIL", "PATH", "SHELL")
    return {
        **(os.environ if "-V" in options else {}),
        **{name: value if is_set else os.environ.get(name, "") for name, is_set, value in names},
        **{f"PBS_O_{name}": os.environ[name] for name in told if name in os.environ},
        **{"PBS_O_INTERACTIVE_AUTH_METHOD": "resvport", "PBS_O_INTERACTIVE_ENCRYPT_METHOD": ""},
        **{"PBS_O_WORKDIR": here, "PBS_O_QUEUE": QUEUE, "PBS_O_HOST": HOST},
        "PBS_O_SYSTEM": "Linux",
    }


def place(select: str) -> list[dict[str, str]]:
    """Return the host and the resources of each chunk; chunks go to the nodes in turn."""
    hosts, chunks = itertools.cycle(sorted(os.listdir(PBS / "moms"))), []
    for group in select.split("+"):
        number, *parts = group.split(":")
        for _ in range(int(number)):
            chunks.append(
                {"host": next(hosts), "ncpus": "1", **dict(one.split("=") for one in parts)}
            )
    return chunks


def request(words: Sequence[str]) -> None:
    """Act as qdel, qrerun, qsig or qalter: send a request to a job's mom."""
    pairs, jobs = getopt.getopt(words, "W:s:l:")
    options, asked = dict(pairs), dict[str, Any]()
    if NAME == "qalter":
        asked["changes"] = dict([f"Resource_List.{options['-l']}".split("=")])
    elif NAME == "qsig":
        name = {"suspend": "STOP", "resume": "CONT"}.get(options["-s"], options["-s"])
        asked["signum"] = signal.Signals[f"SIG{name.removeprefix('SIG')}"]
    else:
        asked |= {"end": NAME, "signum": 9 if options.get("-W") == "force" else 15}
    for name in jobs:
        write(find(name) / f"request.{time.time_ns()}", asked)


def lose_node(words: Sequence[str]) -> None:
    """Start a job again on its nodes in reverse order, as the server does if the first is lost.

    The mom of the first node must be dead: it would end what it has started.
    """
    path = find(words[0]) / "job"
    job = read(path)
    job["own"]["chunks"].reverse()
    write(path, {**job, "job_state": "Q"})


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
    """Print attributes as qstat -f does, which folds long lines, even within a character."""
    print(head)
    for key, value in attributes.items():
        line = os.fsencode(f"    {key} = {value}")
        folds = [line[:79], *(line[at : at + 78] for at in range(79, len(line), 78))]
        print(os.fsdecode(b"\n\t".join(folds)))
    print()


def pbsdsh(words: Sequence[str]) -> None:
    """Run a command for each line of the node file; the output goes to the job's output.

    As in pbsdsh(1B) and OpenPBS's pbsdsh.c, it prints the tasks' exit codes, but exits with 0. On a
    signal, it forwards the signal to the tasks, and exits with 1.
    """
    _, command = getopt.getopt(words, "v")
    folder = find(os.environ["PBS_JOBID"])
    lines = lines_of(read(folder / "job"))
    tasks = [folder / f"task.{chunk}.{os.getpid()}.{task}" for task, chunk in enumerate(lines)]
    ends = [folder / f"end.{path.name}" for path in tasks]

    def bail_out(signum: int, _frame: object) -> NoReturn:
        for task, path in enumerate(tasks):
            print(f"pbsdsh: killing task 0x{task + 2:08X} signal {signum}", flush=True)
            write(folder / f"kill.{path.name}", signum)
        sys.exit(1)

    for one in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(one, bail_out)
    for path, end in zip(tasks, ends, strict=True):
        write(path, [command, str(end)])
    while not all(end.exists() for end in ends):
        time.sleep(LOOK_S)
    for task, end in enumerate(ends):
        if code := read(end):
            print(f"pbsdsh: task 0x{task:08X} exit status {code}")


def make(words: Sequence[str]) -> None:
    folder = Path(words[0])
    for name in ("bin", "jobs", "history", "spool", "aux", "moms", "tmp", "undelivered"):
        (folder / name).mkdir(parents=True)
    for name in COMMANDS:
        (folder / "bin" / name).symlink_to(Path(__file__).resolve())
    write(folder / "queue", {})
    (folder / "pbs.conf").write_text(f"PBS_SERVER={HOST}\nPBS_EXEC={folder}\nPBS_HOME={folder}\n")


COMMANDS = {one.__name__: one for one in (qsub, qstat, pbsdsh, pbs_mom, lose_node)}
COMMANDS |= dict.fromkeys(("qdel", "qrerun", "qsig", "qalter"), request)
if __name__ == "__main__":
    sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    COMMANDS.get(NAME, make)(sys.argv[1:])
