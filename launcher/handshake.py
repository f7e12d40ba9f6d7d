"""Authenticate connections between nodes: both ends must know the run's secret (no torch).

    node rank 0 -> node     a nonce
    node -> node rank 0     a nonce, and the HMAC-SHA256 of both (RFC 2104), keyed with the secret
    node rank 0 -> node     the HMAC of both, for its own role; zeros if the node's proof is wrong

Before that, node rank 0 reads and sends nothing else. The secret is in RUN_SECRET, which the
launcher sends to the nodes through ssh or srun. Nodes started by hand may have no secret: then any
process can join, or any process on the hosts in HOSTS if that is set.
"""

import contextlib
import errno
import hmac
import os
import selectors
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from distributed import hostlist
from launcher.text import Environ, PlanError, Say
from launcher.wire import limits

NONCE_BYTES = PROOF_BYTES = 32
LEAST_SECRET = 16  # characters
MOST_WAITING = 256  # connections; one more drops the oldest
MOST_BYTES = 1 << 20  # of the first line
_NODE, _MASTER = b"node", b"node rank 0"


class NotAccepted(ConnectionError):
    """The listener is not node rank 0, or no longer accepts nodes."""


class WrongSecret(ConnectionError):
    """The other end rejected this node's proof, or sent a wrong proof itself."""


@dataclass(frozen=True)
class Access:
    """Who may join a run."""

    secret: bytes = b""  # empty: nodes were started by hand, without one
    addresses: frozenset[str] | None = None  # None: any address


def new_secret() -> str:
    """Return a new random secret: 64 hexadecimal digits."""
    return os.urandom(32).hex()


def read_access(environ: Environ) -> Access:
    """Return who may join, according to RUN_SECRET or, if that is unset, HOSTS.

    RUN_SECRET is the secret or the path of a file that holds it. Resolves the names in HOSTS.
    Raises PlanError or HostlistError, with cause and cure in one line, if one cannot be used.
    """
    secret = environ.get("RUN_SECRET", "")
    if "/" in secret:
        secret = _read_private(Path(secret))
    if secret and len(secret) < LEAST_SECRET:
        raise PlanError(
            f"RUN_SECRET has {len(secret)} characters; "
            f"give at least {LEAST_SECRET}, for example from openssl rand -hex 32"
        )
    if secret or not environ.get("HOSTS"):
        return Access(secret.encode())

    addresses = set[str]()
    for name in hostlist.expand(environ["HOSTS"]):
        try:
            addresses |= {str(address[0]) for *_, address in socket.getaddrinfo(name, None)}
        except (OSError, UnicodeError):
            raise PlanError(f"HOSTS names {name!r}, which is unknown; correct it") from None
    return Access(addresses=frozenset(addresses))


def _read_private(file: Path) -> str:
    """Return the secret in a file. Raises PlanError if it cannot be read, or others can read it.

    No message shows the path, which may be the secret itself.
    """
    try:
        file = file.expanduser()
        if file.stat().st_mode & 0o077:
            raise PlanError("other users can read the file in RUN_SECRET; run chmod 600 on it")
        return file.read_text().strip() or "-"  # an empty file does not mean no secret
    except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: an unknown ~user
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise PlanError(
            f"the file in RUN_SECRET cannot be read ({why}); correct its path; a secret "
            "itself must not contain /"
        ) from None


def _prove(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    """Return the proof of the end with this role; without a secret, anybody can compute it."""
    return hmac.digest(secret or b"-", role + nonces, "sha256")


def connect(address: str, port: int, secret: bytes, limit_s: float) -> socket.socket:
    """Connect to node rank 0; each end proves to the other that it knows the secret.

    `limit_s` limits each wait, and stays the socket's timeout. Raises OSError if that fails; its
    subclasses NotAccepted and WrongSecret say who answered.
    """
    connection = socket.create_connection((address, port), timeout=limit_s)
    try:
        introduce(connection, secret)
    except OSError:
        connection.close()
        raise
    return connection


def introduce(connection: socket.socket, secret: bytes) -> None:
    """Prove to node rank 0 that this node knows the secret, and check that node rank 0 does too.

    Raises NotAccepted if there is no complete answer in time, WrongSecret if the proof is wrong.
    """
    try:
        theirs = _receive(connection, NONCE_BYTES)
        ours = os.urandom(NONCE_BYTES)
        connection.sendall(ours + _prove(secret, _NODE, theirs + ours))
        proof = _receive(connection, PROOF_BYTES)
    except OSError as error:  # the other end is not node rank 0, or has just ended
        raise NotAccepted(str(error)) from error
    if not hmac.compare_digest(proof, _prove(secret, _MASTER, theirs + ours)):
        raise WrongSecret("the other end has a different RUN_SECRET")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Return exactly the next `num_bytes` bytes. Raises OSError if the connection ends before."""
    data = b""
    while len(data) < num_bytes:
        if not (more := connection.recv(num_bytes - len(data))):
            raise ConnectionResetError("the connection was closed")
        data += more
    return data


@dataclass
class _Visitor:
    """A connection that has not been let in yet."""

    socket: socket.socket
    address: str
    since: float  # monotonic seconds
    nonce: bytes
    received: bytes = b""
    is_known: bool = False  # it has proved that it knows the secret


class Acceptor:
    """Accepts whoever knows the secret. Many connections can wait; none delays another."""

    def __init__(self, listener: socket.socket, access: Access, say: Say) -> None:
        """Make the listener non-blocking; the caller closes it. `say` reports what goes wrong."""
        self.unauthenticated = 0  # dropped so far
        self._is_full = False
        self._say = say
        self._access = access
        self._listener = listener
        self._waiting = dict[int, _Visitor]()  # by file descriptor; the oldest comes first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self, limit_s: float) -> list[tuple[socket.socket, bytes]]:
        """Wait for an event, up to `limit_s` or PROOF_S. Returns the connections now let in.

        Each comes with what it has sent after its proof: its first line, perhaps more. The list is
        often empty. Drops connections that have waited for longer than PROOF_S.
        """
        let_in = []
        for key, _ in self._selector.select(min(limit_s, limits.PROOF_S)):
            if key.fileobj is self._listener:
                self._accept()
            elif (visitor := self._waiting.get(key.fd)) and self._receive_from(visitor):
                self._forget(visitor)
                visitor.socket.setblocking(True)  # for its new owner
                let_in.append((visitor.socket, visitor.received))

        while self._waiting and self._oldest.since < time.monotonic() - limits.PROOF_S:
            self._drop(self._oldest)
        return let_in

    def close(self) -> None:
        """Drop the connections that are still waiting."""
        for visitor in self._waiting.values():
            visitor.socket.close()
        self._selector.close()

    @property
    def _oldest(self) -> _Visitor:
        """The visitor that has waited for the longest; there must be one."""
        return next(iter(self._waiting.values()))

    def _accept(self) -> None:
        """Accept a connection and send it a nonce, unless its address is not allowed.

        Drops the oldest visitor if MOST_WAITING are waiting already.
        """
        try:
            connection, (address, *_) = self._listener.accept()
        except OSError as error:  # the peer may be gone already
            if error.errno == errno.EMFILE:
                self._make_room()
            return

        allowed = self._access.addresses
        if allowed is not None and address.removeprefix("::ffff:") not in allowed:
            self._count_dropped(f"{address} is not in HOSTS")
            connection.close()
            return
        if len(self._waiting) >= MOST_WAITING:
            self._drop(self._oldest)

        connection.setblocking(False)
        visitor = _Visitor(connection, address, time.monotonic(), os.urandom(NONCE_BYTES))
        self._waiting[connection.fileno()] = visitor
        self._selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            connection.send(visitor.nonce)  # cannot block: the buffer is empty

    def _receive_from(self, visitor: _Visitor) -> bool:
        """Read what has arrived: the proof, which is checked, then the first line.

        Returns whether the visitor is known and has sent a line. Drops it if it has closed the
        connection, or sends too much.
        """
        missing = NONCE_BYTES + PROOF_BYTES - len(visitor.received)
        try:
            data = visitor.socket.recv(65536 if visitor.is_known else missing)
        except BlockingIOError:
            return False
        except OSError:
            data = b""

        visitor.received += data
        if not data or len(visitor.received) > MOST_BYTES:
            self._drop(visitor)
        elif visitor.is_known:
            return b"\n" in visitor.received
        elif len(data) == missing:
            self._answer_proof(visitor)
        return False

    def _answer_proof(self, visitor: _Visitor) -> None:
        """Answer the proof that was received with ours. Drops the visitor if it is wrong."""
        nonces = visitor.nonce + visitor.received[:NONCE_BYTES]
        proof = visitor.received[NONCE_BYTES:]
        visitor.received = b""
        visitor.is_known = hmac.compare_digest(proof, _prove(self._access.secret, _NODE, nonces))

        answer = bytes(PROOF_BYTES)
        if visitor.is_known:
            answer = _prove(self._access.secret, _MASTER, nonces)
        with contextlib.suppress(OSError):
            visitor.socket.send(answer)
        if not visitor.is_known:
            self._drop(visitor)

    def _drop(self, visitor: _Visitor) -> None:
        """Close a visitor's connection. Counts it unless it has proved that it knows the secret."""
        if not visitor.is_known:
            self._count_dropped(f"{visitor.address} connected without the run's secret")
        self._forget(visitor)
        visitor.socket.close()

    def _count_dropped(self, what: str) -> None:
        """Count a dropped connection, and report only the first; `what` says why it is dropped."""
        self.unauthenticated += 1
        if self.unauthenticated == 1:
            self._say(f"warning: {what}, and was dropped; others are dropped silently [stranger]")

    def _make_room(self) -> None:
        """Drop the oldest visitor, because this process has too many open files; warn once.

        Without a visitor, wait for POLL_S: the connection stays in the listener's queue.
        """
        if not self._is_full:
            self._say(
                "warning: this process has too many open files, so nodes cannot connect; "
                "run ulimit -n 65536 before the launch [low-nofile]"
            )
        self._is_full = True
        if self._waiting:
            self._drop(self._oldest)
        else:
            time.sleep(limits.POLL_S)

    def _forget(self, visitor: _Visitor) -> None:
        """Stop waiting for a visitor, whose connection stays open."""
        del self._waiting[visitor.socket.fileno()]
        self._selector.unregister(visitor.socket)
