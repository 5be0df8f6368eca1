"""Processes that hang, each in its own way: `python -m tests.runtime.helpers.hanging_process HOW FOLDER RANK`.

Free of torch, so that they start at once.
"""

import ctypes
import logging
import sys
import threading
from pathlib import Path

from tasks.runtime.process.watchdog import Watchdog


def waits_for_the_other():
    threading.Event().wait()


def reads_from_a_disk_that_is_gone():
    threading.Event().wait()


def holds_the_interpreters_lock():
    ctypes.PyDLL(None).pause()


if __name__ == "__main__":
    how, folder, rank = sys.argv[1:]
    logging.basicConfig(format=f"[rank {rank}] %(message)s")
    watchdog = Watchdog(Path(folder), int(rank), 2, 0.2)
    watchdog.start()
    watchdog.expect("step 3")
    globals()[how]()
