"""A network between a searcher and its database server that can be cut: a TCP port before the server's socket."""

import contextlib
import select
import socket
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


class Proxy:
    """Passes bytes on, until it is cut: then nothing passes, and new connections get no answer.

    Args:
        url: of a PostgreSQL database behind a Unix socket; `self.url` is the same database through the network.
    """

    def __init__(self, url):
        parts = urlsplit(url)
        self._target = str(next(Path(parse_qs(parts.query)["host"][0]).glob(".s.PGSQL.*[0-9]")))
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        self.url = f"postgresql://{parts.username}@127.0.0.1:{port}{parts.path}"
        self._open = threading.Event()
        self._open.set()
        self._sockets = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds):
        """Nothing passes for so long; what was connected is lost then, as a router that restarts loses it."""
        self._open.clear()
        time.sleep(seconds)
        for end in list(self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.set()

    def close(self):
        self._listening.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=[near], daemon=True).start()

    def _serve(self, near):
        self._open.wait()
        with contextlib.suppress(OSError), near, socket.socket(socket.AF_UNIX) as far:
            far.connect(self._target)
            ends = {near: far, far: near}
            self._sockets |= set(ends)
            try:
                while True:
                    for end in select.select(list(ends), [], [])[0]:
                        received = end.recv(1 << 16)
                        self._open.wait()
                        if not received:
                            return
                        ends[end].sendall(received)
            finally:
                self._sockets -= set(ends)
