"""A folder at the end of the ranks' path, from which scripts import the helper (no torch).

    from torch_launch_kit.distributed import torch as helper

The same line works after `pip install`, because the package has that name.
"""

from __future__ import annotations

import os

from launcher.text import Environ


def search_path(environ: Environ) -> str:
    """Return a PYTHONPATH with this folder after the user's own: it shadows none of their names."""
    return os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), *__path__]))
