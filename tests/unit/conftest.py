"""What holds for all tests."""

import signal

# A runner in the background ignores it, and all that the tests start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
