"""Prove that the ranks of a launch can work together: `python -m distributed.selftest`."""

from distributed.torch import finish
from launcher.selftest.main import main

if __name__ == "__main__":
    finish(main())
