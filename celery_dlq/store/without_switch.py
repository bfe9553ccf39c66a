"""Writes of a pool of threads, after which no other thread goes first.

Python's own let go of its lock. Each other thread would then take its turn at every start, to find
the lock of the store's connection taken: both wake each other up, for half of a no-op's CPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from ctypes import PyDLL, c_char_p, c_int, c_size_t, c_ssize_t

_send = PyDLL(None).send
_send.argtypes, _send.restype = [c_int, c_char_p, c_size_t, c_int], c_ssize_t


def writev(fd: int, data: Sequence[bytes]) -> int:
    """Write to a socket as `os.writev` does, and keep Python's lock.

    It does not wait for the socket either: what it cannot write is left to `os.writev`.

    Source: https://docs.python.org/3/library/ctypes.html#ctypes.PyDLL
    """
    (text,) = data
    sent = int(_send(fd, text, len(text), socket.MSG_DONTWAIT))
    return sent if sent >= 0 else os.writev(fd, data)
