"""Start the node agent: python scripts/lib/agent.py [torchrun's arguments] SCRIPT [arguments].

The same as `python -m distributed.run`, from any working directory. Our folder is on the path only
while our own modules are loaded; the user's script never sees it.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from launcher.agent.guardian import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
