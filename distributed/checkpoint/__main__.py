"""The command for checkpoints: `python -m distributed.checkpoint ls|verify|export|hash ...`."""

import sys
from importlib import import_module

if __name__ == "__main__":
    project = str(__package__).removesuffix("distributed.checkpoint")  # installed: in a package
    sys.exit(import_module(f"{project}launcher.cli.checkpoint").main(sys.argv[1:]))
