"""The command for checkpoints: `python -m distributed.checkpoint ls|verify|export|hash ...`."""

import sys
from importlib import import_module

if __name__ == "__main__":
    project = __spec__.parent.removesuffix("distributed.checkpoint")  # installed: its package
    sys.exit(import_module(f"{project}launcher.cli.checkpoint").main(sys.argv[1:]))
