"""Run a command in which some system calls fail, as in sandboxes and on odd file systems.

    python refusing.py symlink=EPERM,prctl:36=EINVAL COMMAND...

A call can be limited to one value of its argument that selects an operation (see OPERATION). A
filter of the kernel does it (seccomp(2)); the command and all its processes keep the filter.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

MACHINE = "x86_64"  # whose numbers these are
NUMBERS = {
    **{"ioctl": 16, "socket": 41, "bind": 49, "setsockopt": 54, "getsockopt": 55, "fcntl": 72},
    **{"flock": 73, "fsync": 74, "symlink": 88, "chmod": 90, "statfs": 137, "fstatfs": 138},
    **{"setpriority": 141, "prctl": 157, "sched_setaffinity": 203, "sched_getaffinity": 204},
    **{"fadvise64": 221, "clock_gettime": 228, "tgkill": 234, "symlinkat": 266, "prlimit64": 302},
    **{"memfd_create": 319, "ptrace": 101, "kill": 62, "link": 86, "getpriority": 140},
    **{"setitimer": 38, "setsid": 112, "sigaltstack": 131},
}
# The position of the argument that selects what the call does.
OPERATION = {"ioctl": 1, "socket": 0, "setsockopt": 2, "getsockopt": 2, "fcntl": 1, "prctl": 0}
OPERATION |= {"clock_gettime": 0}

# classic BPF (linux/filter.h): load a word, jump if equal, return
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000
NUMBER_AT, ARGUMENTS_AT = 0, 16  # in struct seccomp_data


def rules_of(text: str) -> list[bytes]:
    """Return the filter's instructions that make one call fail."""
    call, _, code = text.partition("=")
    name, _, operation = call.partition(":")
    found = [(NUMBER_AT, NUMBERS[name])]
    if operation:
        found.append((ARGUMENTS_AT + 8 * OPERATION[name], int(operation, 0)))
    rules = []
    for left, (place, value) in zip(range(len(found), 0, -1), found, strict=True):
        rules.append(struct.pack("HBBI", LOAD, 0, 0, place))
        rules.append(struct.pack("HBBI", JUMP_IF_EQUAL, 0, 2 * left - 1, value))
    return [*rules, struct.pack("HBBI", RETURN, 0, 0, FAIL_WITH | getattr(errno, code))]


def refuse(calls: str) -> None:
    """Install the filter in this process; it cannot be removed."""
    assert platform.machine() == MACHINE
    rules = [rule for text in calls.split(",") for rule in rules_of(text)]
    program = b"".join([*rules, struct.pack("HBBI", RETURN, 0, 0, ALLOW)])
    buffer = ctypes.create_string_buffer(program)
    head = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, more in ((38, 1, 0), (22, 2, ctypes.addressof(head))):  # PR_SET_SECCOMP
        if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_void_p(more), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
