"""A folder at the end of the ranks' PYTHONPATH; scripts import the helper from it (no torch).

    from torch_launch_kit.distributed import torch as helper

The same line works after `pip install`, because the installed package has the same name.
"""

import os

from launcher.text import Environ


def search_path(environ: Environ) -> str:
    """Return a PYTHONPATH with this folder last, so that it shadows none of the user's modules."""
    return os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), *__path__]))
