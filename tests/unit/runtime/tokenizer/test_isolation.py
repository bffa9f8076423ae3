"""Tenants never share cached prefixes, and cannot choose each other's salts."""

from __future__ import annotations

from sylvan.runtime.tokenizer.isolation import CacheIsolation


def test_tenants_have_salts_of_their_own():
    cache = CacheIsolation(b"secret")
    assert cache.salt("", "") == ""
    assert cache.salt("acme", "") != cache.salt("other", "")
    assert cache.salt("acme", "") == cache.salt("acme", "")
    assert cache.salt("acme", "x").startswith(cache.owner("acme"))
    assert cache.salt("acme", "x") != cache.salt("acme", "y")


def test_nobody_can_choose_the_salt_of_another():
    cache = CacheIsolation(b"secret")
    for stolen in (cache.salt("acme", ""), cache.salt("acme", "x"), cache.owner("acme")):
        assert cache.salt("other", stolen) != stolen
        assert cache.salt("", stolen) != stolen
        assert not cache.salt("other", stolen).startswith(cache.owner("acme"))


def test_servers_do_not_share_secrets():
    assert CacheIsolation().salt("acme", "") != CacheIsolation().salt("acme", "")
