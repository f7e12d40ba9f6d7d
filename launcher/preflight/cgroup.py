"""What a container, a scheduler or a service manager allows here: CPUs, processes, memory."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from launcher.text import count, read_text
from launcher.wire.messages import Fault, Faults

CGROUPS = Path("/sys/fs/cgroup")
MINE = Path("/proc/self/cgroup")
OF_A_RANK = 24  # processes and threads of a rank, with its share of the agent's
FEW_PROCESSES = 4096  # with a higher limit for each user, nobody's processes are counted


def count_cpus() -> int:
    """Return the number of CPUs that this process may use, by its affinity and quotas; at least 1.

    A quota is rounded down.
    """
    # The files of cgroups v2, then of v1: both have the CPU time that each period allows.
    pairs = [*_limits("cpu.max"), *_limits("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    quotas = [quota // period for quota, period in pairs]
    cpus = os.cpu_count() or 1
    with contextlib.suppress(OSError):  # a sandbox refuses it
        cpus = len(os.sched_getaffinity(0))
    return max(1, min([cpus, *quotas]))


def count_memory_kills() -> int:
    """Return the number of out-of-memory kills in this process's cgroup; 0 if it is unknown.

    If the cgroup has no such number, it is that of the nearest parent that has one.
    """
    with contextlib.suppress(OSError):
        for group in _groups():
            words = _read(group / "memory.events") or _read(group / "memory.oom_control")
            if "oom_kill" in words:
                return int(words[words.index("oom_kill") + 1])
    return 0


def check_processes(nproc: int, num_workers: int) -> Faults:
    """Enough processes and threads can start here for all ranks and their data workers."""
    left = count_processes_left()
    wanted = nproc * (OF_A_RANK + 2 * num_workers)
    if left is not None and left < wanted:
        cause = f"only {left} more processes and threads can start here, for {count(nproc, 'rank')}"
        cure = f"raise the limit by {wanted - left} (ulimit -u; pids.max of the container or job)"
        yield Fault("low-nproc", cause, cure, warns=True)


def count_processes_left() -> int | None:
    """Return how many more processes and threads can start here; None if there is no limit."""
    rooms = [most - now for most, now in _limits("pids.max", "pids.current")]
    users_most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= users_most < FEW_PROCESSES and os.geteuid() != 0:  # root has no limit
        rooms.append(users_most - _count_own_threads())
    return max(0, min(rooms)) if rooms else None


def _count_own_threads() -> int:
    """Return the number of this user's threads on the machine, which RLIMIT_NPROC limits."""
    number = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if process.stat().st_uid == os.getuid():
                number += len(os.listdir(process / "task"))
    return number


def _limits(*names: str) -> Iterator[tuple[int, int]]:
    """Yield the two numbers in each cgroup's files of these names, if the first is a limit.

    It is not one if it is "max" or -1.
    """
    for group in _groups():
        words = [word for name in names for word in _read(group / name)]
        if len(words) == 2 and words[0].isdecimal():
            yield int(words[0]), int(words[1])


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's cgroups, each followed by those of its parents."""
    for line in read_text(MINE).splitlines():
        _, controllers, name = line.split(":", 2)
        top = CGROUPS / controllers  # cgroups v1 have a tree for each controller
        group = top / name.lstrip("/")
        yield from (one for one in (group, *group.parents) if one.is_relative_to(top))


def _read(file: Path) -> list[str]:
    """Return the words in a file; none if it cannot be read."""
    return read_text(file).split()
