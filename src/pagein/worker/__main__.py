"""``python -m pagein.worker``: started by the daemon, one process per model."""

from __future__ import annotations

import os
import select
import signal
import sys

from pagein.engines.death import die_with_parent, end_descendants
from pagein.protocol import Hello
from pagein.worker import watch
from pagein.worker.handshake import Control, inherited_output, read_spec
from pagein.worker.run import Stopping, run

_STDIN = 0


def main() -> int:
    """Read the spec, serve, and return the exit code."""
    # The daemon may be dead already: then standard input is at its end, which is noticed below.
    die_with_parent(signal.SIGKILL)
    try:
        control, output = Control.inherited(), inherited_output()
        _use_the_wait(output is not None)
        spec = read_spec(_STDIN)
        control.send(Hello(spec.token, os.getpid()))
    except (ValueError, EOFError, OSError) as error:
        print(f"pagein: this worker cannot start: {error}", file=sys.stderr)
        return 2
    orphan = None
    if spec.adopt_wait > 0 and output is not None:
        from pagein.worker.orphan import Orphan  # only here: a worker that ends with its daemon does not pay for it

        orphan = Orphan(spec, control, output)
    watch.watch(_STDIN, orphan)
    try:
        return run(spec, control, orphan.prepare if orphan is not None else None)
    except (Stopping, OSError) as error:  # stopped while stopping, or the daemon is gone
        return 0 if isinstance(error, Stopping) else 1


def _use_the_wait(adoptable: bool) -> None:
    """A spare worker that nobody needs yet imports what starting a server program takes."""
    if select.select([_STDIN], [], [], 0)[0]:
        return
    import pagein.engines.llama_cpp

    if adoptable:
        import pagein.worker.orphan  # noqa: F401


def _leave(code: int) -> None:
    """End without the interpreter's clean-up: threads of an engine may run on, and memory returns all the same."""
    end_descendants()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
