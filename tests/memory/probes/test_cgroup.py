"""Every ancestor's limit, v1, v2 and hybrid; cache that can go counts as free."""

from pathlib import Path

import pytest

from pagein.memory.probes import cgroup
from pagein.memory.probes.cgroup import Level, Limit, Mount

GIB, MIB = 1024**3, 1024**2


def by_path(root: Path) -> dict[str, Level]:
    """The levels of a tree by name."""
    return {level.path: level for level in cgroup.read_levels(root)}


def test_v2_gives_every_ancestor_innermost_first(fixtures):
    """From the service over its slices to the top."""
    levels = cgroup.read_levels(fixtures / "cgroup/v2_nested")
    assert [level.path for level in levels] == [
        "/ai.slice/ai-models.slice/pagein.service",
        "/ai.slice/ai-models.slice",
        "/ai.slice",
        "/",
    ]
    assert {level.version for level in levels} == {2}


def test_v2_max_is_no_limit_and_high_is_one(fixtures):
    """The word max is unlimited; memory.high binds like memory.max, since above it the kernel stalls the group."""
    levels = by_path(fixtures / "cgroup/v2_nested")
    assert levels["/ai.slice/ai-models.slice/pagein.service"].limits == ()
    middle = levels["/ai.slice/ai-models.slice"]
    assert middle.limits == (Limit("memory.max", 12 * GIB), Limit("memory.high", 8 * GIB))
    assert middle.limit == Limit("memory.high", 8 * GIB)


def test_available_counts_cache_as_free_and_anonymous_memory_as_used(fixtures):
    """Limit less (use less reclaimable): here 16 - (15 - (2 inactive + 1 active - 1 mapped + 0.5 slab)) GiB."""
    upper = by_path(fixtures / "cgroup/v2_nested")["/ai.slice"]
    assert upper.reclaimable == 2 * GIB + 512 * MIB
    assert upper.available == 16 * GIB - (15 * GIB - 2 * GIB - 512 * MIB)


def test_the_top_of_the_tree_has_no_limit_files(fixtures):
    """The root group has statistics, but neither limit nor use: unknown, not 0."""
    top = by_path(fixtures / "cgroup/v2_nested")["/"]
    assert (top.limits, top.usage, top.available) == ((), None, None)


def test_a_namespace_that_hides_the_path_still_shows_the_containers_limit(fixtures):
    """In a container the group is called / and its limit stands at the top of the mount."""
    (level,) = cgroup.read_levels(fixtures / "cgroup/v2_container")
    assert (level.path, level.limit) == ("/", Limit("memory.max", 4 * GIB))
    assert level.available == 4 * GIB - (3 * GIB - (1792 + 128 - 64 + 32) * MIB)


def test_v1_gives_every_ancestor_and_knows_its_unlimited(fixtures):
    """LONG_MAX rounded to a page is no limit; the sums over descendants (total_) count, not the group's own pages."""
    levels = by_path(fixtures / "cgroup/v1_nested")
    pod = "/kubepods/burstable/pod7d1f0c52"
    assert list(levels) == [f"{pod}/4be1c6", pod, "/kubepods/burstable", "/kubepods", "/"]
    assert [level.limit and level.limit.bytes for level in levels.values()] == [None, 6 * GIB, None, 14 * GIB, None]
    assert levels[pod].reclaimable == 2 * GIB + 1 * GIB - 512 * MIB
    assert levels[pod].available == 6 * GIB - (5 * GIB - (2 * GIB + 512 * MIB))


def test_v1_tells_of_a_limit_outside_the_container(fixtures):
    """A tighter ancestor that the mount does not show stands in hierarchical_memory_limit."""
    (level,) = cgroup.read_levels(fixtures / "cgroup/v1_container")
    assert level.path == "/docker/3f9a"
    assert level.limits == (
        Limit("memory.limit_in_bytes", 8 * GIB),
        Limit("memory.stat hierarchical_memory_limit", 3 * GIB),
    )
    assert level.available == 3 * GIB - (2 * GIB - (512 + 512 - 256) * MIB)


def test_hybrid_takes_memory_from_v1(fixtures):
    """Where both hierarchies are mounted, memory is in one of them only."""
    levels = cgroup.read_levels(fixtures / "cgroup/hybrid")
    assert [(level.version, level.path) for level in levels] == [(1, "/jobs/8add4e89"), (1, "/jobs"), (1, "/")]
    assert all(level.limits == () and level.usage is not None for level in levels)


def test_v1_without_hierarchy_stops_at_the_group_that_counts(tmp_path):
    """Without use_hierarchy an ancestor does not count its children, so its limit does not bind them."""
    make_v1(tmp_path, "/a/b")
    write(tmp_path / "sys/fs/cgroup/memory/a/b", limit=2 * GIB, usage=GIB)
    write(tmp_path / "sys/fs/cgroup/memory/a", limit=GIB, usage=0, hierarchy=0)
    assert [level.path for level in cgroup.read_levels(tmp_path)] == ["/a/b"]


def test_missing_groups_are_passed_over(tmp_path):
    """A path of the host that is not mounted here leaves the levels that are."""
    make_v1(tmp_path, "/not/here")
    write(tmp_path / "sys/fs/cgroup/memory", limit=3 * GIB, usage=GIB)
    (level,) = cgroup.read_levels(tmp_path)
    assert level.limit == Limit("memory.limit_in_bytes", 3 * GIB)


def test_no_controller_gives_no_levels(fixtures, tmp_path):
    """Without a memory controller, or without any /proc, there is nothing to say."""
    assert cgroup.read_levels(fixtures / "proc/old_kernel") == ()
    assert cgroup.read_levels(tmp_path) == ()


def test_unknown_use_is_unknown_availability(tmp_path):
    """A limit whose use cannot be read leaves what is available unknown; missing statistics leave the sure part."""
    make_v1(tmp_path, "/")
    write(tmp_path / "sys/fs/cgroup/memory", limit=3 * GIB, usage=None)
    assert cgroup.read_levels(tmp_path)[0].available is None
    write(tmp_path / "sys/fs/cgroup/memory", limit=3 * GIB, usage=GIB)
    level = cgroup.read_levels(tmp_path)[0]
    assert (level.reclaimable, level.available) == (None, 2 * GIB)


def test_use_above_the_limit_leaves_nothing():
    """What is available is never negative."""
    level = Level("/", 2, Path(), (Limit("memory.high", GIB),), usage=3 * GIB, reclaimable=GIB)
    assert level.available == 0


@pytest.mark.parametrize(
    ("stat", "expected"),
    [
        ({"inactive_file": 10, "active_file": 4, "file_mapped": 1, "slab_reclaimable": 2}, 15),
        ({"inactive_file": 10, "active_file": 4, "file_mapped": 9}, 10),  # mapped pages may be inactive ones
        ({"inactive_file": 10}, 10),
        ({"active_file": 4}, None),
    ],
)
def test_reclaimable_cache(stat, expected):
    """Inactive file cache always, active only as far as nobody maps it, reclaimable slab; else unknown."""
    assert cgroup.reclaimable_bytes(stat, 2) == expected


def test_mountinfo():
    """Only v2 and the v1 memory controller matter; blanks in paths are octal; odd lines are passed over."""
    text = (
        "30 21 0:26 / /sys/fs/my\\040cgroup rw shared:4 master:1 - cgroup2 cgroup2 rw\n"
        "31 21 0:27 /x /v1/memory rw - cgroup cgroup rw,memory\n"
        "32 21 0:28 / /v1/cpu rw - cgroup cgroup rw,cpu\n"
        "33 21 0:29 / / rw - ext4 /dev/sda rw\nrubbish\n"
    )
    assert cgroup.parse_mounts(text) == [Mount("/", "/sys/fs/my cgroup", 2), Mount("/x", "/v1/memory", 1)]


def test_the_mount_that_shows_our_group_is_taken(tmp_path):
    """Among several mounts of the hierarchy, a foreign container's is not ours."""
    make(
        tmp_path,
        "0::/mine\n",
        "30 21 0:26 /other /mnt/other rw - cgroup2 cgroup2 rw\n31 21 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    )
    for folder, limit in (("mnt/other", 1), ("sys/fs/cgroup/mine", 2)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
    assert [level.limit for level in cgroup.read_levels(tmp_path)] == [Limit("memory.max", 2)]


def test_a_group_above_the_namespace_is_not_climbed_to(tmp_path):
    """A path with .. lies outside the mount: only the mount's own top is read."""
    make(tmp_path, "0::/../sibling\n", "30 21 0:26 / /cg rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "sibling").mkdir()
    (tmp_path / "sibling/memory.max").write_text("1\n")
    (tmp_path / "cg").mkdir()
    (tmp_path / "cg/memory.max").write_text("2\n")
    assert [level.limit for level in cgroup.read_levels(tmp_path)] == [Limit("memory.max", 2)]


def make(root: Path, membership: str, mounts: str) -> None:
    """Write where a process is, and what is mounted."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    (root / "proc/self/mountinfo").write_text(mounts)


def make_v1(root: Path, group: str) -> None:
    """Put a process into a v1 memory group."""
    make(root, f"4:memory:{group}\n", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")


def write(folder: Path, limit: int, usage: int | None, hierarchy: int = 1) -> None:
    """Write the files of a v1 group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.use_hierarchy").write_text(f"{hierarchy}\n")
    if usage is not None:
        (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
