"""Attach to a server that already runs, after proving that it is one hsnb may use."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

from hsnb import paths
from hsnb.errors import ParamsError, ServerError
from hsnb.params import Deployment
from hsnb.server.armed_check import check_armed, check_info, read_or_refuse
from hsnb.server.client import Client
from hsnb.server.far import read_far
from hsnb.server.flags import check_version
from hsnb.server.ready import pick_info
from hsnb.server.server import Server
from hsnb.server.state import read_state, state_file


def attach(url: str, spool: str = "", expect: Deployment | None = None, capture: bool = True) -> Server:
    """Return the running server at `url`. Its `stop` does nothing: the server is not ours to end.

    `spool` empty: the one that hsnb wrote down, else /dev/shm/hsnb/{port}. With `expect` the boundaries, the final state and
    the format must be the deployment's. `capture` False only needs a server that answers.

    Raises ServerError for one that does not answer, is on another host, too old, or runs in a mode that breaks a capture;
    CaptureError for one without the plug-in, of another hsnb, or with other settings.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname or "", parts.port or 80
    except ValueError:
        host, port = "", 0
    if not host or parts.scheme not in ("http", "https"):
        raise ParamsError(
            got=f"server_url is {url!r}", expected="http://HOST:PORT", likely="a typo", next="-p server_url http://127.0.0.1:30000"
        )
    url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if capture and not is_local(host):
        raise ServerError(
            got=f"the server at {url} is on another host",
            expected="a server on this one: its states lie in a folder of its own host",
            likely="a URL of the cluster",
            next="run hsnb on that host (hsnb run --ray starts one there)",
        )
    with Client(url, timeout_s=30) as client:
        info = client.server_info()
    version = str(info.get("version", "0"))
    check_version(version)
    known = read_state(state_file(port))
    folder = Path(spool or (known.spool if known and known.spool else paths.default_spool(port))).expanduser()
    armed = []
    if capture:
        check_info(info)
        armed = read_or_refuse(folder, url=url)
        check_armed(armed, ranks=int(info.get("tp_size") or 1), expect=expect, port=port, far=read_far(folder))
    return Server(
        url=url,
        host=host,
        port=port,
        spool=folder,
        pid=known.pid if known else 0,
        log=Path(known.log) if known else None,
        info=pick_info(info),
        sglang_version=version,
        startup_seconds=0.0,
        deployment=expect,
        armed=armed,
        capture=capture,
        detached=bool(known and known.detached),
        attached=True,
    )


def is_local(host: str) -> bool:
    """Say whether `host` is this machine: only an address of one's own can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServerError(
            got=f"host {host!r}: {error}", expected="a host that can be resolved", likely="a typo in server_url", next="mend server_url"
        ) from error
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False
