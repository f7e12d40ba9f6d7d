"""The master's port, where the nodes of a run meet: its number, and its listener.

It is MASTER_PORT or --master-port if given, otherwise one derived from the run id and the
folder of the launch: runs in different folders may have the same id.
"""

import contextlib
import errno
import os
import socket
from pathlib import Path

from distributed.environment import port_from_id
from launcher import processes
from launcher.wire.messages import Request


def open_master_port(request: Request) -> tuple[int, socket.socket | None, int]:
    """Return the master's port, its listener on node rank 0, and the errno if listening fails.

    The listener is None on other nodes and after a failure; the errno is 0 if nothing has failed.
    The port is opened only once: a node that connected to a trial listener would be cut off. If
    no port is given, a single node uses the first free one from the derived one upwards.
    """
    # On several nodes, a live run with another LOG_DIR is found at the port.
    folder = request.directory / (request.log_dir if request.num_nodes == 1 else "")
    port = request.port or port_from_id(str(folder / request.run_id))
    if request.node_rank != 0:
        return port, None, 0

    while True:
        try:
            return port, open_port(port, request.master_addr), 0
        except OSError as error:
            if request.port or request.num_nodes > 1 or error.errno != errno.EADDRINUSE:
                return port, None, error.errno or errno.EINVAL
        port += 1


def open_port(port: int, address: str) -> socket.socket:
    """Listen on a port (0: any free one) at this machine's address or name, `address`.

    Listen at all addresses if the name has several, if its address is translated on the way here,
    or if only this machine resolves the name to loopback. Raises OSError if listening fails.
    """
    addresses = set()
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        addresses = {(family, str(where[0])) for family, *_, where in found}

    if len(addresses) == 1:
        family, only = addresses.pop()
        try:
            if address in ("localhost", only) or not is_loopback(only):
                return socket.create_server((only, port), family=family, backlog=4096)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise

    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=4096)


def is_loopback(address: str) -> bool:
    """Return whether an address, or the name localhost, leads only to the same machine."""
    return address in ("localhost", "::1") or address.startswith("127.")


def hosts_line(name: str) -> int | None:
    """Return the number of the line in /etc/hosts that makes the name a loopback address."""
    for number, line in enumerate(Path("/etc/hosts").read_text(errors="replace").splitlines(), 1):
        address, *names = line.partition("#")[0].split() or [""]
        if name in names and is_loopback(address):
            return number
    return None


def is_here(address: str, port: int = 0) -> bool:
    """Return whether an address or name belongs to this machine.

    To find out, listens there for a moment; with `port` 0, at any free port. False if the port is
    taken.
    """
    with contextlib.suppress(OSError):
        family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(where, family=family).close()
        return True
    return False


def claim_node_rank_0(address: str, port: int) -> bool:
    """Claim node rank 0 for this process. Returns False if it is on another machine, or claimed.

    The claim is an abstract socket name for the port, held until this process, or a program that it
    executes, ends.
    """
    return is_here(address, port) and processes.claim(str(port), is_inherited=True)


def find_holder(port: int) -> str:
    """Return " by pid 123 (command line)" for the process that listens on a port.

    Returns "" if /proc does not show it, as for another user's process.
    """
    listeners = set()
    for table in Path("/proc/net").glob("tcp*"):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()  # the local address, the state and the inode are used
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # TCP_LISTEN
                listeners.add(f"socket:[{fields[9]}]")

    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process is gone, or not ours to inspect
            if os.readlink(file) in listeners:
                process = file.parents[1]
                command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
                return f" by pid {process.name} ({' '.join(command.split())})"
    return ""


def is_loopback_up() -> bool:
    """Whether this machine has loopback. It asks no interface, because sandboxes refuse that."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(("127.0.0.1", 9)) == 0  # sends nothing; it needs a route
