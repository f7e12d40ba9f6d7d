"""The nodes meet at the master's port while they are checked: can each reach it, do clocks agree?

Node rank 0 listens there until all the others have come, and tells each what to compare with. Every
node has a port of its own open, its door. When all are there, each passes something to the doors of
all others. Agents of nodes that were started by hand do so when they check in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from launcher.handshake import Access, Entrance, NoEntrance, WrongSecret, connect, open_port
from launcher.preflight.checks import Fault, existing
from launcher.text import short_host_name
from launcher.typed_json import encode, parse
from launcher.wire import limits

MOST_BYTES = 10_000  # of a greeting
MOST_DOORS = 1 << 20  # bytes of the list of doors
AT_ONCE = 128  # doors that are tried
PASSED = 1 << 16  # bytes through a door: packets as large as any interface allows
SHOWN = 3  # nodes named in one line
CURES = {
    "port-blocked": "open all ports between the nodes, for gloo and NCCL",
    "mtu-too-large": "lower the MTU of their interfaces, or let ICMP pass between them",
}


@dataclass(frozen=True)
class Greeting:
    """What node rank 0 tells each other node to compare with."""

    port: int  # another one, on which it listens too
    file: str  # on a file system that all should share; empty: none
    time: float  # seconds since the epoch


@dataclass(frozen=True)
class Door:
    """A port of a node that any other should reach."""

    node_rank: int
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        where = f"{self.address}:{self.port}"
        return f"{self.host} ({where})" if self.host else where


@dataclass(frozen=True)
class Doors:
    """Those of other nodes, once all have come."""

    doors: Sequence[Door]


@dataclass(frozen=True)
class Tried:
    """What a node found at the doors."""

    faults: Sequence[Fault]


def open_door(address: str) -> socket.socket:
    """Listen where other nodes can pass something: the kernel takes it in, and nobody reads it."""
    door = open_port(0, address)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PASSED)
    return door


def receive_others(
    listener: socket.socket,
    address: str,
    access: Access,
    number: int,
    folder: Path | None,
    deadline: float,
) -> list[Fault]:
    """On node rank 0: wait at the port for so many nodes, and tell each what to compare with.

    Returns which of them it cannot reach; closes the listener.
    """
    with listener, contextlib.ExitStack() as stack:
        other = stack.enter_context(open_door(address))
        entrance = Entrance(listener, access, say=lambda stranger: None)  # the check-in tells
        stack.enter_context(contextlib.closing(entrance))
        file = ""
        if folder is not None:
            with contextlib.suppress(OSError):  # which check_folders tells
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=existing(folder), prefix=".shared-")
                ).name
        visitors: list[socket.socket] = []
        doors: list[Door] = []
        faults: list[Fault] = []
        while len(visitors) < number and (left_s := deadline - time.monotonic()) > 0:
            for visitor, said in entrance.wait(left_s):
                with contextlib.suppress(ValueError):
                    doors.append(parse(Door, said.decode()))
                visitors.append(stack.enter_context(visitor))
                greeting = Greeting(other.getsockname()[1], file, time.time())
                with contextlib.suppress(OSError):
                    visitor.sendall(f"{encode(greeting)}\n".encode())
        if len(doors) == number:
            line = f"{encode(Doors(doors))}\n".encode()
            for visitor in visitors:
                visitor.settimeout(limits.GREETING_S)
                with contextlib.suppress(OSError):
                    visitor.sendall(line)
            faults += try_doors(doors, 0, deadline)
        for visitor in visitors:
            visitor.settimeout(max(limits.POLL_S, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                visitor.recv(1)  # that node has tried the port and the doors, and seen the file
    return faults


def visit_master(
    address: str, port: int, secret: bytes, deadline: float, node_rank: int, done: list[str]
) -> Iterator[Fault]:
    """On any other node: reach node rank 0, and compare this node's clock and folder with its.

    `done` gets the names of the checks that were made.
    """
    try:
        with contextlib.ExitStack() as stack:
            master = stack.enter_context(_reach(address, port, secret, deadline))
            here = master.getsockname()[0]
            door = stack.enter_context(open_door(here))
            mine = Door(node_rank, short_host_name(), here, door.getsockname()[1])
            master.sendall(f"{encode(mine)}\n".encode())
            lines = master.makefile()
            greeting = parse(Greeting, lines.readline(MOST_BYTES))
            done += ["port", "clock"]
            skew = time.time() - greeting.time
            if abs(skew) > limits.SKEW_S:
                cause = f"the clock is {skew:+.0f} s from node rank 0's"
                yield Fault("clock-skew", cause, "have both synchronised", warns=True)
            done += ["folder"] if greeting.file else []
            if greeting.file and not os.path.exists(greeting.file):
                cause = f"{os.path.dirname(greeting.file)!r} is another folder on node rank 0"
                advice = "choose a checkpoint.dir that all nodes share: the job may move"
                yield Fault("dir-not-shared", cause, advice)
            done.append("other port")
            faults = [*try_doors([Door(0, "", address, greeting.port)], node_rank, deadline)]
            if (doors := _read_doors(master, lines, deadline)) and not faults:
                done.append("pairs")
                faults = [*try_doors(doors, node_rank, deadline)]
            yield from faults
            with contextlib.suppress(OSError):
                master.sendall(b"\n")
                master.settimeout(max(limits.POLL_S, deadline + 1 - time.monotonic()))
                master.recv(1)  # its end: all others have tried this node's door
    except socket.gaierror:
        pass  # check_master tells it
    except OSError as error:
        is_silent = isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)
        if isinstance(error, NoEntrance | WrongSecret) and not is_silent:
            return  # another program, which node rank 0 tells
        why = f"no answer in {limits.GREETING_S:g} s" if is_silent else error.strerror or error
        cause = f"no way to {address}:{port} ({why})"
        yield Fault("port-blocked", cause, "open the port in the firewall")
    except ValueError:
        pass


def _read_doors(master: socket.socket, lines: TextIO, deadline: float) -> Sequence[Door]:
    """Return the doors of all nodes; none where not all have come."""
    master.settimeout(max(limits.POLL_S, deadline - time.monotonic()))
    try:
        return parse(Doors, lines.readline(MOST_DOORS)).doors
    except (OSError, ValueError):
        return ()


def try_doors(doors: Sequence[Door], me: int, deadline: float) -> Iterator[Fault]:
    """Pass something to the doors of all nodes but this one; begins at the next rank."""
    ahead = sorted(doors, key=lambda door: (door.node_rank <= me, door.node_rank))
    others = [door for door in ahead if door.node_rank != me]
    failed: dict[tuple[str, str], list[str]] = {}  # by fault and why
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda door: _try_door(door, deadline), others)
        for door, (fault, why) in zip(others, found, strict=True):
            if why:
                failed.setdefault((fault, why), []).append(str(door))
    for (fault, why), names in failed.items():
        yield Fault(fault, f"no way to {shorten(names)} ({why})", CURES[fault])


def shorten(names: Sequence[str]) -> str:
    """Return the first of them, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _try_door(door: Door, deadline: float) -> tuple[str, str]:
    """Return fault and why, where the door cannot be reached; no why if there is no time left.

    What fails at once is tried again: a network that has just come back has no route for a while.
    """
    end = min(time.monotonic() + limits.GREETING_S, deadline + 1)
    why = ""
    while (left_s := end - time.monotonic()) > 0:
        try:
            with socket.create_connection((door.address, door.port), left_s) as connection:
                connection.settimeout(max(left_s, limits.DOOR_PASS_S))
                with contextlib.suppress(TimeoutError):
                    connection.sendall(bytes(PASSED))
                pass_s = max(end - time.monotonic(), limits.DOOR_PASS_S)
                return "mtu-too-large", find_loss(connection, pass_s)
        except TimeoutError:
            why = why or f"no answer in {limits.GREETING_S:.0f} s"
            break
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(min(limits.DOOR_AGAIN_S, left_s))
    return "port-blocked", why


def find_loss(connection: socket.socket, within_s: float) -> str:
    """Wait until the other end's kernel has what was sent; returns why it has not, else ""."""
    end = time.monotonic() + within_s
    while is_busy(connection):
        if time.monotonic() > end:
            size = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            return f"it answers, but packets of {size} bytes are lost"
        time.sleep(limits.POLL_S)
    return ""


def is_busy(connection: socket.socket) -> bool:
    """Return whether the other end has not yet received all that was sent."""
    with contextlib.suppress(OSError):  # a sandbox's kernel may not tell
        return any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))  # SIOCOUTQ, tcp(7)
    return False


def _reach(address: str, port: int, secret: bytes, deadline: float) -> socket.socket:
    """Connect to node rank 0, which may come to its port later than this node."""
    soon = time.monotonic() + limits.GREETING_S  # for a network that has just come back
    until = {errno.EHOSTUNREACH: soon, errno.ENETUNREACH: soon}
    until |= {errno.ECONNREFUSED: deadline, errno.ECONNRESET: deadline}  # not yet there
    while True:
        try:
            return connect(address, port, secret, limits.GREETING_S)
        except OSError as error:
            if time.monotonic() > until.get(error.errno or 0, 0):
                raise
            time.sleep(2 * limits.POLL_S)
