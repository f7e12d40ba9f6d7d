"""The network settings of gloo and NCCL (no torch). On a single machine, both use loopback.

The interface that leads to the master is right more often than gloo's choice (the address of the
host's own name, on many machines 127.0.1.1) or NCCL's (by name). Variables that the user has set
are never overridden.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

PROFILES = {  # of NCCL_PROFILE; docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    "": {},
    "infiniband": {"NCCL_NET": "IB"},  # fails without InfiniBand, rather than using TCP
    "ethernet": {"NCCL_IB_DISABLE": "1"},  # NCCL would try InfiniBand first
    "none": {},
}
_SIOCGIFADDR = 0x8915  # netdevice(7)


def choose_variables(
    master_addr: str, num_nodes: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to add to the ranks' environment; none with NCCL_PROFILE=none.

    Variables that `environ` has are not returned. On one node, both libraries use loopback, and the
    other profiles have no effect. May wait for the name server. Raises ValueError for an unknown
    NCCL_PROFILE.
    """
    profile = environ.get("NCCL_PROFILE", "")
    if profile not in PROFILES:
        raise ValueError(f"NCCL_PROFILE is {profile!r}; use {', '.join(filter(None, PROFILES))}")

    is_alone = num_nodes == 1
    chosen = {} if is_alone else dict(PROFILES[profile])
    name = None if profile == "none" else interface_to("127.0.0.1" if is_alone else master_addr)
    if name and (is_alone or name != "lo"):  # loopback does not lead to other nodes
        # To NCCL, a name without "=" is the beginning of names.
        chosen |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {variable: value for variable, value in chosen.items() if variable not in environ}


def interface_to(address: str) -> str | None:
    """Return the name of the interface that leads to a host; None if it has no address or route."""
    with contextlib.suppress(OSError):
        # Any port will do.
        family, *_, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing; it selects the route
            return _interface_of(probe.getsockname()[0])
    return None


def _interface_of(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 or IPv6 address, or None."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return next((line.split()[-1] for line in lines if line.startswith(packed)), None)
    with socket.socket(type=socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:  # ifr_addr.sin_addr of struct ifreq
                    return name
    return None
