"""`python -m hsnb.extract PARAMS --run NAME --shard 4`: one shard without a notebook, from prepared data; for scripts and clusters.

The exit status is 0 when the shard is whole, 1 when a sample is owed, 2 when it was refused or stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from types import SimpleNamespace

from hsnb import extract
from hsnb.data import load_prepared
from hsnb.errors import HsnbError
from hsnb.paths import run_dir
from hsnb.session import close_server, deployment_of, open_servers


def main(argv: Sequence[str] | None = None) -> int:
    """Run one shard and print its result as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m hsnb.extract", description=__doc__.splitlines()[0])
    parser.add_argument("params", help="a params/*.yaml")
    parser.add_argument("--run", default="demo", help="outputs/RUN/data, as hsnb prepare wrote it")
    parser.add_argument("--server", default="", metavar="URL[,URL]", help="running servers; without it one is started")
    parser.add_argument("--spool", default="", metavar="DIR[,DIR]", help="their spools (default: /dev/shm/hsnb/{port})")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--num-shards", type=int, default=16)
    parser.add_argument("--layout", default="speculators")
    parser.add_argument("--in-flight-tokens", type=int, default=0)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("hsnb").setLevel(logging.INFO)
    p = SimpleNamespace(params=args.params, server_url=args.server, spool=args.spool, run=args.run)
    try:
        deployment = deployment_of(p)
        data = load_prepared(run_dir(args.run) / "data")
        result = extract.run(
            open_servers(p, deployment, prove=True), data, shard=args.shard, num_shards=args.num_shards, layout=args.layout,
            in_flight_tokens=args.in_flight_tokens, limits=deployment.extract,
        )  # fmt: skip
        result.save(run_dir(args.run))
    except HsnbError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        close_server()
    print(json.dumps(result.as_dict()))
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
