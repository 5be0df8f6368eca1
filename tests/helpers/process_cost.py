"""What Python does in a process of tests beside the tests: its garbage collector, and the end."""

import atexit
import gc
import os
import sys
import threading


def collect_seldom() -> None:
    """Collect garbage after 50,000 new objects, where Python does after 700, which takes a seventh of a short run.

    What is in no cycle goes at once as ever; the models of tests are small.
    """
    gc.set_threshold(50_000, 10, 10)


def leave(code: int) -> None:
    """End this process as the interpreter does, but let go of no object: the system takes its memory at once.

    With torch and transformers loaded, that takes six seconds, and in a fork, which copies all memory whose references
    it counts down, most of one.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
