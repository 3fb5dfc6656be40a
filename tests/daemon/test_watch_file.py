"""A watched file: what counts as a change, and when it is told."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest

from pagein.daemon.watch_file import SECONDS, Look, changes, look

A, B, C = (Look(modified, 10, 1, 1) for modified in (1, 2, 3))


class Ended(Exception):
    """There is nothing more to see."""


async def each(items: AsyncIterator[None], act: Callable[[], None]) -> None:
    async for _ in items:
        act()


async def told(looks: Iterable[Look | None]) -> list[int]:
    """The numbers of the looks (the first is 0) after which a change was told."""
    left, seen, pauses, found = iter(looks), [0], [], []

    def next_look(path: Path) -> Look | None:
        assert path == Path("x.yaml")
        try:
            result = next(left)
        except StopIteration:
            raise Ended from None
        seen[0] += 1
        return result

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    with pytest.raises(Ended):
        await each(changes(Path("x.yaml"), pause=pause, look=next_look), lambda: found.append(seen[0] - 1))
    assert set(pauses) <= {SECONDS}
    assert len(pauses) == seen[0]  # one before every look but the first, and before the one that ended it
    return found


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([A, A, A], []),
        ([A, B, B, B], [2]),
        ([A, B, C, C, C], [3]),
        ([A, B, B, C, C], [2, 4]),
        ([A, B, A, A], []),
        ([A, None, None, None], []),
        ([A, None, A, A], []),
        ([A, None, None, B, B], [4]),
        ([A, B, None, B, B], [4]),
        ([None, None, A, A, A], [3]),
        ([None, A, None, A, None], []),
    ],
    ids=[
        "nothing changes",
        "a change is told once, when it was seen twice",
        "what goes on changing is not told yet",
        "each change is told",
        "what was undone is no change",
        "a file that vanishes is no change",
        "nor is the same file when it comes back",
        "another in its place is",
        "a gap starts the two looks anew",
        "a file that comes later is a change",
        "what never stays for two looks is not told",
    ],
)
async def test_what_is_told(looks, expected):
    """Two equal looks in a row, other than what was told last, are one change."""
    assert await told(looks) == expected


def replace_by_rename(path: Path) -> None:
    draft = path.with_suffix(".new")
    draft.write_text("budget: 2GiB\n")  # as long as before
    os.utime(draft, ns=(10**18, 10**18))  # and as old
    os.replace(draft, path)


def write_longer(path: Path) -> None:
    path.write_text("budget: 20GiB\n")
    os.utime(path, ns=(10**18, 10**18))


def touch(path: Path) -> None:
    os.utime(path, ns=(10**18 + 1, 10**18 + 1))


@pytest.mark.parametrize("edit", [replace_by_rename, write_longer, touch])
def test_every_way_of_editing_is_seen(tmp_path, edit):
    """A new file of the same size and time under the name, another size, another time: each is another look."""
    path = tmp_path / "pagein.yaml"
    path.write_text("budget: 1GiB\n")
    os.utime(path, ns=(10**18, 10**18))
    before = look(path)
    assert before is not None
    assert look(path) == before
    edit(path)
    assert look(path) not in (before, None)


def test_what_a_link_leads_to_is_watched(tmp_path):
    """Kubernetes mounts a configuration as a link to a folder that is exchanged."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    link = tmp_path / "pagein.yaml"
    link.symlink_to("one")
    before = look(link)
    link.unlink()
    link.symlink_to("two")
    assert look(link) != before


def test_a_file_that_is_not_there_is_none(tmp_path):
    """Absent, or below something that is no folder: nothing is raised."""
    (tmp_path / "file").touch()
    assert look(tmp_path / "absent") is None
    assert look(tmp_path / "file" / "below") is None
