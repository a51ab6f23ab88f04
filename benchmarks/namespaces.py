"""Hosts on one machine: network namespaces that a bridge joins, with a name, an address and a shaped link of their own.

Processes in different ones reach each other over the bridge alone. It takes Linux, root and `iproute2`.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

NET, UTS = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
INTERFACE = "eth0"


@dataclass(frozen=True, slots=True)
class Host:
    """One of them; it can be sent to another process."""

    name: str
    address: str

    def enter(self) -> None:
        """Let this thread, and those that it starts, be on this host."""
        with Path(f"/run/netns/{self.name}").open() as namespace:
            _require(_LIBC.setns(namespace.fileno(), NET), f"enter {self.name}")
        _require(_LIBC.unshare(UTS), "get a host name of its own")
        socket.sethostname(self.name)

    def sent(self) -> int:
        """Bytes that it has sent over its link."""
        shown = _run("ip", "-n", self.name, "-s", "-j", "link", "show", "dev", INTERFACE)
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


class Hosts:
    """A context manager: inside there are so many hosts, each of which sends at most `rate` (`tc`'s, as in 200mbit)."""

    def __init__(self, count: int, rate: str) -> None:
        self.rate, self._bridge = rate, f"zgb{os.getpid() % 10**6}"
        self.hosts = [Host(f"{self._bridge}h{i}", f"10.213.0.{i + 1}") for i in range(count)]

    def __enter__(self) -> list[Host]:
        try:
            _run("ip", "link", "add", "name", self._bridge, "type", "bridge")
            _run("ip", "link", "set", self._bridge, "up")
            for number, host in enumerate(self.hosts):
                self._connect(number, host)
        except BaseException:
            self._remove()
            raise
        return self.hosts

    def _connect(self, number: int, host: Host) -> None:
        port, inside = self._port(number), ("ip", "-n", host.name)
        _run("ip", "netns", "add", host.name)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host.name)
        _run("ip", "link", "set", port, "master", self._bridge, "up")
        _run(*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _run(*inside, "link", "set", device, "up")
        shape = ("tbf", "rate", self.rate, "burst", "128kb", "latency", "50ms")
        _run("tc", "-n", host.name, "qdisc", "add", "dev", INTERFACE, "root", *shape)

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def _remove(self) -> None:
        # All that was made of it. By themselves links go some time after their namespace.
        for number, host in enumerate(self.hosts):
            subprocess.run(["ip", "link", "del", self._port(number)], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    def _port(self, number: int) -> str:
        return f"{self._bridge}p{number}"


_LIBC = ctypes.CDLL(None, use_errno=True)


def _require(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"cannot {what}: {os.strerror(ctypes.get_errno())}")


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is missing\n\nhint: apt-get install iproute2") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(command)}: {error.stderr.strip()}\n\nhint: hosts need root") from None
