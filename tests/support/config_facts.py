"""Facts of an imagined machine and model, for tests of the configuration."""

from __future__ import annotations

from sylvan.config.facts import AttentionFacts, CheckpointInfo, DeviceFacts, Facts

GIB = 1 << 30


def make_model(**changes):
    values = {
        "name": "tiny",
        "context_len": 2048,
        "vocab_size": 4096,
        "dtype": "bfloat16",
        "num_params": 5_000_000,
        "num_linear_params": 4_000_000,
        "kv_per_token": 1536,
        "work_per_token": 4096,
    }
    return CheckpointInfo(**(values | changes))


def make_facts(**changes):
    cpu = DeviceFacts(
        kind="cpu",
        cores=2,
        total_bytes=8 * GIB,
        available_bytes=4 * GIB,
        fast_dtypes=frozenset({"float32", "bfloat16"}),
        runners=("eager",),
        exact_runners=frozenset({"eager", "program"}),
    )
    values = {
        "devices": {"cpu": cpu},
        "model": make_model(),
        "attention": {
            "paged": AttentionFacts(
                devices=frozenset({"cpu"}), page_size=64, page_sizes=frozenset({16, 64})
            ),
            "exact": AttentionFacts(devices=frozenset({"cpu"}), batch_invariant=True),
            "elsewhere": AttentionFacts(devices=frozenset({"cuda"}), batch_invariant=True),
            "half": AttentionFacts(
                devices=frozenset({"cpu", "odd"}),
                dtypes=frozenset({"float16", "bfloat16"}),
                max_head_dim=128,
            ),
            "native": AttentionFacts(
                devices=frozenset({"cpu"}), batch_invariant=True, runners=frozenset({"program"})
            ),
        },
        "not_installed": {"absent": "pip install 'sylvan[absent]'"},
        "options": {
            "attention": ("paged", "exact", "elsewhere", "half", "native", "absent"),
            "scheduler.policy": ("fcfs", "lpm", "dfs_weight"),
            "cache.eviction": ("lru", "lfu"),
            "grammar.backend": (),
        },
    }
    return Facts(**(values | changes))
