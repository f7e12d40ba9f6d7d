"""The git commit of what a run trains."""

import subprocess


def git_commit() -> str | None:
    """Return the working directory's commit, plus `+` if files have changed; None outside git.

    Also None if git is missing or takes longer than 5 s.
    """
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            capture_output=True,
            errors="replace",
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
