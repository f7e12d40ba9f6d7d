"""Check from NCCL's own log whether it uses the network that it should (no torch).

If NCCL cannot use InfiniBand, it uses TCP, which is many times slower, and reports that only in its
log. If an InfiniBand port is active, rank 0 writes that log to a file, which no terminal shows. If
the user has enabled NCCL's log, the node's log contains it. Rank 0's log is enough: if the ranks
differ, NCCL fails.
"""

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from distributed.environment import printable
from launcher.preflight import infiniband
from launcher.record.run_folder import RunFolder
from launcher.text import Environ, Say, read_text, short_host_name

_CHOSEN = re.compile(rb"NCCL INFO Using network (\S+)")  # in NCCL 2.10 to 2.32
_REASON = re.compile(
    rb"NCCL (?:INFO|WARN) "
    rb"((?:Failed to open libibverbs|Call to ibv_\w+ failed|NET/IB : (?:No|Unable))[^\r\n]*)"
)
_SWITCHED_OFF = b"NCCL_IB_DISABLE set by environment to 1"  # also if nccl.conf sets it
_MOST = 1 << 20  # bytes of the log to read; NCCL names its network before the first collective
CURE = "give ranks /dev/infiniband and libibverbs, check NCCL_IB_HCA, or set NCCL_PROFILE=ethernet"


@dataclass
class NetworkWatch:
    """Waits for the line in NCCL's log that names the network."""

    log: Path | None = None  # None if there is nothing to wait for
    start: int = 0  # bytes already in the log
    port: str = ""  # a port that NCCL could use
    variables: Environ = field(default_factory=dict)  # make rank 0 write this log

    def poll_nccl_log(self, show: Say) -> None:
        """Once NCCL has chosen a network, stop watching; show a warning if it has chosen TCP.

        There is no warning if the user, or nccl.conf, has disabled InfiniBand.
        """
        if self.log is None:
            return

        text = b""
        with contextlib.suppress(OSError), self.log.open("rb") as log:  # it may not exist yet
            log.seek(self.start)
            text = log.read(_MOST)
        chosen = _CHOSEN.search(text)
        if chosen is None:
            return
        self.log = None
        if chosen[1] != b"Socket" or _SWITCHED_OFF in text:
            return

        reason = _REASON.search(text, 0, chosen.start())
        why = f" ({reason[1].decode(errors='replace')})" if reason else ""
        cause = f"NCCL uses TCP, although port {self.port} is active{printable(why)}"
        show(f"warning: {short_host_name()}: {cause}; {CURE} [nccl-on-sockets]")


def prepare_watch(folder: RunFolder, environ: Environ) -> NetworkWatch:
    """Return a watch that warns if NCCL uses TCP although an InfiniBand port is active.

    It only watches on node rank 0 of several nodes, in a run with a folder, if a port is active. It
    does not if the user has chosen the network, or what NCCL logs: then the log may lack the line.
    Deletes the `nccl.log` of an earlier run.
    """
    # With NCCL_NET, NCCL fails if it cannot use that network.
    is_chosen = "NCCL_NET" in environ or not infiniband.is_wanted(environ)
    active = [port.name for port in infiniband.read_ports() if port.is_active]
    if not active or is_chosen or "NCCL_DEBUG_FILE" in environ:
        return NetworkWatch()

    is_debug = environ.get("LOG_LEVEL", "").upper() == "DEBUG"  # train.py enables NCCL's log
    if is_debug or environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        return NetworkWatch(folder.node_log, folder.node_log.stat().st_size, active[0])
    if any(name.startswith("NCCL_DEBUG") for name in environ) or _is_set_in_file(environ):
        return NetworkWatch()

    log = folder.path / "nccl.log"
    with contextlib.suppress(OSError):
        log.unlink()  # of an earlier run with this id
    name = str(log).replace("%", "%%")  # NCCL replaces %h and %p
    variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV", "NCCL_DEBUG_FILE": name}
    return NetworkWatch(log, 0, active[0], variables)


def _is_set_in_file(environ: Environ) -> bool:
    """Whether NCCL's configuration files set what to log; variables take precedence."""
    names = "/etc/nccl.conf", "~/.nccl.conf", environ.get("NCCL_CONF_FILE", "")
    return any("NCCL_DEBUG" in read_text(Path(os.path.expanduser(name))) for name in names)
