"""Start the node agent: python scripts/lib/agent.py [torchrun's arguments] SCRIPT [arguments].

The same as `python -m distributed.run`, from any working directory. The user's script never sees
our modules, and our modules none of the user's.
"""

import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C ends it without a traceback
for name in ("distributed", "launcher"):  # not through sys.path: a user's files may lie beside them
    spec = PathFinder.find_spec(name, [str(Path(__file__).resolve().parents[2])])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])

from launcher.agent.supervisor import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
