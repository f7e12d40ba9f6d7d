"""Start the node agent from any working directory, with torchrun's arguments."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name("start.py")))  # finds our modules

from launcher.agent.supervisor import main  # noqa: E402
from launcher.interrupt import leave  # noqa: E402

if __name__ == "__main__":
    leave(main())
