"""What train.py uses: settings, batches, progress, resuming, and the tasks it can train."""

import sys

if __name__ != "training":  # installed: use these packages, not others of the same name
    sys.path.insert(0, f"{__path__[0]}/..")
