"""The node agent, with torchrun's own arguments: `python -m distributed.run ... SCRIPT`."""

import sys

from launcher.agent.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
