"""The folder of a run, `<log dir>/<run id>/`, and the links beside it that lead to it."""

import os
from pathlib import Path
from typing import final

from distributed.lock import update_link
from launcher.record.run_json import job_start, writing_to
from launcher.text import Environ, open_own


@final
class RunFolder:
    """Paths of one run. Their permissions follow the user's umask."""

    def __init__(self, root: Path, run_id: str, node_rank: int, environ: Environ) -> None:
        self.root = root  # the log directory, which holds all runs
        self.path = root / run_id
        self.node_log = self.path / f"node_{node_rank}.log"
        self.failures = self.path / "failures"
        if start := job_start(environ):  # processes of an earlier start may still be running
            self.failures /= f"start_{start}"

    def create(self) -> None:
        """Create the folders, the node's log, and the links `latest` and `node_<rank>.log`.

        Links of the same names that lead elsewhere belong to the user and are kept. Raises Refused
        if the folder cannot be written to.
        """
        with writing_to(self.path):
            self.failures.mkdir(parents=True, exist_ok=True)
            open_own(self.node_log, "ab").close()
            log = self.node_log.name
            for name, target in ("latest", self.path.name), (log, f"{self.path.name}/{log}"):
                if not _is_users(self.root / name):
                    update_link(self.root / name, target)


def _is_users(link: Path) -> bool:
    """Return whether a link leads to something other than a run's folder."""
    if not link.is_symlink():
        return False
    target = link.parent / Path(os.readlink(link)).parts[0]
    return target.exists() and not (target / "failures").is_dir()
