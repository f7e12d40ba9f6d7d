"""The nodes meet at the master's port while they are checked: can each reach it, do clocks agree?

Node rank 0 listens there until all the others have come, and tells each what to compare with.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from launcher.agent.checkin import SKEW_S, open_port
from launcher.preflight.checks import Fault, existing

ANSWER_S = 3.0  # a connection that nothing answers for so long is dropped


def receive_others(port: int, number: int, folder: Path | None, deadline: float) -> None:
    """On node rank 0: wait at the port for so many nodes, and tell each what to compare with."""
    with contextlib.ExitStack() as stack:
        listener, other = (stack.enter_context(open_port(one)) for one in (port, 0))
        greeting = {"port": other.getsockname()[1], "file": ""}
        if folder is not None:
            with contextlib.suppress(OSError):  # which check_folders tells
                greeting["file"] = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=existing(folder), prefix=".shared-")
                ).name
        visitors: list[socket.socket] = []
        while len(visitors) < number and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(OSError):
                visitor = stack.enter_context(listener.accept()[0])
                visitor.sendall(json.dumps({**greeting, "time": time.time()}).encode() + b"\n")
                visitors.append(visitor)
        for visitor in visitors:
            visitor.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                visitor.recv(1)  # its end: that node has tried the port and seen the file


def visit_master(address: str, port: int, deadline: float) -> Iterator[Fault]:
    """On any other node: reach node rank 0, and compare this node's clock and folder with its."""
    cure = "open the port in the firewall"
    try:
        with _connect(address, port, deadline) as master:
            greeting = json.loads(master.makefile().readline())
            skew = time.time() - greeting["time"]
            if abs(skew) > SKEW_S:
                cause = f"the clock is {skew:+.0f} s from node rank 0's"
                yield Fault("clock-skew", cause, "have both synchronised", warns=True)
            if greeting["file"] and not os.path.exists(greeting["file"]):
                cause = f"{os.path.dirname(greeting['file'])!r} is another folder on node rank 0"
                advice = "choose a checkpoint.dir that all nodes share: the job may move"
                yield Fault("dir-not-shared", cause, advice)
            port, cure = greeting["port"], "open all ports between the nodes, for gloo and NCCL"
            _connect(address, port, deadline=0).close()
    except socket.gaierror:
        pass  # check_master tells it
    except OSError as error:
        is_silent = isinstance(error, TimeoutError)
        why = f"no answer in {ANSWER_S:g} s" if is_silent else error.strerror
        yield Fault("port-blocked", f"no way to {address}:{port} ({why})", cure)
    except (ValueError, KeyError, TypeError):
        pass  # this was another program; node rank 0 tells it


def _connect(address: str, port: int, deadline: float) -> socket.socket:
    """Connect; until the deadline node rank 0 may be later than this node, and refuse."""
    while True:
        try:
            return socket.create_connection((address, port), timeout=ANSWER_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
