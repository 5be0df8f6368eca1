"""Nothing in these tests reaches a network; the libraries read the switch when they are imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
