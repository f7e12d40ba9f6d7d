"""The nodes that the user names, and the number of ranks on each. Node rank 0 comes first."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from distributed import hostlist
from launcher.plan.plan import NodePlan, World
from launcher.plan.settings import read_nproc
from launcher.plan.typed import Typed
from launcher.text import PlanError

LEAST_PORT = 1000  # nobody wants so many processes on a node
_IPV6 = re.compile(r"([^:]*@)?\[([^]]*:[^]]*)\](?::(.+))?")  # [fd00::1]:4
_MASTER = re.compile(r"(?:\[(.*)\]|([^:]*))(?::(\d+))?")
# Labels of 1 to 63 characters, or IPv6.
_ADDRESS = re.compile(r"(?:[^\s,;/:.\ud800-\udfff]{1,63}(?:\.|$))*|[^\s,;/]*:[^\s,;/]*:[^\s,;/]*")
# Open MPI's line, or one of $PE_HOSTFILE (SGE): host, slots, queue, processors.
_SLOTS = re.compile(
    r"(\S+) (?:(?:max[-_]slots=\d+ )?slots=(\d+)(?: max[-_]slots=\d+)?|(\d+) \S+ \S+)"
)
_NODES = re.compile(r"(?:--nodes=|-N ?|select=|nodes=)(\d+)")
_TASKS = re.compile(r"--ntasks-per-node=(\d+)")
_GPUS = re.compile(r"(?:--gpus-per-node=|--gres=gpu:|n?gpus=)(?:[a-z]\w*:)?(\d+)")


def read_nodes(words: Sequence[str], nproc: int | None) -> tuple[NodePlan, ...]:
    """Return the nodes named by words such as `node1`, `me@node2:4` and `gpu[01-08]`.

    Nodes without a number of their own have `nproc` ranks. Raises PlanError if a word names no
    node, or if two words name the same one.
    """
    nodes = tuple(node for word in words for node in _read_node(word, nproc))
    for name, times in Counter(node.name for node in nodes).items():
        if times > 1:
            raise PlanError(f"{name} is named twice; give {name}:NPROC for more processes on it")
    return nodes


def _read_node(word: str, nproc: int | None) -> Iterator[NodePlan]:
    """Return the nodes that one word names, with the word's number of ranks, otherwise `nproc`.

    Raises PlanError if the word cannot be read, or if its number is probably ssh's port.
    """
    name = word
    number = None
    if match := _IPV6.fullmatch(word):
        name = (match[1] or "") + match[2]
        number = match[3]
    elif word.count(":") == 1:  # more colons: an IPv6 address without a number
        name, number = word.split(":")

    if not re.fullmatch(r"[^-\s/][^/]*", name):  # ssh would read -x as an option
        raise PlanError(
            f"{word!r} is not a node; give NODE, NODE:NPROC or a list such as gpu[01-08]"
        )
    if number is not None:
        is_port = number.isdecimal() and (number == "22" or int(number) >= LEAST_PORT)
        if is_port:
            raise PlanError(
                f"{word!r} asks for {number} processes on {name}; if that is ssh's port, set it in "
                f"~/.ssh/config, or with SSH_OPTS='-p {number}'"
            )
        nproc = read_nproc(f"the number of processes for {word!r}", number)

    try:
        names = hostlist.expand(name) if re.search(r"[\[\],]", name) else [name]
    except hostlist.HostlistError as error:
        raise PlanError(f"{error}; correct it") from None
    return (NodePlan(name, nproc) for name in names)


def with_plain_master(typed: Typed) -> Typed:
    """Return what was typed, with only the address in a master like `n1:29500` or `tcp://n1`.

    The master is the argument or, without one, MASTER_ADDR. Its port becomes MASTER_PORT, unless
    that is set; a local launch without a node count drops it.
    """
    environ = {**typed.environ}
    given = typed.master or environ.get("MASTER_ADDR", "")
    address = re.sub(r"^\w+://|/$", "", given.strip())
    port = None
    if match := _MASTER.fullmatch(address):
        address = match[1] or match[2]
        port = match[3]

    needs_port = typed.nnodes or typed.fanout != "local"  # one node alone needs no master
    if port and needs_port:
        environ.setdefault("MASTER_PORT", port)
    if typed.master:
        typed = replace(typed, master=address)
    elif address:
        environ["MASTER_ADDR"] = address
    return replace(typed, environ=environ)


def check_master(world: World) -> World:
    """Return the world. Raises PlanError if its master cannot be an address or a name."""
    if world.num_nodes > 1 and not _ADDRESS.fullmatch(world.master_addr):
        raise PlanError(f"the master is {world.master_addr!r}; give one address or name")
    return world


def read_hostfile(file: Path) -> list[str]:
    """Return a host file's nodes as words for read_nodes(): NODE or NODE:NPROC.

    A line has one node, `node1 slots=4` (Open MPI) or SGE's four fields. If all lines are plain
    names and some repeat, a name's lines are its ranks. Raises PlanError if the file does not exist
    or lists no nodes, or if a line cannot be read.
    """
    if not file.is_file():
        raise PlanError(f"there is no host file {str(file)!r}; correct -f")

    words = []
    for number, line in enumerate(file.read_text("utf-8-sig", "surrogateescape").splitlines(), 1):
        fields = line.partition("#")[0].split()
        if len(fields) < 2:
            words += fields
        elif match := _SLOTS.fullmatch(" ".join(fields)):
            # An IPv6 address needs brackets before its number.
            node = f"{match[1]}:{match[2] or match[3]}"
            words.append(re.sub(r"^([^[]*:.*):", r"[\1]:", node))
        else:
            raise PlanError(
                f"line {number} of {str(file)!r} is {line!r}; "
                "give NODE, NODE:NPROC or NODE slots=NPROC, one per line"
            )

    if not words:
        raise PlanError(f"{str(file)!r} lists no nodes; add one per line")
    times = Counter(words)
    has_only_names = not any(re.search(r"[][:,]", word) for word in times)
    has_repeats = len(times) < len(words)
    if has_only_names and has_repeats:  # LSF and OAR write one line for each processor
        return [f"{word}:{number}" for word, number in times.items()]
    return words


def read_batch_script(file: Path, nproc: int | None) -> World:
    """Return the nodes and ranks that the #SBATCH or #PBS lines of a batch script ask for.

    The ranks per node are the first of these: the script's tasks, if there are several; `nproc`,
    which the user asked for; the script's GPUs. They remain unknown if the script does not ask for
    nodes: sbatch or qsub is then given the size.
    """
    lines = re.findall(r"(?m)^#(?:SBATCH|PBS) (.*?)(?: #.*)?$", file.read_text(errors="replace"))
    nodes, tasks, gpus = (_last_number(pattern, lines) for pattern in (_NODES, _TASKS, _GPUS))
    ranks = tasks if tasks > 1 else nproc or gpus or None
    hosts = "chosen by the scheduler when the job starts"
    return World(nodes or 1, master_addr="", nproc=ranks if nodes else None, hosts=hosts)


def _last_number(pattern: re.Pattern[str], lines: Sequence[str]) -> int:
    """Return the number of the last line that matches; 0 if none does."""
    numbers = [int(match[1]) for line in lines if (match := pattern.search(line))]
    return numbers[-1] if numbers else 0
