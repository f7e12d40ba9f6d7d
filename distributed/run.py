"""The node agent, with torchrun's own arguments: `python -m distributed.run ... SCRIPT`."""

import sys

from launcher.agent.guardian import main

if __name__ == "__main__":
    sys.exit(main())
