from __future__ import annotations

import json
import resource

from sylvan.cli.doctor import check_limits, check_load_cache, check_system
from sylvan.cli.main import main
from sylvan.config.fields import replaced
from sylvan.config.tree import Config

FINE = {
    "proc/sys/kernel/osrelease": "6.1.0",
    "proc/sys/kernel/yama/ptrace_scope": "0",
    "proc/sys/vm/overcommit_memory": "0",
    "proc/sys/vm/swappiness": "60",
    "proc/swaps": "Filename Type Size Used Priority\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "sys/devices/system/node/node0/cpulist": "0-3",
    "dev/shm/file": "",
}
BAD = {
    "proc/sys/kernel/yama/ptrace_scope": "1",
    "proc/sys/vm/overcommit_memory": "2",
    "proc/swaps": "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave",
    "sys/devices/system/node/node1/cpulist": "4-7",
}


def machine(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def slow(findings):
    return {finding.what: finding.cost for finding in findings if finding.status != "ok"}


def test_a_machine_that_is_set_up_well_has_nothing_to_change(tmp_path):
    assert slow(check_system(machine(tmp_path, FINE))) == {}


def test_each_thing_that_is_not_says_what_to_change(tmp_path):
    found = slow(check_system(machine(tmp_path, FINE | BAD)))

    words = {
        "cross-memory": "ptrace_scope=0",
        "overcommit": "overcommit_memory=0",
        "swap": "swappiness=10",
        "huge pages": "echo madvise",
        "governor": "cpupower",
        "NUMA": "numactl",
    }
    assert found.keys() == words.keys()
    assert all(word in found[what] for what, word in words.items())


def test_a_machine_that_tells_nothing_is_looked_at_without_fail(tmp_path):
    assert slow(check_system(tmp_path)).keys() == {"/dev/shm"}


def test_limits_of_the_user_are_looked_at():
    few = {
        resource.RLIMIT_NOFILE: (1024, 1024),
        resource.RLIMIT_NPROC: (100, 100),
        resource.RLIMIT_AS: (1 << 30, 1 << 30),
    }
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    assert slow(check_limits(few.__getitem__)).keys() == {
        "open files",
        "processes",
        "address space",
    }
    assert slow(check_limits(lambda _: none)) == {}


def test_this_machine_is_described_as_json(capsys):
    main(["doctor", "--json"])

    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    assert {"CPU", "memory", "port", "open files", "kernel", "sylvan", "numpy"} <= found.keys()


def test_what_is_kept_for_later_starts_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check_load_cache(Config()).detail == f"{tmp_path}/sylvan/load: 0 B"
    folder = tmp_path / "sylvan/load"
    folder.mkdir(parents=True)
    (folder / "a.weights").write_bytes(bytes(3 << 20))
    (folder / "b.program").write_bytes(bytes(1 << 20))
    (folder / "notes").write_bytes(bytes(1 << 20))
    assert check_load_cache(Config()).detail == f"{folder}: 4 MiB"
    assert check_load_cache(replaced(Config(), {"load_cache": None})).detail == "off"

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "notes"))

    assert "--load-cache DIR" in slow([check_load_cache(Config())])["load cache"]
