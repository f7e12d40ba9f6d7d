"""Starts the ranks of a run on every node, watches them, and reports how the run ended."""

import sys

if __name__ != "launcher":  # installed: prefer our folders to packages of the same name
    sys.path.insert(0, f"{__path__[0]}/..")
