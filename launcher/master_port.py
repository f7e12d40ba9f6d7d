"""The master's port, at which the nodes of a run meet: which it is, and who listens there.

It is MASTER_PORT or --master-port, else one that follows from the run id.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from distributed.environment import port_from_id
from launcher import processes
from launcher.wire.messages import Request


def open_master_port(request: Request) -> tuple[int, socket.socket | None, int]:
    """Return the master's port, and on node rank 0 its listener, or the errno of why there is none.

    It is opened once: a node that connected to one that only tries the port would be cut off. One
    node alone that was given no port takes the next free one after that of the run id.
    """
    port = request.port or port_from_id(request.run_id)
    while request.node_rank == 0:
        try:
            return port, open_port(port, request.master_addr), 0
        except OSError as error:
            if request.port or request.num_nodes > 1 or error.errno != errno.EADDRINUSE:
                return port, None, error.errno or errno.EINVAL
        port += 1
    return port, None, 0


def open_port(port: int, address: str = "") -> socket.socket:
    """Listen on the port (0: any free one) of this machine's address.

    Where that is not the only one that the name stands for, or is translated on the way here, or
    is loopback for this machine alone, listen at all of them. Raises OSError if that fails.
    """
    addresses = set()
    with contextlib.suppress(OSError):
        for family, *_, where in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            addresses.add((family, str(where[0])))
    if len(addresses) == 1:
        ((family, only),) = addresses
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
    return address.startswith("127.") or address == "::1"


def is_here(address: str, port: int = 0) -> bool:
    """Whether it is an address of this machine, where something could listen."""
    with contextlib.suppress(OSError):
        family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(where, family=family).close()
        return True
    return False


def is_first(address: str, port: int) -> bool:
    """Whether this can be node rank 0 there. Of several processes on this machine, only one can.

    It holds a name of the machine's network until it ends, and so does what it becomes.
    """
    return is_here(address, port) and processes.claim(str(port), is_inherited=True)
