"""Texts beside the request: found by their longest match, kept apart by tenant, and bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import AddCorpus, ListCorpora, RemoveCorpus
from sylvan.runtime.core.req import Req
from sylvan.runtime.features.speculation.control import Speculation
from sylvan.runtime.features.speculation.corpus import (
    END,
    MAX_TENANTS,
    Corpus,
    GivenCorpora,
    TenantCorpora,
)
from sylvan.runtime.features.speculation.ngram import NgramDrafter
from tests.support.kv import VOCAB, World, alone, request

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(st.lists(texts, max_size=30), st.integers(4, 60))
def test_the_newest_tokens_are_kept_and_never_more_than_there_is_room_for(every, most):
    corpus = Corpus(most)
    whole = []
    for text in every:
        corpus.add(np.array(text, np.int32))
        whole += [*text[-(most // 2 - 1) :], END]
        assert len(corpus.ids) <= most
        assert corpus.ids.tolist() == whole[-len(corpus.ids) :]
        assert len(corpus.ids) >= min(len(whole), most // 2)


def test_no_draft_goes_beyond_a_text():
    corpora = GivenCorpora(100)
    corpora.add("some", [[5, 6, 7], [8, 9]])
    drafter = NgramDrafter(2, 8, given=corpora)
    req = Req(request("a", [1, 5, 6]), 0)

    assert drafter.propose(req, 4).tokens == (7,)
    assert drafter.propose(Req(request("b", [6, 7]), 1), 4).tokens == ()


def test_corpora_come_and_go_by_name_and_are_bounded():
    corpora = GivenCorpora(20)
    added = corpora.execute(AddCorpus(id="a", texts=((1,) * 5, (2,) * 5)))
    corpora.execute(AddCorpus(id="b", texts=((3,) * 7,)))

    assert added == {"corpus_id": "a", "loaded_token_count": 10}
    assert corpora.execute(ListCorpora()) == {"corpus_token_counts": {"a": 10, "b": 7}}
    assert [corpus.ids.tolist() for corpus in corpora.every] == [
        [*[1] * 5, END, *[2] * 5, END],
        [*[3] * 7, END],
    ]
    with pytest.raises(RequestError, match="at most 20 tokens"):
        corpora.execute(AddCorpus(id="c", texts=((4,),)))
    corpora.execute(AddCorpus(id="a", texts=((4,),)))
    corpora.execute(RemoveCorpus(id="b"))
    assert corpora.execute(ListCorpora()) == {"corpus_token_counts": {"a": 1}}
    with pytest.raises(RequestError, match="no corpus 'b'") as refused:
        corpora.execute(RemoveCorpus(id="b"))
    assert refused.value.status == 404
    with pytest.raises(RequestError, match="a corpus has texts"):
        corpora.execute(AddCorpus(id="d", texts=()))


def of_tenant(rid, prompt, tenant, **also):
    return request(rid, prompt, tenant=tenant, **also)


def test_no_tenant_finds_the_texts_of_another():
    corpora = TenantCorpora(100)
    drafter = NgramDrafter(2, 8, corpora)
    drafter.forget(Req(of_tenant("a", [1, 2, 3, 4, 5], "blue"), 0))

    assert drafter.propose(Req(of_tenant("b", [9, 2, 3], "blue"), 1), 4).tokens == (4, 5)
    assert drafter.propose(Req(of_tenant("c", [9, 2, 3], "red"), 2), 4).tokens == ()
    for number in range(MAX_TENANTS):
        drafter.forget(Req(of_tenant("d", [1, 2], f"t{number}"), 3))
    assert drafter.propose(Req(of_tenant("e", [9, 2, 3], "blue"), 4), 4).tokens == ()


@pytest.mark.parametrize("shared", [0, 1000])
def test_a_second_request_is_drafted_from_the_first(shared):
    drafter = NgramDrafter(1, 8, TenantCorpora(shared) if shared else None)
    world = World(
        capabilities=(Speculation(drafter, 4, VOCAB, adaptive=False),), max_batch_tokens=64
    )
    for rid in "ab":
        world.scheduler.add(request(rid, [4, 5, 6], new=40))
        world.run()
        assert world.tokens[rid] == alone(request(rid, [4, 5, 6], new=40))
    first, second = (world.outputs[rid][-1].usage.drafts for rid in "ab")

    right = [0 if found is None else found.accepted for found in (first, second)]
    assert (right[1] > right[0] + 10) == bool(shared)
    world.check_empty()
