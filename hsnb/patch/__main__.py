"""`python -m hsnb.patch CONNECTION RING ARMED`: the process that writes the spool, started by writer.py with three open files."""

import sys

from hsnb.patch.scribe import main

main(*map(int, sys.argv[1:]))
