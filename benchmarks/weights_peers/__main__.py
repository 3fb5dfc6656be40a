"""`python -m weights_peers prepare|measure ARM JOB`: one arm, once, in this process."""

from __future__ import annotations

import importlib
import sys
from typing import cast

from weights_peers.job import Job, Peer

what, arm, told = sys.argv[1:]
peer = cast(Peer, importlib.import_module(f"weights_peers.{arm}"))
job = Job.read(told)
if what == "prepare":
    peer.prepare(job)
else:
    peer.measure(job).say()
