"""A port of this machine that nothing listens on."""

import socket


def free_port():
    """Free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
