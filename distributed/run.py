"""The node agent, with torchrun's own arguments: `python -m distributed.run ... SCRIPT`."""

from launcher.agent.supervisor import main
from launcher.interrupt import leave

if __name__ == "__main__":
    leave(main())
