"""The daemon's end of the control pipe."""

from __future__ import annotations

import asyncio
import os

import pytest

from pagein.protocol import Hello, encode
from pagein.supervisor.control import ControlPipe


@pytest.fixture
async def pipe():
    """A control pipe for the token ``right``, and the worker's end of it."""
    control, end = await ControlPipe.open()
    control.expect("right")
    yield control, end
    control.close()


async def test_messages_arrive_in_order_and_the_end_is_none(pipe):
    """The end of the pipe tells that the worker is gone."""
    control, end = pipe
    os.write(end, encode(Hello("right", 1)) + encode(Hello("right", 2)))
    os.close(end)
    assert [await control.receive(), await control.receive(), await control.receive()] == [
        Hello("right", 1),
        Hello("right", 2),
        None,
    ]


@pytest.mark.parametrize("line", [encode(Hello("wrong", 1)), b"nonsense\n", b"{}\n", b"x" * 200_000 + b"\n"])
async def test_anything_else_is_refused(pipe, line):
    """A wrong token, nonsense, and a line without end are no messages."""
    control, end = pipe
    writing = asyncio.create_task(asyncio.to_thread(os.write, end, line))  # a pipe holds 64 KiB
    with pytest.raises(ValueError, match="worker message"):
        await control.receive()
    control.close()
    await asyncio.wait({writing})
    os.close(end)


async def test_nothing_is_accepted_before_a_token_is_expected():
    """A worker that waits for its spec has nothing to say."""
    control, end = await ControlPipe.open()
    os.write(end, encode(Hello("right", 1)))
    os.close(end)
    with pytest.raises(ValueError, match="without the token"):
        await control.receive()
    control.close()
