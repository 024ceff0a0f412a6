"""Lets a watcher outside ask where this process is: a signal writes its stacks to a file.

`faulthandler` does it inside the signal's handler, without the interpreter's lock, so it works
while a thread sits in native code. The signal is for a thread of its own that does nothing else: a
signal to a thread that sleeps or writes would end its sleep, or cut its writing short. spmdrun sets
`SPMD_STACKS` to `signal number:file`; the handler is in place as soon as `import spmd` begins.
Without that variable this module does nothing.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Mapping
from typing import TextIO

VARIABLE = "SPMD_STACKS"

# The handler writes to the file's descriptor, so the file must stay open.
_open_files: list[TextIO] = []


def answer(environ: Mapping[str, str] = os.environ) -> bool:
    """Answer the watcher that `environ` names; returns whether there is one.

    The first line of the file is `listener N`, the number of the thread to send the signal to. A
    request that cannot be met (another platform, a folder that is gone) is passed over: not being
    watched is no reason to fail.
    """
    number, _, path = environ.get(VARIABLE, "").partition(":")
    if not path or not number.isdigit():
        return False
    try:
        file = open(path, "a", encoding="utf-8")
        faulthandler.register(int(number), file=file, all_threads=True, chain=False)
    except (OSError, ValueError, AttributeError, RuntimeError):
        return False
    _open_files.append(file)
    never = threading.Lock()
    never.acquire()
    # Not by `base/background.py`: this module cannot watch its own imports.
    listener = threading.Thread(target=never.acquire, name="spmd-stacks", daemon=True)
    listener.start()
    file.write(f"listener {listener.native_id}\n")
    file.flush()
    return True


answer()
