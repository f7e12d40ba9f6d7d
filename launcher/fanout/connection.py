"""One ssh connection to a node: the node's messages, and why a connection failed."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Collection
from dataclasses import replace

from launcher import descriptors
from launcher.fanout.loop import Loop, Show, given_options, ssh_command
from launcher.fanout.nodes import Node, Way, far_side_command
from launcher.plan.own import asked_names
from launcher.plan.pbs import JOB_VARIABLES
from launcher.plan.plan import Plan
from launcher.plan.resume import FORWARDED
from launcher.plan.settings import TABLE, VARIABLES, in_order
from launcher.text import Environ, PlanError
from launcher.wire import limits
from launcher.wire.messages import Fault, Hello, Start

SSH_FAILED = 255  # ssh's exit code if ssh itself failed
CURES = {
    "env-missing": "make this folder, the project and its Python available there at the same paths",
    "host-unreachable": "check that the machine is up",
    "name-unresolved": "correct the name of the node or hosts file, or ~/.ssh/config",
    "ssh-refused": "make sure that 'ssh {node} true' works without a prompt",
}
# What ssh prints if sshd, perhaps a bastion's, has ended the connection before the login (with -q,
# ssh prints nothing) ...
_DROPPED = re.compile(
    rb"Connection (to [^\n]*)?\b(closed|refused|reset|timed)|Broken pipe|MaxStartups|^\s*\Z"
)
# ... and what it prints, perhaps before that, if another try cannot help: the login, the host key
# or the name is wrong.
_REJECTED = re.compile(
    rb"Permission denied( \(|,)|Access denied by|verification failed|authentication fail"
    b"|resolve hostname|not known"
)


class Connection(Way, Node):
    """An ssh connection to one node. ps does not show the variables that it sends."""

    def __init__(
        self,
        loop: Loop,
        node: str,  # its name for ssh
        *,
        connect_s: int,
        token: str,  # `<token>.<node>` begins the node's messages, and marks its processes
        show: Show,
    ) -> None:
        """Start ssh to bash on the node; it gives up after `connect_s` seconds.

        `show` gets all output except messages and, before the agent's start, stderr.
        """
        Node.__init__(self, node)
        self.token = token
        self._fault = "ssh-refused"  # why there was no connection, once ssh has ended
        self._probe: threading.Thread | None = None
        self._words = b""  # stderr before the start; once ssh has ended, also its own messages

        self._log = descriptors.anonymous_file("ssh")  # ssh's own messages; -1: it has ended
        log = f"/proc/{os.getpid()}/fd/{self._log}"
        command = ssh_command(node, loop.environ, connect_s, log)
        Way.__init__(self, loop, command, token.rpartition(".")[0], show)

    def node_of(self, number: int) -> Node:
        return self

    def beat(self) -> None:
        """Send a sign of life, even if someone has stopped ssh."""
        super().beat()
        self.send(b"\n")

    def start(self, request: Start) -> None:
        """Start the node's agent. From now on, stderr is output of the run."""
        if self._log >= 0:
            self._words = b""
        self.note_start()
        self.ask(request)

    def cut_off(self) -> None:
        """End ssh, which may never notice that the node is silent."""
        self.terminate()

    def leave_behind(self) -> None:
        """End a part without which the run continues."""
        super().leave_behind()
        self.close_input()

    @property
    def last_words(self) -> str:
        """The last line that ssh printed, or else the node's last on stderr before the start."""
        lines = self._read_errors().decode(errors="replace").split("\n")
        return next(filter(None, map(str.strip, reversed(lines))), "")

    def _read_errors(self) -> bytes:
        """Return the node's stderr before the start, and ssh's own messages: 4 KiB of each."""
        if self._log < 0:
            return self._words
        size = os.fstat(self._log).st_size
        return self._words + b"\n" + os.pread(self._log, 4096, max(0, size - 4096))

    def reap(self) -> None:
        """Do what Child.reap() does. If ssh has ended, also close the file of its messages."""
        super().reap()
        if self.code is not None:
            self._close_log()

    def disconnect(self) -> None:
        """End ssh, and close all that is open for it now, so that another one may replace it."""
        self.terminate()
        self.close_input()
        for fd in list(self._open):
            self._end(fd)
        self._close_log()

    def _close_log(self) -> None:
        """Close the file of ssh's messages, but keep their end."""
        if self._log >= 0:
            self._words = self._read_errors()
            os.close(self._log)
            self._log = -1

    def read_output(self, data: bytes, is_error: bool) -> None:
        """Do what Way.read_output() does, but keep stderr before the start."""
        if not self.is_started:  # later, output may come from the ranks
            self.note_sign_of_life()
        if is_error and not self.is_started:
            self._words = (self._words + data)[-4096:]
            return
        super().read_output(data, is_error)

    # --- why there is no connection -----------------------------------------------------------

    def start_probe(self) -> None:
        """If ssh has failed without a hello, start a thread that finds out why; do so only once."""
        if not self._probe and self.code == SSH_FAILED and not self.answer(Hello):
            self._probe = threading.Thread(target=self._find_fault, daemon=True)
            self._probe.start()

    @property
    def may_come(self) -> bool:
        """Whether the node may still say hello, or the reason why it did not is still unknown."""
        is_told = self._probe and not self._probe.is_alive()
        return not self.answer(Hello) and self.code in (None, SSH_FAILED) and not is_told

    @property
    def is_dropped(self) -> bool:
        """Whether an overloaded sshd on the way seems to have dropped the connection."""
        has_failed = not self.answer(Hello) and not self.may_come
        if not has_failed or self.code != SSH_FAILED or self._fault != "ssh-refused":
            return False
        errors = self._read_errors()
        return bool(_DROPPED.search(errors)) and not _REJECTED.search(errors)

    def _find_fault(self) -> None:
        """In the thread, set `_fault`, unless ssh does not report its configuration."""
        with contextlib.suppress(subprocess.TimeoutExpired, KeyError, ValueError):
            self._fault = find_fault(self.name, self._loop.environ)

    def explain_silence(self, waited_s: float) -> Fault:
        """Return why the node has not reported its checks, for which it had `waited_s` seconds.

        Waits up to PROBE_S for the reason why there is no connection.
        """
        if self._probe:
            self._probe.join(limits.PROBE_S)
        is_there = self.answer(Hello)
        if self.code is None:
            cause = f"no answer within {waited_s:g} s"
            cure = "check that the machine is up and that ssh logs in without a prompt"
            if is_there:
                cause = "its checks exceed the preflight's time limit"
                cure = "find out what is hanging there"
            return Fault("host-unreachable", cause, f"{cure}, or raise PREFLIGHT_SECONDS")

        fault = self._fault
        if is_there:
            fault = "host-unreachable" if self.code == SSH_FAILED else "env-missing"
        cause = self.last_words or f"ssh to {self.name} ended without a message"
        return Fault(fault, cause, CURES[fault].format(node=self.name))


def find_fault(node: str, environ: Environ) -> str:
    """Return the fault of a node that ssh cannot reach: its name, the network, or its sshd.

    Waits up to PROBE_S for ssh's configuration, then for a connection to sshd. Only a node without
    a jump host or proxy can be tried from here; the fault of others is "ssh-refused". Raises
    TimeoutExpired, KeyError or ValueError if ssh does not report its configuration.
    """
    command = ["ssh", *given_options(environ), "-T", "-G", "--", node]
    result = subprocess.run(command, capture_output=True, timeout=limits.PROBE_S)
    config = dict(line.partition(" ")[::2] for line in os.fsdecode(result.stdout).splitlines())

    is_direct = not config.keys() & {"proxyjump", "proxycommand"}
    if result.returncode == 0 and is_direct:
        try:
            address = (config["hostname"], int(config["port"]))
            socket.create_connection(address, timeout=limits.PROBE_S).close()
        except socket.gaierror:
            return "name-unresolved"
        except ConnectionRefusedError:
            pass  # the machine is there
        except OSError:
            return "host-unreachable"
    return "ssh-refused"  # ssh prints why


# --- what is sent first -------------------------------------------------------------------------


def name_variables(plan: Plan, own: Collection[str]) -> Plan:
    """Return the plan with the names of the variables that are sent, and of those that are not."""
    sent = forwarded_names(plan, own)
    return replace(plan, forwarded=sent, unsent=unsent_names(plan, {*own, *sent}))


def forwarded_names(plan: Plan, own: Collection[str]) -> list[str]:
    """Return the names of the variables to send to the nodes, sorted.

    Omits `own`, which are for this node only, and names that a shell cannot export. Raises
    PlanError if FORWARD_ENV names a variable that is not set.
    """
    environ = plan.environ
    asked = asked_names(environ)
    for name in asked:
        if name not in environ:
            cause = f"FORWARD_ENV names {name!r}, which is not in the environment"
            raise PlanError(f"{cause}; export it, or omit it")

    wanted = {*asked, *plan.activated, *filter(FORWARDED.fullmatch, environ)}
    wanted = (wanted & environ.keys()) - {*own}
    return sorted(name for name in wanted if re.fullmatch(r"[A-Za-z_]\w*", name))


def unsent_names(plan: Plan, known: Collection[str]) -> list[str]:
    """Return the names of variables that a user may expect on the nodes, but that are not sent.

    `known` are those that are sent, or are for this node only.
    A user may expect those that are set here to suit this machine, and those in the text of the
    training script, unless it is train.py. Excluded are HOME, PATH and so on, which each node has,
    and the launchers' own variables, which they send in other ways.
    """
    wanted = {*TABLE["machines"].own}
    script = plan.directory / next((word for word in plan.words if word[:1] != "-"), "")
    if script.is_file() and not plan.is_ours:
        wanted |= {*re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", script.read_text(errors="replace"))}
    ours = VARIABLES.keys() - in_order("resume_over_ssh")
    set_there = {*known, *ours, *TABLE["logins"].own}
    return sorted({name for name in wanted if plan.environ.get(name)} - set_there)


def write_opening(plan: Plan, added: Environ) -> str:
    """Return the commands for a node's bash: say hello, then run the far side in this directory.

    `added` are variables in addition to the forwarded ones, with LAUNCH_TOKEN. The hello has the
    address at which ssh reached the node, the third word of SSH_CONNECTION. Exit code 127 means
    that the node lacks the directory or Python. If a forwarded TMPDIR does not exist there, the
    node's own value is used.
    """
    names = *plan.forwarded, "LAUNCH_JOB", "TMPDIR", *JOB_VARIABLES
    environ = plan.environ
    kept = {name: environ[name] for name in names if name in environ}
    exports = shlex.join(f"{name}={value}" for name, value in {**kept, **added}.items())
    far_side = shlex.join(far_side_command(plan))
    return f"""\
set -- ${{SSH_CONNECTION:-}}
printf '\\002%s {{"Hello":{{"address":"%s"}}}}\\n' {shlex.quote(added["LAUNCH_TOKEN"])} "${{3:-}}"
own=${{TMPDIR-}}
cd -- {shlex.quote(str(plan.directory))} && export {exports} || exit 127
[ -d "${{TMPDIR-}}" ] || TMPDIR=$own
exec {far_side}; exit 127"""
