"""For every test and the processes it starts; libraries read these when they are imported."""

import os

# Nothing reaches a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests run side by side: threads that wait for each other on a busy core cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
