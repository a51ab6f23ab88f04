"""A link between hosts, for tests: a TCP proxy that can stop to forward without closing anything."""

from __future__ import annotations

import socket
import threading


class Link:
    """Forwards connections to ``127.0.0.1:target`` from :attr:`port`, until it is cut."""

    def __init__(self, target: int) -> None:
        self.target, self._up = target, threading.Event()
        self._up.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Forward nothing more; both ends believe that they are connected."""
        self._up.clear()

    def mend(self) -> None:
        """Go on forwarding."""
        self._up.set()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            far = socket.create_connection(("127.0.0.1", self.target))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._up.wait()
                sink.sendall(data)
        except OSError:
            pass  # an end closed its socket
        sink.close()
