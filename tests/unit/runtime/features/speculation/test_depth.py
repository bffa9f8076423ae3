"""How far all requests of a step are drafted for, and when what does not pay is tried again."""

from __future__ import annotations

import itertools

import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.features.speculation.depth import LONGEST_PAUSE, CommonDepth, Pauses


def req_of(rid="a"):
    ids = np.array([1, 2, 3], np.int32)
    sampling = SamplingParams(max_new_tokens=100)
    return Req(GenerateRequest(rid=rid, input_ids=ids, output_ids=EMPTY_IDS, sampling=sampling))


def depth_after(step_s, draft_s, *, right, adaptive=True):
    """Of a request whose draft tokens were right or not, by what steps and draft tokens take."""
    now = itertools.count()
    depth = CommonDepth(4, lambda: next(now) * step_s, adaptive=adaptive)
    req = req_of()
    depth.follow(req)
    for _ in range(40):
        depth.timer.begin(Batch((Slice(req, 2, 3, True),)))
        depth.timer.end()
        depth.record_draft_time(4 * draft_s, 4)
        known = req.tokens.length
        for token in (7, 8, 9, 10):
            req.tokens.append(token)
        depth.record(req, (7, 8, 9, 10) if right else (1, 1, 1, 1), known)
    return depth.of([req])


def test_drafts_are_as_many_as_pay():
    assert depth_after(1.0, 0.01, right=True) == 4
    assert depth_after(1.0, 2.0, right=True) == 0
    assert depth_after(1.0, 0.01, right=False) == 0
    assert depth_after(1.0, 2.0, right=False, adaptive=False) == 4


def test_nothing_is_drafted_before_anything_was_measured():
    depth, req = CommonDepth(4, lambda: 0.0, adaptive=True), req_of()
    depth.follow(req)

    assert depth.of([req]) == 0


def test_requests_that_ended_or_make_vectors_are_not_followed():
    depth = CommonDepth(4, lambda: 0.0, adaptive=True)
    ended, vectors = req_of("b"), Req(EmbedRequest(rid="c", input_ids=np.array([1], np.int32)))
    ended.finish = Finish(type="abort")
    for req in (ended, vectors, live := req_of()):
        depth.follow(req)

    assert depth.followed == [live]
    depth.forget(live)
    assert depth.followed == []


def test_what_does_not_pay_is_tried_less_and_less_often_and_what_pays_in_each_step():
    pauses, tried = Pauses(), list[int]()
    for step in range(400):
        if pauses.due():
            tried.append(step)
            pauses.record_retry(pays=False)
    gaps = np.diff(tried).tolist()
    assert gaps[:5] == [2, 4, 8, 16, 32]
    assert set(gaps[5:]) == {LONGEST_PAUSE}

    while not pauses.due():
        pass
    pauses.record_retry(pays=True)
    assert pauses.due()
