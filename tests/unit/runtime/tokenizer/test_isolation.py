"""Tenants never share cached prefixes, and cannot choose each other's salts."""

from __future__ import annotations

import numpy as np

from sylvan.runtime.tokenizer.isolation import MIN_SHARED_TOKENS, CacheIsolation


def test_tenants_have_salts_of_their_own():
    cache = CacheIsolation(b"secret")
    assert cache.salt("", "") == ""
    assert cache.salt("acme", "") != cache.salt("other", "")
    assert cache.salt("acme", "") == cache.salt("acme", "")
    assert cache.salt("acme", "x").startswith(cache.owner("acme"))
    assert cache.salt("acme", "x") != cache.salt("acme", "y")


def test_salts_of_other_tenants_cannot_be_chosen():
    cache = CacheIsolation(b"secret")
    for stolen in (cache.salt("acme", ""), cache.salt("acme", "x"), cache.owner("acme")):
        assert cache.salt("other", stolen) != stolen
        assert cache.salt("", stolen) != stolen
        assert not cache.salt("other", stolen).startswith(cache.owner("acme"))


def test_servers_do_not_share_secrets():
    assert CacheIsolation().salt("acme", "") != CacheIsolation().salt("acme", "")


def test_the_longest_public_start_counts_if_it_is_worth_sharing():
    def ids(*numbers: int) -> np.ndarray:
        return np.array(numbers, np.int32)

    cache = CacheIsolation()
    long = range(2 * MIN_SHARED_TOKENS)
    assert cache.shared_tokens(ids(*long)) == 0
    cache.share(ids(*long[:MIN_SHARED_TOKENS], 7))
    cache.share(ids(*long))

    assert cache.shared_tokens(ids(*long, 1, 2)) == len(long)
    assert cache.shared_tokens(ids(*long[:-3], 99)) == len(long) - 3
    assert cache.shared_tokens(ids(*long[: MIN_SHARED_TOKENS - 1], 99)) == 0
    assert cache.shared_tokens(ids()) == 0
