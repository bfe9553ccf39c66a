"""Who does something, for the audit."""

from __future__ import annotations

import getpass
import os
import socket


def whoami() -> str:
    """``user@host`` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as containers have
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
