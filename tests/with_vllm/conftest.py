"""Settings for vLLM on a CPU, made before anything imports it, and a record of the hosts that it contacts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # compiling a helper takes longer than these tests
# The hub must not be contacted even though this would allow it.
os.environ.setdefault("HF_HUB_OFFLINE", "0")


def is_local(host: Any) -> bool:
    """Returns whether the host is this machine."""
    own = {None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()}
    return host in own or str(host).startswith("127.")


@pytest.fixture(scope="session", autouse=True)
def hosts() -> Iterator[list[str]]:
    """The hosts that Python code looked up or connected to, except this machine."""
    found: list[str] = []
    find, connect = socket.getaddrinfo, socket.socket.connect

    def watched_find(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_local(host):
            found.append(str(host))
        return find(host, *args, **kwargs)

    def watched_connect(self: socket.socket, address: Any) -> None:
        # A datagram socket sends nothing when it is connected: vLLM learns its own address that way.
        if self.family != socket.AF_UNIX and self.type != socket.SOCK_DGRAM and not is_local(address[0]):
            found.append(str(address[0]))
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", watched_find)
        patch.setattr(socket.socket, "connect", watched_connect)
        yield found
