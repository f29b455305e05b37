"""Measures one TCP connection between two namespaces. Run as a script inside of each; knows nothing of this package.

`receive ADDRESS PORT` prints bits of payload a second, from the first quarter of them to the last; `send ADDRESS PORT
BYTES` sends them once somebody listens.
"""

from __future__ import annotations

import socket
import sys
import time

PATIENCE_S = 20.0
CHUNK = 1 << 20


def receive(address: str, port: int) -> float:
    """Bits a second of what one connection brings, leaving out its first quarter."""
    with socket.create_server((address, port)) as server:
        server.settimeout(PATIENCE_S)
        connection, _ = server.accept()
    marks, total, buffer = [], 0, bytearray(CHUNK)
    with connection:
        while (got := connection.recv_into(buffer)) > 0:
            total += got
            marks.append((time.monotonic(), total))
    first = next(mark for mark in marks if mark[1] >= total / 4)
    last = marks[-1]
    return 8.0 * (last[1] - first[1]) / (last[0] - first[0])


def send(address: str, port: int, nbytes: int) -> None:
    """Sends so many bytes once somebody listens."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=PATIENCE_S)
            break
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
    with connection:
        connection.sendall(bytes(nbytes))


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(sys.argv[2], int(sys.argv[3])))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
