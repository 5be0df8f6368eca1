"""Two processes of an elastic agent, of which one dies once; after the restart it is back before the other."""

import os
import sys

from tasks.runtime.process.ranks import Processes

if __name__ == "__main__":
    processes = Processes.from_environment()
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    if restarted:
        # Opening a pipe waits for the other end: the main process joins when the other one is about to.
        os.close(os.open(sys.argv[1], os.O_RDONLY if processes.is_main else os.O_WRONLY))
    processes.connect()
    processes.barrier()
    if not restarted and not processes.is_main:
        os._exit(1)
    processes.barrier()
    print("both are back" if processes.is_main else "")
    processes.disconnect()
