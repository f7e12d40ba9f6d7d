"""Starts the ranks of a run on every node, watches them, and reports how it ended."""

import sys

if __name__ != "launcher":  # installed: a tool imports these wings, not a package of the same name
    sys.path.insert(0, f"{__path__[0]}/..")
