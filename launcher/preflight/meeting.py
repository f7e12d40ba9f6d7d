"""The nodes meet at the master's port while they are checked: can each reach it, do clocks agree?

Node rank 0 listens there until all the others have come, and tells each what to compare with.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.checkin import SKEW_S
from launcher.handshake import Access, Entrance, NoEntrance, WrongSecret, introduce, open_port
from launcher.preflight.checks import Fault, existing
from launcher.typed_json import encode, parse

ANSWER_S = 3.0  # a connection that nothing answers for so long is dropped
MOST_BYTES = 10_000  # of a greeting


@dataclass(frozen=True)
class Greeting:
    """What node rank 0 tells each other node to compare with."""

    port: int  # another one, on which it listens too
    file: str  # on a file system that all should share; empty: none
    time: float  # seconds since the epoch


def receive_others(
    address: str, port: int, access: Access, number: int, folder: Path | None, deadline: float
) -> None:
    """On node rank 0: wait at the port for so many nodes, and tell each what to compare with."""
    with contextlib.ExitStack() as stack:
        listener, other = (stack.enter_context(open_port(one, address)) for one in (port, 0))
        entrance = Entrance(listener, access, say=lambda stranger: None)  # the check-in tells
        stack.enter_context(contextlib.closing(entrance))
        file = ""
        if folder is not None:
            with contextlib.suppress(OSError):  # which check_folders tells
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=existing(folder), prefix=".shared-")
                ).name
        visitors: list[socket.socket] = []
        while len(visitors) < number and (left_s := deadline - time.monotonic()) > 0:
            for visitor, _ in entrance.wait(left_s):
                visitors.append(stack.enter_context(visitor))
                greeting = Greeting(other.getsockname()[1], file, time.time())
                with contextlib.suppress(OSError):
                    visitor.sendall(f"{encode(greeting)}\n".encode())
        for visitor in visitors:
            visitor.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                visitor.recv(1)  # its end: that node has tried the port and seen the file


def visit_master(address: str, port: int, secret: bytes, deadline: float) -> Iterator[Fault]:
    """On any other node: reach node rank 0, and compare this node's clock and folder with its."""
    cure = "open the port in the firewall"
    try:
        with _reach(address, port, secret, deadline) as master:
            master.sendall(b"\n")
            told = master.makefile().readline(MOST_BYTES)
            greeting = parse(Greeting, told)
            skew = time.time() - greeting.time
            if abs(skew) > SKEW_S:
                cause = f"the clock is {skew:+.0f} s from node rank 0's"
                yield Fault("clock-skew", cause, "have both synchronised", warns=True)
            if greeting.file and not os.path.exists(greeting.file):
                cause = f"{os.path.dirname(greeting.file)!r} is another folder on node rank 0"
                advice = "choose a checkpoint.dir that all nodes share: the job may move"
                yield Fault("dir-not-shared", cause, advice)
            port, cure = greeting.port, "open all ports between the nodes, for gloo and NCCL"
            socket.create_connection((address, port), timeout=ANSWER_S).close()
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


def _reach(address: str, port: int, secret: bytes, deadline: float) -> socket.socket:
    """Connect to node rank 0, which may come to its port later than this node."""
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=ANSWER_S)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    try:
        introduce(connection, secret, ANSWER_S)
    except OSError:
        connection.close()
        raise
    return connection
