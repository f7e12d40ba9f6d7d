"""The nodes meet at the master's port while they are checked: can each reach it, do clocks agree?

Node rank 0 listens there until all the others have come, and tells each what to compare with. Every
node has a port of its own open, its door. When all are there, each tries the doors of all others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from launcher.agent.checkin import SKEW_S
from launcher.handshake import Access, Entrance, NoEntrance, WrongSecret, connect, open_port
from launcher.preflight.checks import Fault, existing
from launcher.text import short_host_name
from launcher.typed_json import encode, parse

ANSWER_S = 3.0  # a connection that nothing answers for so long is dropped
MOST_BYTES = 10_000  # of a greeting
MOST_DOORS = 1 << 20  # bytes of the list of doors
ROUND = 128  # doors that are tried at once
SHOWN = 3  # nodes named in one line
OPEN_ALL = "open all ports between the nodes, for gloo and NCCL"


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


@dataclass(frozen=True)
class Doors:
    """Those of all nodes but node rank 0, once all have come."""

    doors: Sequence[Door]


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
        other = stack.enter_context(open_port(0, address))
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
                visitor.settimeout(ANSWER_S)
                with contextlib.suppress(OSError):
                    visitor.sendall(line)
            faults += try_doors(doors, 0, deadline)
        for visitor in visitors:
            visitor.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                visitor.recv(1)  # that node has tried the port and the doors, and seen the file
    return faults


def visit_master(
    address: str, port: int, secret: bytes, deadline: float, node_rank: int, done: list[str]
) -> Iterator[Fault]:
    """On any other node: reach node rank 0, and compare this node's clock and folder with its.

    `done` gets the names of the checks that were made.
    """
    cure = "open the port in the firewall"
    try:
        with contextlib.ExitStack() as stack:
            master = stack.enter_context(_reach(address, port, secret, deadline))
            here = master.getsockname()[0]
            door = stack.enter_context(open_port(0, here))
            mine = Door(node_rank, short_host_name(), here, door.getsockname()[1])
            master.sendall(f"{encode(mine)}\n".encode())
            lines = master.makefile()
            greeting = parse(Greeting, lines.readline(MOST_BYTES))
            done += ["port", "clock"]
            skew = time.time() - greeting.time
            if abs(skew) > SKEW_S:
                cause = f"the clock is {skew:+.0f} s from node rank 0's"
                yield Fault("clock-skew", cause, "have both synchronised", warns=True)
            done += ["folder"] if greeting.file else []
            if greeting.file and not os.path.exists(greeting.file):
                cause = f"{os.path.dirname(greeting.file)!r} is another folder on node rank 0"
                advice = "choose a checkpoint.dir that all nodes share: the job may move"
                yield Fault("dir-not-shared", cause, advice)
            port, cure = greeting.port, OPEN_ALL
            done.append("other port")
            socket.create_connection((address, port), timeout=ANSWER_S).close()
            if doors := _read_doors(master, lines, deadline):
                done.append("pairs")
                yield from try_doors(doors, node_rank, deadline)
            with contextlib.suppress(OSError):
                master.sendall(b"\n")
                master.settimeout(max(0.01, deadline + 1 - time.monotonic()))
                master.recv(1)  # its end: all others have tried this node's door
    except socket.gaierror:
        pass  # check_master tells it
    except OSError as error:
        is_silent = isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)
        if isinstance(error, NoEntrance | WrongSecret) and not is_silent:
            return  # another program, which node rank 0 tells
        why = f"no answer in {ANSWER_S:g} s" if is_silent else error.strerror or error
        yield Fault("port-blocked", f"no way to {address}:{port} ({why})", cure)
    except ValueError:
        pass


def _read_doors(master: socket.socket, lines: TextIO, deadline: float) -> Sequence[Door]:
    """Return the doors of all nodes; none where not all have come."""
    master.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        return parse(Doors, lines.readline(MOST_DOORS)).doors
    except (OSError, ValueError):
        return ()


def try_doors(doors: Sequence[Door], me: int, deadline: float) -> Iterator[Fault]:
    """Connect to the doors of all nodes but this one, in rounds that begin at the next rank."""
    ahead = sorted(doors, key=lambda door: (door.node_rank <= me, door.node_rank))
    others = [door for door in ahead if door.node_rank != me]
    failed: dict[str, list[str]] = {}  # by why
    for at in range(0, len(others), ROUND):
        limit_s = min(ANSWER_S, deadline + 1 - time.monotonic())
        if limit_s <= 0:
            break
        for door, why in _try_round(others[at : at + ROUND], limit_s):
            failed.setdefault(why, []).append(f"{door.host} ({door.address}:{door.port})")
    for why, names in failed.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        cause = f"no way to {', '.join(names[:SHOWN])}{more} ({why})"
        yield Fault("port-blocked", cause, OPEN_ALL)


def _try_round(doors: Sequence[Door], limit_s: float) -> Iterator[tuple[Door, str]]:
    """Connect to all of them at once, and yield each that cannot be reached, and why."""
    end = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for door in doors:
            family = socket.AF_INET6 if ":" in door.address else socket.AF_INET
            one = stack.enter_context(socket.socket(family))
            one.setblocking(False)
            code = one.connect_ex((door.address, door.port))
            if code == errno.EINPROGRESS:
                selector.register(one, selectors.EVENT_WRITE, door)
            elif code:
                yield door, os.strerror(code)
        while selector.get_map() and (left_s := end - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if code := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    yield key.data, os.strerror(code)
        for key in selector.get_map().values():
            yield key.data, f"no answer in {limit_s:.0f} s"


def _reach(address: str, port: int, secret: bytes, deadline: float) -> socket.socket:
    """Connect to node rank 0, which may come to its port later than this node."""
    while True:
        try:
            return connect(address, port, secret, ANSWER_S)
        except (ConnectionRefusedError, ConnectionResetError):  # not yet, or one that ends
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
