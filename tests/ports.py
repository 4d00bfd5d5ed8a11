"""Ports for servers of the tests."""

import random
import socket

FIRST, LAST = 15_000, 32_000
"""Below the range from which the kernel hands out ports, of which Ray's own servers take any at any time."""


def free_port() -> int:
    """Gives a loopback port that nobody listens at."""
    for port in random.sample(range(FIRST, LAST), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port among a hundred")
