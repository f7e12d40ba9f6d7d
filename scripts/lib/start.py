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
    is_tool = sys.argv[1] == "launcher.cli.tools"
    if is_tool:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a message
    # The other modules are programs of our own, which mend their streams themselves.
    stdout = None if is_named and not is_tool else import_module("launcher.text").mend_streams()
    try:
        module = import_module(sys.argv[1] if is_named else "launcher.start")
        code = module.main(sys.argv[1 + is_named :], os.environ)
        if stdout is not None and stdout.lost:
            program = os.path.basename(sys.argv[2])
            print(f"{program}: cannot write the output ({stdout.lost})", file=sys.stderr)
            code = code or 1
        import_module("launcher.interrupt").leave(code)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        cure = "set PYTHON or VENV to an environment that has it"
        print(f"{sys.executable} has no torch; {cure} [env-missing]", file=sys.stderr)
        sys.exit(3)
