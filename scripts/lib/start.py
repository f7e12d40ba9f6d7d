"""Start a run: what launch.sh hands over to. Our own modules are found in any working directory."""

import signal
import sys
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C ends it without a traceback
sys.path[0] = str(Path(__file__).resolve().parents[2])

from launcher.start import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
