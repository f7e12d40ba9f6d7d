"""A launch by a rank, of an evaluation say: a run of its own, with nothing of the outer run's."""

from __future__ import annotations

from collections.abc import MutableMapping

OUTER_TOKEN = "LAUNCH_OUTER"  # marks the inner run's processes, which end with the outer run
_NAMES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RUN_ID"),
    *("ENGINE", "HEARTBEAT_FILE", "SNAPSHOT_FILES"),
}
_PREFIXES = ("LAUNCH_", "PET_", "SLURM_STEP", "TORCHELASTIC_")


def leave_outer_run(environ: MutableMapping[str, str]) -> None:
    """Remove what identifies the run, if this process was started by one of its ranks."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return
    token = environ.get("LAUNCH_TOKEN", "")
    for name in [*environ]:
        if name in _NAMES or name.startswith(_PREFIXES):
            del environ[name]
    if token:
        environ[OUTER_TOKEN] = token
