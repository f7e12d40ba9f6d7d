"""Start the node agent: python scripts/lib/agent.py [torchrun's arguments] SCRIPT [arguments].

It is `python -m distributed.run` from any working directory; neither side sees the other's modules.
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name("start.py")))  # imports our modules

from launcher.agent.supervisor import main  # noqa: E402
from launcher.interrupt import leave  # noqa: E402

if __name__ == "__main__":
    leave(main())
