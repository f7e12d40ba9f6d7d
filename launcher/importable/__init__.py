"""A folder for the end of the ranks' path: by one name a script imports the helper (no torch).

    from torch_launch_kit.distributed import torch as helper

The same line works where pip has installed this project, which gives it that name.
"""

from __future__ import annotations

import os

from launcher.text import Environ


def search_path(environ: Environ) -> str:
    """Return a PYTHONPATH with this folder after the user's own: it shadows none of their names."""
    return os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), *__path__]))
