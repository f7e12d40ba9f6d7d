"""Start a run: what launch.sh hands over to. Our own modules are found in any working directory."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from launcher.start import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
