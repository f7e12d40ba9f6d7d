"""The node agents' connection to the agent of node rank 0, from check-in to the end (no torch).

Each agent holds one TCP connection to the master address and port, where the torch store is served
afterwards on the same listening socket. The kernel ends the connection at an agent's death, so the
others know at once; beats tell a network that was cut. Messages are JSON, one a line: nothing that
arrives is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distributed.failure import Refused

BEAT_S = 2.0
SILENCE_S = 10.0  # without a beat for so long, a node is lost
WELCOME_S = 3.0  # for an agent to greet another; torch's store, served there later, does not
TELL_S = 3.0  # a wait that takes longer says what it waits for
_RETRY_S = 0.1
SKEW_S = 5.0  # between clocks, from where on it is told
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Node:
    """What an agent says of itself at check-in."""

    node_rank: int
    num_nodes: int
    nproc: int
    host: str
    run_id: str  # empty: takes node rank 0's
    versions: Mapping[str, str]
    files: Mapping[str, str]  # as hash_files() has them; at check-in the arguments, too
    time: float = field(default_factory=time.time)  # seconds since the epoch


def versions() -> dict[str, str]:
    """Return Python's version, and torch's without importing it ("" where it is not there)."""
    torch = importlib.util.find_spec("torch")
    version = ""
    if torch is not None and torch.origin is not None:
        file = Path(torch.origin).with_name("version.py")
        version = runpy.run_path(str(file))["__version__"]
    return {"python": "{}.{}".format(*sys.version_info), "torch": version}


def hash_files(words: Sequence[str], directory: Path) -> dict[str, str]:
    """Return by name the hash of this project, and of each word that is a file up to 1 MiB."""
    folders = Path(__file__).parent, Path(__file__).parents[1] / "training"
    modules = sorted(module for folder in folders for module in folder.rglob("*.py"))
    found = {"this project": _hash(*modules)}
    for path in (os.path.join(directory, word) for word in words):
        if os.path.isfile(path) and os.path.getsize(path) <= 1 << 20:
            with contextlib.suppress(OSError):  # unreadable is as good as missing
                found[os.path.basename(path)] = _hash(Path(path))
    return found


def _hash(*files: Path) -> str:
    """Return the start of the SHA-256 of the files, one after the other."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def mismatches(me: Node, node: Node) -> Iterator[tuple[str, str]]:
    """Yield fault and cause of each version and file that `node` has otherwise than `me`.

    One that is "" is not there, and its node has told so.
    """
    for fault, mine, theirs in (
        ("version-mismatch", me.versions, node.versions),
        ("code-mismatch", me.files, node.files),
    ):
        for name in {**mine, **theirs}:
            here, there = mine.get(name, "missing"), theirs.get(name, "missing")
            if here != there and here and there:
                first, second = (f"node rank {one.node_rank} ({one.host})" for one in (me, node))
                yield fault, f"{name} is {here!r} on {first} and {there!r} on {second}"


@dataclass(frozen=True)
class Place:
    """An agent's place in the run, given by node rank 0."""

    run_id: str
    first_rank: int
    world_size: int
    hosts: list[str]


class Peer:
    """One end of a connection between two agents."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard = time.monotonic()
        self._buffer = b""

    def send(self, kind: str, **content: Any) -> None:
        """Send one message; a peer that is gone is noticed where it is read."""
        try:
            self.socket.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")
        except OSError:
            self.close()

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None when the peer is gone."""
        if not self._fill():
            return None
        *lines, self._buffer = self._buffer.split(b"\n")
        messages = [_parse(line) for line in lines]
        return None if None in messages else [message for message in messages if message]

    def wait(self, deadline: float) -> dict[str, Any] | None:
        """The next message, or None when the peer is gone or `deadline` (monotonic) has passed."""
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.socket.settimeout(left)
            is_there = self._fill()
            self.socket.settimeout(SILENCE_S)
            if not is_there:
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")  # what follows is for later
        return _parse(line)

    def _fill(self) -> bool:
        """Take what has arrived; False when the peer is gone, or is no agent."""
        try:
            data = self.socket.recv(65536)
        except TimeoutError:
            return True
        except OSError:
            return False
        self.heard = time.monotonic()
        self._buffer += data
        return bool(data) and len(self._buffer) <= _MAX_BYTES

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self.heard > SILENCE_S

    def close(self) -> None:
        self.socket.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None  # whatever this is, it is no agent
    return message if isinstance(message, dict) else None


def listen(address: str, port: int, *, is_local: bool) -> socket.socket:
    """Listen on the master port (0: any free one); only on loopback where all ranks are here.

    Raises:
        Refused: the port is taken.
    """
    try:
        if is_local:
            family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(where[:2], family=family, backlog=4096)
        return open_port(port)
    except OSError as error:
        cure = "set MASTER_PORT to a free one"
        raise Refused(
            "port-in-use", f"port {port} on {address}: {error.strerror}; {cure}"
        ) from error


def open_port(port: int) -> socket.socket:
    """Listen on the port (0: any free one) at every address of this machine; raises OSError."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=4096)


def gather(
    listener: socket.socket, me: Node, timeout_s: float, say: Callable[[str], None]
) -> tuple[dict[int, Peer], Place]:
    """On node rank 0: wait until every other agent has checked in, and start them.

    Returns the others by node rank, and the place of this node.

    Raises:
        Refused: a node did not come, came twice, or does not match this one; all are told.
    """
    start = time.monotonic()
    deadline = start + timeout_s
    is_told = False
    nodes: dict[int, Node] = {me.node_rank: me}
    peers: dict[int, Peer] = {}
    strangers: list[Peer] = []
    try:
        while len(nodes) < me.num_nodes:
            limit = deadline if is_told else min(deadline, start + TELL_S)
            listener.settimeout(max(0.0, limit - time.monotonic()))
            try:
                peer = Peer(listener.accept()[0])
            except (TimeoutError, BlockingIOError):
                missing = ", ".join(str(one) for one in range(me.num_nodes) if one not in nodes)
                if time.monotonic() < deadline:
                    say(f"waiting for node rank {missing}, {timeout_s:g} s at most")
                    is_told = True
                    continue
                here = ", ".join(f"{node.node_rank} ({node.host})" for node in nodes.values())
                raise Refused(
                    "node-missing",
                    f"node rank {missing} did not check in within {timeout_s:g} s"
                    f" (here: {here}); start it, or look at its terminal",
                ) from None
            hello = peer.wait(min(deadline, time.monotonic() + 3))
            try:
                node = Node(**hello["node"])  # type: ignore[index]
            except (TypeError, KeyError):
                peer.close()  # a port scan, or a health check
                continue
            peer.send("welcome")
            strangers.append(peer)
            _compare(me, node, nodes)
            skew = node.time - time.time()
            if abs(skew) > SKEW_S:
                say(f"warning: {node.host}'s clock is {skew:+.0f} s from {me.host}'s [clock-skew]")
            nodes[node.node_rank] = node
            peers[node.node_rank] = strangers.pop()
    except Refused as refused:
        for peer in [*peers.values(), *strangers]:
            peer.send("refused", fault=refused.fault, message=str(refused).rpartition(" [")[0])
        raise
    first_rank = 0
    places = {}
    for rank in sorted(nodes):
        places[rank] = Place(
            run_id=me.run_id,
            first_rank=first_rank,
            world_size=sum(node.nproc for node in nodes.values()),
            hosts=[nodes[rank].host for rank in sorted(nodes)],
        )
        first_rank += nodes[rank].nproc
    for rank, peer in peers.items():
        peer.send("start", place=asdict(places[rank]))
    return peers, places[me.node_rank]


def _compare(me: Node, node: Node, nodes: Mapping[int, Node]) -> None:
    if node.num_nodes != me.num_nodes or not 0 < node.node_rank < me.num_nodes:
        raise Refused(
            "wrong-world",
            f"{node.host} says node rank {node.node_rank} of {node.num_nodes}, {me.host} says"
            f" {me.num_nodes} nodes; give every node the same number",
        )
    if node.node_rank in nodes:
        first = nodes[node.node_rank].host
        raise Refused(
            "duplicate-node-rank",
            f"node rank {node.node_rank} was started twice, on {first} and on {node.host};"
            " give each node its own",
        )
    if node.run_id not in ("", me.run_id):
        raise Refused(
            "wrong-world",
            f"{node.host} has run id {node.run_id}, {me.host} has {me.run_id};"
            " leave RUN_ID away, or give the same one",
        )
    for fault, cause in mismatches(me, node):
        raise Refused(fault, f"{cause}; make them the same")


def join(
    address: str, port: int, me: Node, timeout_s: float, say: Callable[[str], None]
) -> tuple[Peer, Place]:
    """On any other node: check in with node rank 0, and wait for the start.

    Raises:
        Refused: node rank 0 cannot be reached in time, or refuses this node or the run.
    """
    start = time.monotonic()
    deadline = start + timeout_s
    last: OSError = TimeoutError("no answer")
    is_told = False
    turned_away: float | None = None  # since when
    while time.monotonic() < deadline:
        try:
            peer = Peer(socket.create_connection((address, port), timeout=min(3.0, timeout_s)))
            peer.send("hello", node=asdict(me))
            answer = peer.wait(min(deadline, time.monotonic() + WELCOME_S))
            if answer is not None and answer["kind"] == "welcome":
                answer = peer.wait(deadline)
            if answer is not None and answer["kind"] == "refused":
                raise Refused(answer["fault"], answer["message"])
            if answer is not None:
                return peer, Place(**answer["place"])
            peer.close()
            turned_away = turned_away or time.monotonic()
            if time.monotonic() - turned_away > SILENCE_S:
                cause = f"{address}:{port} takes no node rank {me.node_rank}: its run has begun"
                cure = "see whether this node rank was started elsewhere too"
                raise Refused("duplicate-node-rank", f"{cause}; {cure}")
        except OSError as error:
            last = error
        if not is_told and time.monotonic() > start + TELL_S:
            say(f"waiting for node rank 0 at {address}:{port}, {timeout_s:g} s at most")
            is_told = True
        time.sleep(_RETRY_S)
    fault, cure = _explain(last)
    cause = f"node rank 0 at {address}:{port} did not answer within {timeout_s:g} s"
    raise Refused(fault, f"{cause} ({last.strerror or last}); {cure}")


def _explain(error: OSError) -> tuple[str, str]:
    """The fault behind a connection that failed, and its cure."""
    if isinstance(error, socket.gaierror):
        return "name-unresolved", "correct the master's name, or give its address"
    if isinstance(error, ConnectionRefusedError):
        return "node-missing", "start node rank 0"
    if isinstance(error, TimeoutError):
        return "port-blocked", "open the port in the firewall"
    return "host-unreachable", "see that the machine is up"
