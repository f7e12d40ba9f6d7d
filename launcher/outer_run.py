"""A launch by a rank, such as an evaluation: a separate run that inherits nothing."""

import re

from launcher.text import OwnEnviron

OUTER_TOKEN = "LAUNCH_OUTER"  # marks the inner run's processes, which end with the outer run
_OF_A_RUN = (
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_ADDR|MASTER_PORT|RUN_ID|ENGINE"
    r"|HEARTBEAT_FILE|SNAPSHOT_FILES)\Z|(LAUNCH|PET|TORCHELASTIC)_|SLURM_STEP"
)


def leave_outer_run(environ: OwnEnviron) -> None:
    """Remove the variables of the outer run, if one of its ranks started this process.

    LAUNCH_OUTER gets the outer run's token.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return
    token = environ.get("LAUNCH_TOKEN", "")
    remove_variables(_OF_A_RUN, environ)
    if token:
        environ[OUTER_TOKEN] = token


def remove_variables(beginnings: str, environ: OwnEnviron) -> None:
    """Remove the variables whose names begin as this pattern says."""
    for name in filter(re.compile(beginnings).match, [*environ]):
        del environ[name]
