"""The run's secret: only peers that know it are let in, even while others are waiting."""

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import PATIENCE_S, written
from ports import free_port

from launcher import handshake
from launcher.handshake import Acceptor, Access, NotAccepted, WrongSecret, introduce, read_access
from launcher.master_port import open_port

SECRET = bytes(range(32))
FIRST = """
import os, sys
from launcher.master_port import claim_node_rank_0
print(claim_node_rank_0("127.0.0.1", int(sys.argv[1])), flush=True)
os.execvp("cat", ["cat"])
"""


class Master:
    """A node rank 0 that lets others in until it is closed."""

    def __init__(self, access: Access) -> None:
        self.listener = open_port(0, "127.0.0.1")
        self.port = int(self.listener.getsockname()[1])
        self.said: list[str] = []
        self.acceptor = Acceptor(self.listener, access, self.said.append)
        self.lines: list[bytes] = []  # the first lines of those let in
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            for connection, line in self.acceptor.wait(0.05):
                self.lines.append(line)
                connection.close()

    def end(self) -> None:
        self._is_closed = True
        self._thread.join()

    def close(self) -> None:
        self.end()
        self.acceptor.close()
        self.listener.close()


@pytest.fixture
def master() -> Iterator[Master]:
    one = Master(Access(SECRET))
    yield one
    one.close()


def visit(port: int, secret: bytes, line: bytes = b"hello\n") -> None:
    """Connect to the port, and wait until the other end closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        introduce(connection, secret)
        connection.sendall(line)
        connection.settimeout(30)
        assert connection.recv(1) == b""


def test_who_knows_the_secret_is_let_in_with_its_first_line(master: Master) -> None:
    visit(master.port, SECRET)
    assert master.lines == [b"hello\n"]
    assert (master.acceptor.unauthenticated, master.said) == (0, [])


@pytest.mark.parametrize("secret", [b"", SECRET[:-1], SECRET[::-1]])
def test_another_secret_is_dropped_and_told_once(master: Master, secret: bytes) -> None:
    for _ in range(3):
        with pytest.raises(WrongSecret):
            visit(master.port, secret)
    master.end()
    assert master.lines == []
    assert master.acceptor.unauthenticated == 3
    (said,) = master.said
    assert said.startswith("warning: 127.0.0.1 connected without the run's secret")
    assert said.endswith("[stranger]")


def test_without_a_secret_only_the_hosts_named_come_in() -> None:
    for address, is_let_in in (("127.0.0.1", True), ("192.0.2.1", False)):
        master = Master(Access(addresses=frozenset({address})))
        try:
            if is_let_in:
                visit(master.port, b"")
            else:
                with pytest.raises(NotAccepted):
                    visit(master.port, b"")
        finally:
            master.close()
        assert bool(master.lines) == is_let_in
        assert master.acceptor.unauthenticated == (not is_let_in)


def test_an_answer_cannot_be_used_twice(master: Master) -> None:
    """A recorded exchange lets no one in, because each exchange has a new nonce."""
    with socket.create_connection(("127.0.0.1", master.port)) as one:
        nonce = one.recv(32, socket.MSG_WAITALL)
        answer = bytes(32) + handshake._prove(SECRET, b"node", nonce + bytes(32))
        one.sendall(answer)
        assert one.recv(32, socket.MSG_WAITALL) != b""
        one.sendall(b"first\n")
        with socket.create_connection(("127.0.0.1", master.port)) as other:
            other.recv(32, socket.MSG_WAITALL)
            other.sendall(answer)
            assert other.recv(64, socket.MSG_WAITALL) == bytes(32)
    master.end()
    assert master.acceptor.unauthenticated == 1


def test_the_masters_own_proof_is_no_nodes(master: Master) -> None:
    """A message from node rank 0 cannot be sent back to it as a proof."""
    with socket.create_connection(("127.0.0.1", master.port)) as stranger:
        nonce = stranger.recv(32, socket.MSG_WAITALL)
        stranger.sendall(bytes(32) + handshake._prove(SECRET, b"node rank 0", nonce + bytes(32)))
        assert stranger.recv(64, socket.MSG_WAITALL) == bytes(32)
    assert master.lines == []


@pytest.mark.parametrize(("answer", "error"), [(bytes(32), WrongSecret), (b"", NotAccepted)])
def test_a_false_master_is_noticed_and_one_that_ends_is_none(
    answer: bytes, error: type[OSError]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as visitor:
                visitor.sendall(bytes(32))
                visitor.recv(64, socket.MSG_WAITALL)
                visitor.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(error):
            visit(listener.getsockname()[1], SECRET)
        thread.join()


def test_the_secret_comes_from_the_environment_or_a_private_file(tmp_path: Path) -> None:
    file = written(tmp_path / "secret", "0123456789abcdef\n")
    file.chmod(0o600)
    expected = Access(b"0123456789abcdef")
    assert read_access({"RUN_SECRET": "0123456789abcdef"}) == expected
    assert read_access({"RUN_SECRET": str(file)}) == expected
    assert read_access({"RUN_SECRET": str(file), "HOSTS": "nonesuch.invalid"}) == expected
    assert read_access({}) == Access()
    assert read_access({"HOSTS": "127.0.0.1,::1"}) == Access(
        addresses=frozenset({"127.0.0.1", "::1"})
    )


@pytest.mark.parametrize(
    ("variables", "cause"),
    [
        ({"RUN_SECRET": "short"}, "RUN_SECRET has 5 characters; give at least 16"),
        ({"RUN_SECRET": "/nonexistent/file"}, "(No such file or directory); correct its path"),
        ({"RUN_SECRET": "~/no/such-secret-file"}, "(No such file or directory); correct its path"),
        ({"RUN_SECRET": "keys/0123456789abcdef"}, "a secret itself must not contain /"),
        ({"RUN_SECRET": "OPEN"}, "other users can read the file in RUN_SECRET; "),
        ({"HOSTS": "nonesuch.invalid"}, "HOSTS names 'nonesuch.invalid', which is unknown"),
        ({"HOSTS": "node..1"}, "HOSTS names 'node..1', which is unknown"),
        ({"HOSTS": "n[1-"}, "unmatched '['"),
    ],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, variables: dict[str, str], cause: str
) -> None:
    (tmp_path / "open").write_text("0123456789abcdef")
    os.chmod(tmp_path / "open", 0o644)
    given = {n: v.replace("OPEN", str(tmp_path / "open")) for n, v in variables.items()}
    with pytest.raises(ValueError) as error:
        read_access(given)
    assert cause in str(error.value) and "\n" not in str(error.value)
    assert "0123456789abcdef" not in str(error.value)


def test_only_the_masters_address_listens() -> None:
    for address, expected in (("127.0.0.1", "127.0.0.1"), ("192.0.2.1", "::"), ("", "::")):
        with open_port(0, address) as listener:
            assert listener.getsockname()[0] == expected


def test_of_two_nodes_on_one_machine_one_alone_is_first() -> None:
    """The first one stays first when it becomes the agent; once it exits, the next can be first."""
    command = [sys.executable, "-c", FIRST, str(free_port())]

    def start() -> tuple[subprocess.Popen[str], str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    (first, is_first), (second, is_second) = start(), start()
    for process in (first, second):
        process.communicate(timeout=PATIENCE_S)
    third, is_third = start()
    third.communicate(timeout=PATIENCE_S)
    assert (is_first, is_second, is_third) == ("True", "False", "True")


def test_too_many_open_files_are_named_once() -> None:
    said: list[str] = []
    with open_port(0, "127.0.0.1") as listener:
        acceptor = Acceptor(listener, Access(SECRET), said.append)
        with socket.create_connection(listener.getsockname()) as visitor:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (visitor.fileno() + 1, hard))
            try:
                assert acceptor.wait(1.0) == acceptor.wait(1.0) == []
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        acceptor.close()
    (text,) = said
    assert "too many open files" in text and text.endswith("[low-nofile]")
