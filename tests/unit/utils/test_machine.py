from __future__ import annotations

import pytest

from sylvan.utils.machine import inspect_machine

CPUINFO = "processor : 0\nmodel name\t: Fast CPU 9\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
MEMINFO = "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:   12000000 kB\n"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def test_cpu_and_memory_are_read(root):
    machine = inspect_machine(root)

    assert machine.cpu_name == "Fast CPU 9"
    assert machine.features == {"avx2", "avx512f", "avx512_bf16"}
    assert machine.total_bytes == 16_000_000 * 1024
    assert machine.available_bytes == 12_000_000 * 1024
    assert machine.cores >= 1


def test_limits_of_a_container_count(root):
    cgroup = root / "sys/fs/cgroup"
    (cgroup / "cpu.max").write_text("100000 100000\n")
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("400000\n")

    machine = inspect_machine(root)

    assert machine.cores == 1
    assert (machine.total_bytes, machine.available_bytes) == (1_000_000, 600_000)


def test_old_limits_of_a_container_count(root):
    cgroup = root / "sys/fs/cgroup/memory"
    (cgroup / "memory.limit_in_bytes").write_text("1000000\n")
    (cgroup / "memory.usage_in_bytes").write_text("1000001\n")

    assert inspect_machine(root).available_bytes == 0


def test_no_limit_changes_nothing(root):
    cgroup = root / "sys/fs/cgroup"
    (cgroup / "cpu.max").write_text("max 100000\n")
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("5\n")

    assert inspect_machine(root).total_bytes == 16_000_000 * 1024


def test_a_machine_without_these_files_is_described_too(tmp_path):
    machine = inspect_machine(tmp_path)

    assert machine.cores >= 1
    assert machine.features == frozenset()
    assert machine.total_bytes > 0


def test_this_machine_is_described():
    machine = inspect_machine()

    assert 0 < machine.available_bytes <= machine.total_bytes
