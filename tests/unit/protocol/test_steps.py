"""The ring of a scheduler's last steps."""

from __future__ import annotations

import pytest

from sylvan.protocol.steps import CAPACITY, StepLog, map_steps, read_steps, size

COUNTS = (3, 2, 40, 42, 5, 1, 7, 0)


def test_steps_are_read_as_they_were_written():
    log = StepLog()
    number = log.launched(1.0, 1.5, COUNTS, b"rid-1")
    [under_way] = read_steps(log.buffer)
    assert under_way.completed_s == 0
    log.completed(number, 2.0)
    [step] = read_steps(log.buffer)
    assert (step.planned_s, step.launched_s, step.completed_s, step.failed) == (
        1.0,
        1.5,
        2.0,
        False,
    )
    assert (step.requests, step.decodes, step.prompt_tokens, step.tokens) == COUNTS[:4]
    assert (step.running, step.waiting, step.retractions, step.drafted) == COUNTS[4:]
    assert (step.number, step.first_rid) == (1, "rid-1")


@pytest.mark.parametrize(
    ("counts", "mode"),
    [
        ((3, 3, 0, 3, 3, 0, 0, 0), "DECODE"),
        ((1, 0, 40, 40, 1, 0, 0, 0), "EXTEND"),
        ((3, 2, 40, 42, 3, 0, 0, 0), "MIXED"),
        ((3, 2, 0, 3, 3, 0, 0, 4), "TARGET_VERIFY"),
    ],
)
def test_forward_modes(counts, mode):
    log = StepLog()
    log.launched(1.0, 1.5, counts, b"r")
    assert read_steps(log.buffer)[0].forward_mode == mode


def test_the_ring_keeps_the_newest():
    log = StepLog()
    for at in range(CAPACITY + 10):
        number = log.launched(at, at, COUNTS, ("é" * 40).encode())  # cut amid a character
        log.completed(number, at + 1.0, failed=at % 2 == 0)
    steps = read_steps(log.buffer)
    assert [step.number for step in steps] == [*range(11, CAPACITY + 11)]
    assert [step.number for step in read_steps(log.buffer, 2)] == [CAPACITY + 9, CAPACITY + 10]
    log.completed(1, 5.0)  # long overwritten
    assert read_steps(log.buffer) == steps


def test_another_process_reads_what_was_written_before_and_after(tmp_path):
    log = StepLog()
    log.launched(1.0, 1.0, COUNTS, b"before")
    log.move_to(tmp_path / "steps")
    log.launched(2.0, 2.0, COUNTS, b"after")
    with map_steps(tmp_path / "steps") as buffer:
        assert [step.first_rid for step in read_steps(buffer)] == ["before", "after"]
        StepLog().move_to(tmp_path / "steps")  # a successor: the old file stays as it was
        assert len(read_steps(buffer)) == 2
    with map_steps(tmp_path / "steps") as buffer:
        assert read_steps(buffer) == []


def test_a_file_that_is_no_ring_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(ValueError, match="size"):
        map_steps(tmp_path / "short")
    assert size() < 1 << 20
