"""benchmarks/peers: what is run, kept, left out and written, without any peer installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
if str(ROOT / "benchmarks" / "peers") not in sys.path:
    sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

import compare  # noqa: E402
import worker  # noqa: E402
from environments import CommandFailedError, Environment, run  # noqa: E402
from peers import PEERS, Peer  # noqa: E402
from results import BEGIN, END, Journal, Result, parsed, report, write_docs  # noqa: E402

SETTINGS = ("threads 2",)


def result(peer: str = "sylvan", turn: int = 0, **changes: object) -> Result:
    fields = {"rates": {"decode 1": 10.0 + turn}, "spent_s": 5.0, "version": f"{peer} 1.0"}
    return Result("10M", peer, "bf16", "measure", turn, SETTINGS, **fields | changes)


def python(code: str, log: Path, limit_s: float = 60.0) -> str:
    return run([sys.executable, "-c", code], limit_s, log)


def test_a_command_says_what_it_printed_and_its_complaints_go_to_the_log(tmp_path):
    log = tmp_path / "logs" / "x.log"
    code = "import sys; print('out'); print('oh', file=sys.stderr)"
    assert python(code, log) == "out\n"
    assert "oh\n" in log.read_text()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print(1); raise ValueError('no such weights')", "exit code 1: ValueError: no such"),
        (
            "import sys; print('ERROR: no version', file=sys.stderr); "
            "print('note', file=sys.stderr); sys.exit(3)",
            "exit code 3: ERROR: no version",
        ),
        ("import sys; print('only this'); sys.exit(4)", "exit code 4: only this"),
        ("import sys; sys.exit(5)", "exit code 5: no output"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL, perhaps for lack of memory"),
    ],
)
def test_a_failure_is_reported_in_one_line(tmp_path, code, reason):
    log = tmp_path / "x.log"
    log.write_text("ValueError: of an earlier command\n")
    with pytest.raises(CommandFailedError, match=reason):
        python(code, log)


@pytest.mark.slow
def test_what_a_slow_command_printed_is_kept_and_all_its_processes_end(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(CommandFailedError, match=r"took longer than 5 s") as failed:
        python(code, tmp_path / "x.log", limit_s=5.0)
    assert gone(int(failed.value.printed))


def test_processes_that_a_command_leaves_behind_end_with_it(tmp_path):
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " stdout=subprocess.DEVNULL)\n"
        "print(child.pid)\n"
    )
    assert gone(int(python(code, tmp_path / "x.log")))


def test_processes_end_with_the_comparison(tmp_path):
    child = "import os, time; open('pid', 'w').write(f'{os.getpid()} '); time.sleep(600)"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks' / 'peers')!r})\n"
        "import environments, pathlib\n"
        "environments.end_with_processes()\n"
        f"environments.run([sys.executable, '-c', {child!r}], 600.0, pathlib.Path('x.log'))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE)
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text().endswith(" ")):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in said
    assert gone(int(pid.read_text()))


def gone(process: int) -> bool:
    for _ in range(500):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True  # killed; whoever adopted it has not looked yet
        time.sleep(0.02)
    return False


def test_a_command_that_is_not_there_is_a_failure(tmp_path):
    with pytest.raises(CommandFailedError, match="cannot be started"):
        run([str(tmp_path / "nothing")], 5.0, tmp_path / "x.log")


def test_a_peer_without_packages_runs_in_this_environment(tmp_path):
    environment = Environment("sylvan", PEERS["sylvan"], tmp_path)
    environment.prepare(1.0)
    assert environment.python == Path(sys.executable)
    assert not (tmp_path / "envs").exists()


@pytest.mark.slow
def test_a_peer_that_cannot_be_installed_is_reported_and_retried(tmp_path):
    peer = Peer(PEERS["vllm"].load, {"bf16": "bf16"}, "nothing", packages=("./not-a-package",))
    environment = Environment("nothing", peer, tmp_path)
    with pytest.raises(CommandFailedError, match="not-a-package"):
        environment.prepare(300.0)
    with pytest.raises(CommandFailedError, match="longer than 0 s"):
        environment.prepare(0.01)
    assert "site-packages" in next(tmp_path.rglob("host.pth")).read_text()


def test_what_is_installed_is_not_installed_again_unless_other_packages_are_wanted(tmp_path):
    peer = Peer(PEERS["vllm"].load, {}, "x", packages=("./a",), unwanted=("b",))
    done = tmp_path / "envs" / "x" / ".done"
    done.parent.mkdir(parents=True)
    done.write_text("./a\nnot b")
    Environment("x", peer, tmp_path).prepare(1.0)  # starts nothing
    done.write_text("./a")
    with pytest.raises(CommandFailedError, match="longer than 0 s"):
        Environment("x", peer, tmp_path).prepare(0.01)


def test_results_are_on_the_disk_at_once_and_resumed_by_choice(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    Journal(path, SETTINGS, resume=False).add(result())
    again = Journal(path, SETTINGS, resume=True)
    assert again.done(result().key)
    assert again.results(["10M"], ["sylvan"]) == [result()]
    fresh = Journal(path, SETTINGS, resume=False)
    assert fresh.results(["10M"], ["sylvan"]) == []
    assert path.with_name("results.jsonl.before").exists()


def test_only_whole_results_of_the_same_settings_are_resumed(tmp_path):
    path = tmp_path / "results.jsonl"
    journal = Journal(path, SETTINGS, resume=False)
    journal.add(result())
    journal.add(result(turn=1, failed="took longer than 5 s"))
    with path.open("a") as file:
        file.write('{"shape": "10M", "pe')
    journal = Journal(path, SETTINGS, resume=True)
    assert journal.done(result().key)
    assert not journal.done(result(turn=1).key)  # tried again
    assert journal.spent_s(result(turn=2).key) == 5.0
    other = Journal(path, ("threads 1",), resume=True)
    assert other.results(["10M"], ["sylvan"]) == []


def test_a_table_for_each_shape_and_format_with_medians_spread_and_what_is_missing():
    found = [result(turn=turn) for turn in range(3)]
    found += [result("llama.cpp", rates={"decode 8": 1234.5}, failed="took longer than 5 s")]
    text = report(found, ["vllm: cannot be installed: no wheel"], "About.")
    assert text.startswith("About. Versions: llama.cpp 1.0, sylvan 1.0.\n")
    assert "### 10M, bf16\n\n| work | sylvan | llama.cpp |\n|---|---:|---:|\n" in text
    assert "| decode 1 | 11.00 [10.00-12.00] | - |" in text
    assert "| decode 8 | - | 1,234 |" in text
    assert "- vllm: cannot be installed: no wheel" in text
    assert "- llama.cpp, 10M, bf16, measure, round 1: took longer than 5 s" in text


def test_only_the_part_between_the_marks_is_written(tmp_path):
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{BEGIN}\n\nold\n\n{END}\nafter\n")
    write_docs("new", page)
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        write_docs("new", page)
    assert page.read_text() == "no marks"


def test_the_docs_have_the_marks():
    text = (ROOT / "docs" / "performance-details.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index(BEGIN) < text.index(END)


def test_the_worker_is_understood_between_what_libraries_print():
    text = (
        'loading\n{"version": "x 1"}\n[1]\n{"what": "decode 1", "value": 3}\n{"tokens": [[1, 2]]}'
    )
    assert parsed(text + '\n{"what": "dec') == {
        "version": "x 1",
        "rates": {"decode 1": 3.0},
        "tokens": [[1, 2]],
    }


def test_a_peer_that_answers_other_counts_of_tokens_is_refused():
    def short(prompts, count):
        return [[1] * min(count, 3) for _ in prompts]

    assert worker.counted(short)([[5], [6]], 3) == [[1, 1, 1], [1, 1, 1]]
    with pytest.raises(ValueError, match="2 answers of 4 tokens"):
        worker.counted(short)([[5], [6]], 4)


class Scripted:
    """Replaces a peer: prints a given output, or fails with a reason."""

    def __init__(self, **script: object) -> None:
        self.script, self.asked = script, []

    def work(self, *words: str, limit_s: float) -> str:
        assert limit_s == 30.0
        self.asked.append((words[0], words[words.index("--round") + 1]))
        said = self.script.get("_".join(self.asked[-1]), self.script.get(words[0]))
        if isinstance(said, Exception):
            raise said
        return "".join(json.dumps({"what": w, "value": v}) + "\n" for w, v in said.items())


def setting(tmp_path: Path, deadline: float = float("inf")) -> compare.Setting:
    return compare.Setting(tmp_path, 2, 30.0, 30.0, deadline, ())


def candidate(name: str, environment: Scripted) -> compare.Candidate:
    return compare.Candidate("10M", name, "bf16", environment, (name, "bf16", "m", "x"))


def test_one_that_fails_keeps_what_it_said_and_the_rest_continues(tmp_path, capsys):
    late = CommandFailedError("took longer than 30 s", '{"what": "prefill 512", "value": 9}\n')
    bad = Scripted(measure={"prefill 512": 8, "decode 1": 7}, measure_1=late)
    good = Scripted(measure={"prefill 512": 5}, shared={"shared prefix": 6})
    found = [candidate("llama.cpp", bad), candidate("sylvan", good)]
    journal = Journal(tmp_path / "r", ("threads 2",), resume=False)

    compare.measure(found, 3, setting(tmp_path), journal, compare.LeftOut())

    assert bad.asked == [("measure", "0"), ("measure", "1")]
    assert len(good.asked) == 6
    kept = journal.results(["10M"], ["llama.cpp"])
    assert [r.rates for r in kept] == [{"prefill 512": 8, "decode 1": 7}, {"prefill 512": 9}]
    assert [r.failed for r in kept] == [None, "took longer than 30 s"]
    said = capsys.readouterr().err
    assert "round 2, llama.cpp 10M bf16, measure: took longer than 30 s" in said

    again = Journal(tmp_path / "r", ("threads 2",), resume=True)
    compare.measure(found, 3, setting(tmp_path), again, compare.LeftOut())
    assert bad.asked[2:] == [("measure", "1")]  # tried again, and fails again
    assert len(good.asked) == 6  # all there


def test_nothing_starts_that_would_end_after_the_deadline(tmp_path):
    good = Scripted(measure={"prefill 512": 5})
    found = [candidate("llama.cpp", good)]
    out = compare.LeftOut()
    journal = Journal(tmp_path / "r", ("threads 2",), resume=False)
    journal.add(result("llama.cpp", spent_s=1000.0))

    soon = time.monotonic() + 500
    compare.measure(found, 3, setting(tmp_path, soon), journal, out)

    assert good.asked == []
    assert out.lines == ["2 of 3 turns, for which the time was too short"]


def test_a_worker_without_results_has_failed(tmp_path):
    found = [candidate("llama.cpp", Scripted(measure={}))]
    journal = Journal(tmp_path / "r", ("threads 2",), resume=False)
    compare.measure(found, 1, setting(tmp_path), journal, compare.LeftOut())
    (kept,) = journal.results(["10M"], ["llama.cpp"])
    assert kept.failed == "the worker printed no result"


def test_vllm_is_given_as_many_cores_as_threads(tmp_path):
    assert PEERS["vllm"].start_environment is not None
    cores = PEERS["vllm"].start_environment(tmp_path, 1)["VLLM_CPU_OMP_THREADS_BIND"].split(",")
    assert [int(core) for core in cores] == [min(os.sched_getaffinity(0))]
