"""The way to Ray: the only module that imports it, and only when it is called. Read with Ray 2.60."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from hsnb.errors import ParamsError, ServerError
from hsnb.server.supervisor import family

CONNECT_S = 10.0  # for the head to take a connection
REACH_S = 30.0  # for a node that cannot be reached to be reachable again, or to be taken for lost by Ray
AGAIN = ("news", "stop")  # what may be asked again when it is not known whether it was heard
ANSWER_S = 300.0  # for a part of a server to answer: a node that Ray takes for lost is told of far sooner


def connect(address: str):
    """Return the module ray, connected. Raises ParamsError without the package or a usable address, ServerError without a cluster."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ParamsError(
            got=f"--ray without Ray ({error})", expected="the extra ray", likely="an environment for one machine", next="make setup-ray"
        ) from error
    try:
        listens(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address)
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ServerError(
            got=f"--ray {address}: {' '.join(str(error).split())[:300]}",
            expected="a Ray cluster that answers",
            likely="ray start was not run here, or the head is gone",
            next="ray start --head, or one of deploy/",
        ) from error
    return ray


def listens(address: str) -> None:
    """Raise ParamsError unless an address is HOST:PORT ("": Ray finds it), OSError when nothing listens there: Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if address and (not host or not port.isdecimal() or "/" in host):
        raise ParamsError(got=f"--ray {address}", expected="auto, or HOST:PORT of the head", likely="a typo", next="--ray auto")
    if address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


class Remote:
    """A Ray actor as a plain object: a call waits for its answer, and raises what the method raised, or Ray's error when it is gone."""

    def __init__(self, actor: Any):
        self._actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import ray

        def call(*given: Any) -> Any:
            until = time.monotonic() + REACH_S
            while True:
                try:
                    return ray.get(getattr(self._actor, name).remote(*given), timeout=ANSWER_S)
                except ray.exceptions.ActorUnavailableError:
                    if name not in AGAIN or time.monotonic() > until:
                        raise
                    time.sleep(1)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, Exception) else error from None

        return call


def meeting_place() -> str:
    """Return HOST:PORT of this node as the other nodes reach it, with a port that is free now."""
    import ray

    host = ray.util.get_node_ip_address()
    return f"[{host}]:{free_port(host)}" if ":" in host else f"{host}:{free_port(host)}"


def free_port(host: str) -> int:
    """Return a port of `host`, one of this machine's addresses, that nothing listens on now."""
    with socket.socket(family(host)) as free:
        free.bind((host, 0))
        return free.getsockname()[1]
