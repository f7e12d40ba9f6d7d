"""This project as one package: `torch_launch_kit.distributed` is the folder distributed/."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2])]
