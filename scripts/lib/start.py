"""The program that launch.sh becomes. It finds our own modules from any working directory."""

import os
import signal
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C ends it without a traceback
for name in ("distributed", "launcher"):  # not through sys.path: a user's files may be beside them
    spec = PathFinder.find_spec(name, [str(Path(__file__).parents[2])])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])

if __name__ == "__main__":
    is_named = sys.argv[1].startswith("launcher.")  # a module other than launcher.start
    if sys.argv[1] == "launcher.cli.tools":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a message
    try:
        module = import_module(sys.argv[1] if is_named else "launcher.start")
        import_module("launcher.interrupt").leave(module.main(sys.argv[1 + is_named :], os.environ))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        cure = "set PYTHON or VENV to an environment that has it"
        print(f"{sys.executable} has no torch; {cure} [env-missing]", file=sys.stderr)
        sys.exit(3)
