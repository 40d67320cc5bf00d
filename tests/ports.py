"""Ports on loopback that nobody listens on."""

import random
import socket


def free_port():
    """One below those that Linux gives to connections, which any process may be given before it is used."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
