"""From a worker's output into the model_log."""

from __future__ import annotations

import asyncio
import os
import threading

from pagein.supervisor.log_pipe import LogPipe


async def test_everything_that_was_written_arrives(model_log):
    """Draining reads to the end, also what is written in the last moment."""
    pipe, end = await LogPipe.open()
    pipe.attach(model_log)
    os.write(end, b"first\n")
    os.write(end, b"last words")
    os.close(end)
    await pipe.drain(timeout=30)
    model_log.close()
    assert model_log.path.read_bytes() == b"first\nlast words\n"


async def test_a_flood_neither_blocks_nor_fills_the_disk(model_log):
    """Ten times the log's size goes through, the loop serves others meanwhile, and the files stay bounded."""
    pipe, end = await LogPipe.open()
    pipe.attach(model_log)
    line = b"x" * 1023 + b"\n"

    def flood() -> None:
        with os.fdopen(end, "wb") as file:
            for _ in range(3 * 1024):
                file.write(line)

    thread = threading.Thread(target=flood)
    thread.start()
    turns = 0
    while thread.is_alive():
        await asyncio.sleep(0)
        turns += 1
    await pipe.drain(timeout=30)
    model_log.close()
    assert turns > 10
    assert sum(path.stat().st_size for path in model_log.path.parent.iterdir()) <= 3 * 1024 * 1024


async def test_a_helper_that_keeps_the_pipe_open_does_not_hold_up_the_end(model_log):
    """Draining has a bound."""
    pipe, end = await LogPipe.open()
    pipe.attach(model_log)
    os.write(end, b"something\n")
    await pipe.drain(timeout=0.05)
    assert model_log.tail() == ["something"]
    os.close(end)


async def test_what_was_printed_before_there_was_a_log_comes_first(model_log):
    """A worker that waits for its model may print; the model's log gets it once it belongs to that model."""
    pipe, end = await LogPipe.open()
    os.write(end, b"early\n")
    while not pipe._early:
        await asyncio.sleep(0)
    pipe.attach(model_log)
    os.write(end, b"late\n")
    os.close(end)
    await pipe.drain(timeout=30)
    model_log.close()
    assert model_log.path.read_bytes() == b"early\nlate\n"
