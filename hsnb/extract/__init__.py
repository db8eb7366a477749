"""Extract shards: request, verify, publish, enter, free, for every sample that no ledger has yet.

job.py     one shard on one or more servers, from what is owed to the result
work.py    the samples that are owed: what any server's worker pulls from
worker.py  one server: requests in flight, dumps verified and published; it sees a lost server and starts it again
flow.py    how much may be in flight, and how long the disks last
staging.py dumps verified and staged, in threads or in processes of their own
output.py  files staged, moved to their names and entered, in this order; the only module that calls a trainer's layout
canary.py  one fixed prompt, compared with the first time it was asked
faults.py  what went wrong: the sample, the server or the disk; a server that hangs; its restart
status.py  status.json and the command at the end
"""

from hsnb.extract.flow import SPOOL_SHARE
from hsnb.extract.job import run
from hsnb.extract.output import check_first
from hsnb.params import ExtractParams as Limits

__all__ = ["SPOOL_SHARE", "Limits", "check_first", "run"]
