"""The reader: what lands where, in which order, how it is given up, and how every fault reaches who waits."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from pagein.errors import ReadingStopped, WeightsUnreadable
from pagein.memory.buffers import Buffer
from pagein.weights.reading.files import PAGE, ReadMode
from pagein.weights.reading.reader import Extent, Reader

MIB = 1024 * 1024
MODES = list(ReadMode)
SIZE = 40 * PAGE + 123


@pytest.fixture
def file(tmp_path):
    """A file of random bytes whose end lies within a page."""
    path = tmp_path / "weights.bin"
    path.write_bytes(random.Random(7).randbytes(SIZE))
    return path


@pytest.fixture
def buffer():
    """A buffer as large as the file, in whole pages."""
    made = Buffer(64 * PAGE)
    yield made
    made.close()


@pytest.fixture
def reader(request):
    """A reader with small chunks; a test may ask for its mode and threads."""
    mode, threads = getattr(request, "param", (ReadMode.BUFFERED, 2))
    with Reader(mode, threads, 2 * PAGE) as made:
        yield made


def cached(path):
    """Return how many pages of a file the page cache has."""
    with open(path, "rb+") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        begin = ctypes.c_char.from_buffer(mapped)
        assert (
            ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(len(mapped)), pages)
            == 0
        )
        del begin
        return sum(page & 1 for page in pages)


class Gate:
    """Takes the place of os.preadv: notes each read's offset, and holds it until the test lets it through."""

    def __init__(self):
        self.real, self.offsets, self.arrived, self.passing = os.preadv, [], threading.Semaphore(0), threading.Event()

    def __call__(self, fd, views, offset):
        self.offsets.append(offset)
        self.arrived.release()
        self.passing.wait()
        return self.real(fd, views, offset)


@pytest.fixture
def gate(monkeypatch):
    """Hold every read; a test names it after its reader, so that a failed one is let through before that closes."""
    made = Gate()
    monkeypatch.setattr(os, "preadv", made)
    yield made
    made.passing.set()


def whole(file, into=0):
    """Return an extent over the whole file."""
    return Extent(file, 0, -(-file.stat().st_size // PAGE) * PAGE, into)


@pytest.mark.parametrize("reader", [(mode, threads) for mode in MODES for threads in (1, 4)], indirect=True)
def test_bytes_land_where_their_extents_say(reader, file, tmp_path, buffer):
    """Several extents of several files come into their places, to a file's last byte, and nothing else is touched."""
    other = tmp_path / "other.bin"
    other.write_bytes(b"o" * 5 * PAGE)
    extents = [Extent(file, 30 * PAGE, 11 * PAGE, 20 * PAGE), Extent(other, PAGE, 3 * PAGE, 2 * PAGE)]
    reading = reader.read(extents, buffer)
    reading.wait()
    data = file.read_bytes()
    assert reading.done
    assert reading.nbytes == 14 * PAGE
    assert bytes(buffer.view[20 * PAGE : 30 * PAGE + 123]) == data[30 * PAGE :]
    assert bytes(buffer.view[2 * PAGE : 5 * PAGE]) == b"o" * 3 * PAGE
    assert not any(buffer.view[: 2 * PAGE])
    assert not any(buffer.view[5 * PAGE : 20 * PAGE])
    assert not any(buffer.view[31 * PAGE :])


def test_a_link_to_the_weights_is_read(reader, file, tmp_path, buffer):
    """The hub's cache consists of links into its blobs."""
    link = tmp_path / "model.safetensors"
    link.symlink_to(file)
    reader.read([whole(link)], buffer).wait()
    assert bytes(buffer.view[:SIZE]) == file.read_bytes()


def test_nothing_to_read_is_done_at_once(reader, buffer):
    """A unit without stored bytes does not hang its pass."""
    reading = reader.read([], buffer)
    reading.wait()
    assert reading.done
    assert reading.nbytes == 0


@pytest.mark.parametrize("reader", [(ReadMode.BUFFERED, 1)], indirect=True)
def test_readings_come_in_the_order_in_which_they_were_asked_for(reader, file, buffer, gate):
    """The first reading is whole before the second begins, so that whoever computes next waits least."""
    first = reader.read([Extent(file, 20 * PAGE, 6 * PAGE, 0)], buffer)
    second = reader.read([Extent(file, 0, 4 * PAGE, 8 * PAGE)], buffer)
    assert not first.done
    gate.passing.set()
    second.wait()
    assert first.done
    assert gate.offsets == [n * PAGE for n in (20, 22, 24, 0, 2)]


@pytest.mark.parametrize("reader", [(ReadMode.BUFFERED, 4)], indirect=True)
def test_one_reading_is_read_by_all_threads_at_once(reader, file, buffer, gate):
    """A disk gives its speed only to several reads at a time."""
    reading = reader.read([Extent(file, 0, 20 * PAGE, 0)], buffer)
    for _ in range(4):
        assert gate.arrived.acquire(timeout=60)
    gate.passing.set()
    reading.wait()
    assert sorted(gate.offsets) == [2 * n * PAGE for n in range(10)]


def test_after_cancel_nothing_writes_into_the_buffer(reader, file, buffer, gate):
    """`cancel` returns only when the reads under way have landed, and no further one is begun."""
    reading = reader.read([whole(file)], buffer)
    behind = reader.read([Extent(file, 0, PAGE, 50 * PAGE)], buffer)
    for _ in range(2):
        assert gate.arrived.acquire(timeout=60)
    cancelling = threading.Thread(target=reader.cancel, args=(reading,))
    cancelling.start()
    assert not reading.done  # two reads are still held, so it must not have returned
    assert cancelling.is_alive()
    gate.passing.set()
    cancelling.join()
    assert reading.done
    behind.wait()
    assert len(gate.offsets) == 3
    assert not any(buffer.view[4 * PAGE : 41 * PAGE])
    with pytest.raises(ReadingStopped, match="cancelled"):
        reading.wait()


def test_cancelling_what_is_done_changes_nothing(reader, file, buffer):
    """A reading that came in whole stays usable."""
    reading = reader.read([whole(file)], buffer)
    reading.wait()
    reader.cancel(reading)
    reading.wait()


def test_a_fault_of_the_disk_names_file_offset_and_both_counts(reader, file, buffer, monkeypatch):
    """EIO reaches who waits; what was asked for behind it is still read."""
    real = os.preadv

    def faulty(fd, views, offset):
        if offset == 4 * PAGE:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", faulty)
    reading = reader.read([Extent(file, 0, 10 * PAGE, 0)], buffer)
    behind = reader.read([Extent(file, 20 * PAGE, 4 * PAGE, 0)], buffer)
    with pytest.raises(WeightsUnreadable) as caught:
        reading.wait()
    assert reading.done
    for word in (str(file), "8192 bytes", f"byte {4 * PAGE} ", "got 0", "Input/output error"):
        assert word in caught.value.message
    behind.wait()


def test_a_fault_that_is_not_the_disks_does_not_hang_who_waits(reader, file, buffer, monkeypatch):
    """Whatever breaks in a thread is raised by `wait`."""
    monkeypatch.setattr(os, "preadv", lambda *_: [].pop())
    with pytest.raises(IndexError):
        reader.read([whole(file)], buffer).wait()


def test_a_missing_file_is_named(reader, tmp_path, buffer):
    """A shard that was deleted is an error of the reading, not of the thread."""
    with pytest.raises(WeightsUnreadable, match=r"gone\.bin: cannot be opened: No such file"):
        reader.read([Extent(tmp_path / "gone.bin", 0, PAGE, 0)], buffer).wait()


@pytest.mark.parametrize("needed", [None, PAGE + 200])
def test_a_file_shorter_than_its_extent_is_refused(reader, file, buffer, needed):
    """An extent may run past the end within its last page only, and never short of the bytes that it needs."""
    extent = Extent(file, 39 * PAGE, (3 if needed is None else 2) * PAGE, 0, needed)
    with pytest.raises(WeightsUnreadable, match=f"the file ends at {SIZE}"):
        reader.read([extent], buffer).wait()
    reader.read([Extent(file, 39 * PAGE, 2 * PAGE, 0, PAGE + 123)], buffer).wait()


@pytest.mark.parametrize("reader", [(mode, 2) for mode in MODES], indirect=True)
def test_a_file_that_changes_while_it_is_used_is_refused(reader, file, buffer):
    """Weights from before and after a download into the same file must not meet in one model."""
    reader.read([Extent(file, 0, PAGE, 0)], buffer).wait()
    os.truncate(file, 20 * PAGE)
    for place in (0, 30 * PAGE):
        with pytest.raises(WeightsUnreadable, match=f"changed .*: {SIZE} bytes at first, {20 * PAGE} now"):
            reader.read([Extent(file, place, PAGE, 0)], buffer).wait()


def test_a_file_that_is_replaced_stays_what_it_was(reader, file, tmp_path, buffer):
    """The open file goes on to be read when another one takes its name."""
    data = file.read_bytes()
    reader.read([Extent(file, 0, PAGE, 0)], buffer).wait()
    (tmp_path / "new").write_bytes(b"n" * SIZE)
    os.replace(tmp_path / "new", file)
    reader.read([whole(file)], buffer).wait()
    assert bytes(buffer.view[:SIZE]) == data


@pytest.mark.parametrize("reader", [(mode, 1) for mode in MODES], indirect=True)
@pytest.mark.parametrize("most", [PAGE, PAGE + 512])
def test_short_reads_are_continued(reader, file, buffer, monkeypatch, most):
    """A file system may give less than was asked for; a direct read then goes on at a page."""
    real, offsets = os.preadv, []

    def short(fd, views, offset):
        offsets.append(offset)
        return real(fd, [views[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", short)
    monkeypatch.setattr(
        "pagein.weights.reading.files.WeightFile._set_direct", lambda self: reader.mode is ReadMode.DIRECT
    )
    reader.read([whole(file)], buffer).wait()
    assert bytes(buffer.view[:SIZE]) == file.read_bytes()
    assert reader.mode is ReadMode.BUFFERED or not any(offset % PAGE for offset in offsets)


@pytest.mark.parametrize("where", ["open", "read"])
def test_a_file_system_without_direct_reads_is_read_through_the_cache(where, file, buffer, monkeypatch):
    """EINVAL, when the flag is set or only when it is used, is no fault: the file is read in the other way."""
    import fcntl

    real_fcntl, real_read = fcntl.fcntl, os.preadv
    asked = []

    def refusing(fd, command, value=0):
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            asked.append(value)
            if where == "open":
                raise OSError(errno.EINVAL, "Invalid argument")
            return 0
        return real_fcntl(fd, command, value)

    def read(fd, views, offset):
        if where == "read" and not reads:
            reads.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(fd, views, offset)

    reads = []
    monkeypatch.setattr(fcntl, "fcntl", refusing)
    monkeypatch.setattr(os, "preadv", read)
    with Reader(ReadMode.DIRECT, 1, 4 * PAGE) as reader:
        assert reader.direct(file) is None
        reader.read([whole(file)], buffer).wait()
        assert reader.direct(file) is False
    assert asked
    assert bytes(buffer.view[:SIZE]) == file.read_bytes()


@pytest.mark.parametrize("reader", [(ReadMode.BUFFERED, threads) for threads in (1, 4)], indirect=True)
def test_buffered_reads_leave_nothing_in_the_page_cache(reader, tmp_path):
    """What was read is dropped, with what the kernel read ahead of it (scenario 12)."""
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(64 * MIB))
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path):
        pytest.skip("this file system keeps files in memory")
    buffer = Buffer(40 * MIB)
    reader.read([Extent(path, 0, 20 * MIB, 0), Extent(path, 36 * MIB, 20 * MIB, 20 * MIB)], buffer).wait()
    reader.close()
    buffer.close()
    # What the kernel reads ahead may land after its range was dropped: at most one such window.
    assert cached(path) <= read_ahead(path) // PAGE < 40 * MIB // PAGE


def read_ahead(path):
    """Bytes that the kernel reads ahead on the disk of a file."""
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return int(setting.read_text()) * 1024 if setting.exists() else MIB


def test_each_file_is_opened_once(reader, file, buffer, monkeypatch):
    """Thousands of passes open nothing after the first."""
    real, opened = os.open, []
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(path), real(path, *rest))[1])
    for _ in range(3):
        reader.read([whole(file)], buffer).wait()
    assert len(opened) == 1


def test_the_figures_count_what_was_read(reader, file, buffer):
    """Two statistics subtracted say what one pass read."""
    reader.read([whole(file)], buffer).wait()
    before = reader.stats
    reading = reader.read([whole(file)], buffer)
    reading.wait()
    after = reader.stats
    assert after.bytes - before.bytes == SIZE
    assert after.reads - before.reads == 21  # 41 pages in chunks of two
    assert reading.seconds > 0
    assert after.seconds > before.seconds


def test_many_callers_share_one_reader(reader, file):
    """Calls from several threads neither mix up bytes nor lose a reading."""
    data, wrong = file.read_bytes(), []

    def use(seed):
        mine, dice = Buffer(8 * PAGE), random.Random(seed)
        for _ in range(50):
            at = dice.randrange(32)
            reading = reader.read([Extent(file, at * PAGE, 8 * PAGE, 0)], mine)
            if dice.random() < 0.3:
                reader.cancel(reading)
                continue
            reading.wait()
            if bytes(mine.view) != data[at * PAGE : (at + 8) * PAGE]:
                wrong.append(at)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_steady_reading_allocates_nothing_of_size(tmp_path):
    """Bytes go from the file into the buffer with no copy on the Python side."""
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(16 * 1024 * 1024))
    buffer = Buffer(16 * 1024 * 1024)
    with Reader(ReadMode.BUFFERED, 2, 1024 * 1024) as reader:
        reader.read([whole(path)], buffer).wait()
        tracemalloc.start()
        try:
            for _ in range(5):
                reader.read([whole(path)], buffer).wait()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    buffer.close()
    assert peak < 100_000


def test_close_ends_threads_and_fails_what_is_queued(file, buffer, gate):
    """After `close` no thread is left, and who waits for what was queued learns of it."""
    reader = Reader(ReadMode.BUFFERED, 1, PAGE)
    begun = reader.read([whole(file)], buffer)
    queued = reader.read([whole(file)], buffer)
    assert gate.arrived.acquire(timeout=60)
    threads = list(reader._threads)
    closing = threading.Thread(target=reader.close)
    closing.start()
    with pytest.raises(ReadingStopped, match="closed"):
        queued.wait()
    assert not begun.done
    gate.passing.set()
    closing.join()
    reader.close()
    assert begun.done
    assert len(gate.offsets) == 1
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(AssertionError):
        reader.read([whole(file)], buffer)


def test_a_forgotten_reader_warns_and_ends_its_threads():
    """Threads hold no reader, so that one nobody refers to is collected."""
    reader = Reader(ReadMode.BUFFERED, 2)
    threads = list(reader._threads)
    kept = [reader]
    del reader
    with pytest.warns(ResourceWarning, match="was not closed"):
        kept.clear()
    gc.collect()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_read_that_hangs_does_not_keep_the_process():
    """A dead disk holds a thread for ever; the process ends all the same."""
    program = """
import os, threading
from pathlib import Path
from pagein.memory.buffers import Buffer
from pagein.weights.reading.reader import Extent, Reader, ReadMode
inside = threading.Event()
os.preadv = lambda *_: (inside.set(), threading.Event().wait())
reader = Reader(ReadMode.BUFFERED, 1)
reader.read([Extent(Path(os.__file__), 0, 4096, 0)], Buffer(4096))
inside.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("change", [{"offset": 100}, {"nbytes": 100}, {"into": 100}, {"nbytes": 0}])
def test_extents_are_whole_pages(file, change):
    """What a direct read could not do is refused where it is made."""
    with pytest.raises(AssertionError):
        Extent(**{"file": file, "offset": 0, "nbytes": PAGE, "into": 0, **change})


def test_an_extent_beyond_the_buffer_is_refused(reader, file, buffer):
    """A wrong layout must not write into other memory."""
    with pytest.raises(AssertionError):
        reader.read([Extent(file, 0, 2 * PAGE, buffer.nbytes - PAGE)], buffer)
