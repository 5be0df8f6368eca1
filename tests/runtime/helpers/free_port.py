"""A port of this machine that nothing listens on."""

import os
import random
import socket

# Below those of outgoing connections, which could take a port between the choice and its use.
PORTS = range(12000, 32000)


def free_port():
    """Free at this moment, and not the choice of a process that asks at the same time."""
    choices = random.Random(os.urandom(8))
    while True:
        port = choices.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
