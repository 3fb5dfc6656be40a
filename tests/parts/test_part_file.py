"""Reading a part that is as it should be; and disks that are slow, fail, or change under the reader."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import random
import tempfile
import threading
import time

import pytest

from pagein.errors import PartRefused
from pagein.memory.buffers import Buffer
from pagein.parts.files import part_file, reading
from pagein.parts.files.audit import LOADED
from pagein.parts.files.part_file import Limits
from pagein.parts.files.proven import Proven
from pagein.parts.files.reading import CHUNK, Reading, read_from_file
from tests.parts.bench import Bench
from tests.parts.build import TENSORS, fill, split

needs_xxhash = pytest.mark.skipif(not Proven.available(), reason="needs xxhash")


@pytest.fixture
def bench(tmp_path):
    """The small model's split."""
    return Bench(tmp_path, split(tmp_path))


def test_a_sound_part_is_read(bench):
    """Each tensor's bytes are its own, aligned, from one buffer; the caller writes the one line."""
    loaded = bench.read("TAG", "backbone")
    assert list(loaded.tensors) == ["body.weight", "embed.weight", "body.bias"]
    for name, place in loaded.tensors.items():
        assert (place.dtype, place.shape) == TENSORS[name]
        assert place.offset % 64 == 0
        assert bytes(loaded.view(name)) == fill(name, place.nbytes)
    assert bench.room.held == loaded.nbytes == bench.bytes_read == bench.file("backbone").stat().st_size
    assert bench.lines == []
    line = loaded.line(LOADED)
    assert (line.who, line.task, line.part, line.result) == ("somebody", "tag", "backbone", LOADED)
    assert line.bytes == loaded.nbytes
    loaded.close()
    loaded.close()
    assert bench.room.held == 0


def test_an_operator_s_load_names_no_task(bench):
    """Warm-up loads a part for no task."""
    loaded = bench.read(None, "Tag")
    assert loaded.part == "tag"
    assert loaded.line(LOADED).task is None
    loaded.close()


def test_large_files_come_in_pieces(bench, tmp_path):
    """A read gives what it gives; the digest is of all bytes all the same."""
    sizes = []

    def little(descriptor, into, offset):
        sizes.append(len(into))
        return read_from_file(descriptor, into[:50_001], offset)

    bench.options["read"] = little
    bench.read("tag", "backbone").close()
    assert len(sizes) > 20
    assert max(sizes) <= CHUNK


def big_file(tmp_path, monkeypatch):
    """A part of many chunks, which several threads read."""
    monkeypatch.setattr(reading, "CHUNK", 4096)
    return Bench(tmp_path, split(tmp_path))


def test_chunks_that_land_in_any_order_are_hashed_in_theirs(tmp_path, monkeypatch):
    """Several threads read; the first chunk comes last, and the bytes are what the plan says."""
    bench = big_file(tmp_path, monkeypatch)
    whole = bench.file("backbone").stat().st_size
    assert whole > 4 * 4096
    came, others = [], threading.Event()

    def first_last(descriptor, into, offset):
        if offset == 0:
            assert others.wait(30)
        got = read_from_file(descriptor, into, offset)
        came.append(offset)
        if len(came) == -(-whole // 4096) - 1:
            others.set()
        return got

    bench.options["read"] = first_last
    loaded = bench.read("tag", "backbone")
    assert came[-1] == 0
    assert bytes(loaded.view("embed.weight")) == fill("embed.weight", loaded.tensors["embed.weight"].nbytes)
    loaded.close()


def test_one_failing_chunk_ends_the_reading(tmp_path, monkeypatch):
    """An error far inside is told with its byte, once every thread has left the buffer."""
    bench = big_file(tmp_path, monkeypatch)

    def broken(descriptor, into, offset):
        if offset >= 8192:
            raise OSError(5, "Input/output error")
        return read_from_file(descriptor, into, offset)

    bench.options["read"] = broken
    with pytest.raises(PartRefused, match=r"cannot be read at byte (8192|12288|16384|20480): Input/output error"):
        bench.read("tag", "backbone")
    assert bench.room.held == 0


def test_file_systems_without_direct_reads_are_read_all_the_same(bench, monkeypatch):
    """Where the flag is taken and the read refused, the page cache serves."""
    real, refused = os.preadv, []

    def strict(descriptor, buffers, offset, *flags):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", strict)
    bench.read("tag", "backbone").close()
    monkeypatch.undo()
    if not refused:
        pytest.skip("this file system has no direct reads")


def test_threads_whose_direct_reads_are_refused_at_once(tmp_path, monkeypatch):
    """The first of them takes the flag away; the others read again, too, and nothing is refused."""
    bench = big_file(tmp_path, monkeypatch)
    real, refused, together = os.preadv, set(), threading.Barrier(reading.STREAMS)

    def strict(descriptor, buffers, offset, *flags):
        if threading.get_ident() not in refused:
            refused.add(threading.get_ident())
            together.wait(30)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", strict)
    bench.read("tag", "backbone").close()
    assert len(refused) == reading.STREAMS


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 8191, 8192, 5 * 4096 - 1, 5 * 4096, 5 * 4096 + 1, 300_001])
@pytest.mark.parametrize("folder", ["disk", "memory"])
def test_any_size_on_any_file_system(tmp_path, monkeypatch, size, folder):
    """Whole pages or not, more chunks than threads or fewer; a file system in memory knows no direct reads."""
    monkeypatch.setattr(reading, "CHUNK", 4096)
    if folder == "memory" and not os.path.isdir("/dev/shm"):
        pytest.skip("no file system in memory here")
    data = random.Random(size).randbytes(size)
    with tempfile.NamedTemporaryFile(dir=tmp_path if folder == "disk" else "/dev/shm") as file:
        file.write(data)
        file.flush()
        descriptor = os.open(file.name, os.O_RDONLY)
        buffer, digest, failures = Buffer(size), hashlib.sha256(), []
        told = Reading(descriptor, buffer, read_from_file, time.monotonic, lambda: failures.append(1))
        assert told.run("part", 30.0, digest).st_size == size
    assert (bytes(buffer.view), digest.digest()) == (data, hashlib.sha256(data).digest())
    assert not failures
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_slow_disk_is_not_waited_for(bench):
    """A reading that passes its time is refused with both numbers, whatever it has brought by then."""
    clock = Clock()

    def slow(descriptor, into, offset):
        clock.now += 2
        return read_from_file(descriptor, into[:1000], offset)

    bench.options.update(read=slow, clock=clock)
    bench.done = threading.Event()
    whole = bench.room

    def room(nbytes):
        give_back = whole(nbytes)
        return lambda: (give_back(), bench.done.set())

    bench.room = room
    with pytest.raises(PartRefused, match=r"gave \d+ of \d+ bytes within 3 s, the limit"):
        bench.read("tag", "backbone")
    assert bench.done.wait(30)  # the thread that reads gives the memory back once its read is over
    assert whole.held == 0
    assert len(bench.lines) == 1


def test_a_disk_that_never_answers_keeps_nobody(bench):
    """The caller goes on at the limit; memory that a read may still write to is given back only after that read."""
    answer = threading.Event()
    whole = bench.room
    given_back = threading.Event()

    def room(nbytes):
        give_back = whole(nbytes)
        return lambda: (give_back(), given_back.set())

    def never(descriptor, into, offset):
        answer.wait(30)
        return 0

    bench.options.update(read=never, limits=Limits(seconds_per_100mb=0.01))
    bench.room = room
    with pytest.raises(PartRefused, match="gave 0 of"):
        bench.read()
    assert not given_back.is_set()
    assert whole.held == bench.file("tag").stat().st_size
    answer.set()
    assert given_back.wait(30)
    assert whole.held == 0


def test_time_grows_with_size():
    """3 s for each 100 MB, and never less than for one."""
    assert Limits().seconds(1) == 3
    assert Limits().seconds(1_000_000_000) == 30


def test_a_disk_error_is_said(bench):
    """What the system says of a read, and the byte, are in the message."""

    def broken(descriptor, into, offset):
        raise OSError(5, "Input/output error")

    bench.options["read"] = broken
    assert "cannot be read at byte 0: Input/output error" in bench.refuse().message


def test_no_thread_is_an_answer(bench, monkeypatch):
    """Where the system gives no thread, everything goes back and the reason is said."""

    def none(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    assert "can't start new thread" in bench.refuse().message


def test_fewer_threads_do_it_too(tmp_path, monkeypatch):
    """Where the system gives one thread and no more, that one reads all."""
    bench = big_file(tmp_path, monkeypatch)
    real, started = threading.Thread.start, []

    def one(self):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", one)
    bench.read("tag", "backbone").close()
    assert bench.room.held == 0
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_start_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch, after):
    """Ctrl-C while the threads begin: those that run give everything back, or the caller where none does."""
    bench = big_file(tmp_path, monkeypatch)
    real, started, whole, given_back = threading.Thread.start, [], bench.room, threading.Event()

    def interrupted(self):
        if len(started) == after:
            raise KeyboardInterrupt
        started.append(self)
        real(self)

    def room(nbytes):
        give_back = whole(nbytes)
        return lambda: (give_back(), given_back.set())

    bench.room = room
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.read("tag", "backbone")
    assert given_back.wait(30)
    assert whole.held == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_that_closes_with_an_error(bench, monkeypatch):
    """Network file systems may tell at the close what went wrong with others' writes: the bytes are proven anyway."""
    real = os.close

    def told(descriptor):
        real(descriptor)
        if threading.current_thread().name == "pagein-part":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "close", told)
    bench.read("tag", "backbone").close()
    assert bench.room.held == 0


def test_a_disk_that_does_not_tell_the_status_keeps_nobody(bench, monkeypatch):
    """The limit holds for the last look at the file, too."""
    answer, whole, given_back, real = threading.Event(), bench.room, threading.Event(), os.fstat

    def never(descriptor):
        if threading.current_thread().name == "pagein-part":
            answer.wait(30)
        return real(descriptor)

    def room(nbytes):
        give_back = whole(nbytes)
        return lambda: (give_back(), given_back.set())

    monkeypatch.setattr(os, "fstat", never)
    bench.options["limits"] = Limits(seconds_per_100mb=0.2)
    bench.room = room
    with pytest.raises(PartRefused, match=r"gave all bytes and not its status within 0\.2 s"):
        bench.read()
    assert whole.held
    answer.set()
    assert given_back.wait(30)
    assert whole.held == 0


def test_no_limit_of_time_is_one(bench):
    """An operator may wait for a disk as long as it takes."""
    bench.options["limits"] = Limits(seconds_per_100mb=math.inf)
    bench.read("tag", "backbone").close()


def test_a_bug_in_reading_is_no_hang(bench):
    """Whatever ends the thread that reads, the caller gets an answer."""

    def wrong(descriptor, into, offset):
        raise ValueError("wrong")

    bench.options["read"] = wrong
    assert "cannot be read at byte 0: wrong" in bench.refuse().message


CHANGES = {
    "shortened": (lambda path: os.truncate(path, 1000), "was cut to"),
    "written to": (lambda path: path.open("r+b").write(b"x"), "changed while it was read|digest"),
    "grown": (lambda path: path.open("ab").write(b"more"), "changed while it was read"),
    "renamed": (lambda path: path.rename(path.with_name("away")), "changed while it was read"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read(bench, change):
    """What changes between opening and the last byte is refused, also where the bytes might be whole."""
    spoil, words = CHANGES[change]
    once = []

    def meddle(descriptor, into, offset):
        if offset >= 1000 and not once:
            once.append(spoil(bench.file("backbone")))
        return read_from_file(descriptor, into[:1000], offset)

    bench.options["read"] = meddle
    with pytest.raises(PartRefused, match=words):
        bench.read("tag", "backbone")
    assert bench.room.held == 0


def test_no_memory_is_an_answer(bench, monkeypatch):
    """Where the system has no memory for the buffer, the reservation goes back and the reason is said."""

    def none(nbytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(part_file, "Buffer", none)
    assert "no memory for its" in bench.refuse().message


@needs_xxhash
def test_proven_once_the_fast_digest_does(bench, monkeypatch):
    """The second reading of an unchanged file costs no sha256; the bytes are proven all the same."""
    bench.options["proven"] = Proven()
    first = bench.read()
    first.close()
    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "sha256", lambda *rest: pytest.fail("hashed again"))
        second = bench.read()
    assert (first.by_fast_digest, second.by_fast_digest) == (False, True)
    assert bytes(second.view("tag.weight")) == fill("tag.weight", 160)
    second.close()


@needs_xxhash
def test_a_changed_file_is_proven_anew(bench):
    """Another write, inode or time: the full digest counts again, and finds what changed."""
    bench.options["proven"] = Proven()
    bench.read().close()
    path = bench.file("tag")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\0")
    bench.refuse()
    path.write_bytes(data)
    loaded = bench.read()
    assert not loaded.by_fast_digest
    loaded.close()


@needs_xxhash
def test_lost_bits_of_a_proven_file_are_found(bench):
    """A disk that gives other bytes for an unchanged file is found by the fast digest, and told by the full one."""
    bench.options["proven"] = Proven()
    bench.read().close()

    def rotten(descriptor, into, offset):
        got = read_from_file(descriptor, into, offset)
        into[got - 1] ^= 1
        return got

    bench.options["read"] = rotten
    planned = bench.plan.parts["tag"].files["stored"].sha256
    told = bench.refuse()
    assert told.details["planned_digest"] == planned != told.details["digest"]


@needs_xxhash
def test_what_is_remembered_is_bounded(monkeypatch):
    """The oldest of too many makes room."""
    monkeypatch.setattr("pagein.parts.files.proven.MOST", 2)
    proven = Proven()
    for at in range(3):
        proven.remember("sha", (0, at, 0, 0, 0), str(at))
    assert [proven.digest_of("sha", (0, at, 0, 0, 0)) for at in range(3)] == [None, "1", "2"]


def test_many_threads_read_the_same_part(bench):
    """Readings do not know of each other."""
    found: list[bytes] = []

    def one() -> None:
        loaded = bench.read("tag", "both")
        found.append(bytes(loaded.view("both.weight")))
        loaded.close()

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [fill("both.weight", 112)] * 8
