from __future__ import annotations

from pathlib import Path

import pytest

from sylvan.config.aliases import aliases
from sylvan.config.fields import fields, get, sections
from sylvan.config.flags import CONFIG_OPTIONS, parse_flags
from sylvan.config.load import load
from sylvan.config.sources import from_keywords
from sylvan.protocol.errors import ConfigError

FLAGS = {
    "--model-path m": ("model", "m"),
    "--dp-size 2": ("server.replicas", 2),
    "--data-parallel-size 2": ("server.replicas", 2),
    "--dp 2": ("server.replicas", 2),
    "--grpc-port 9000": ("server.grpc_port", 9000),
    "--register http://g:1": ("server.register", ("http://g:1",)),
    "--model m": ("model", "m"),
    "--tokenizer-path t": ("tokenizer", "t"),
    "--served-model-name n": ("served_model_name", "n"),
    "--load-format dummy": ("load_format", "dummy"),
    "--trust-remote-code": ("trust_remote_code", True),
    "--dtype half": ("dtype", "float16"),
    "--quantization w8a8": ("quantization", "w8a8"),
    "--context-length 32k": ("context_len", 32000),
    "--device cpu": ("device", "cpu"),
    "--enable-hierarchical-cache": ("tiers.write_policy", "write_through"),
    "--enable-hicache": ("tiers.write_policy", "write_through"),
    "--hicache-storage-backend file": ("tiers.storage", "file"),
    "--hicache-storage-backend redis://h/0": ("tiers.storage", "redis://h/0"),
    '--hicache-storage-backend-extra-config {"prefetch_threshold":9}': (
        "tiers.prefetch_min_tokens",
        9,
    ),
    "--hicache-ratio 1.5": ("tiers.host_ratio", 1.5),
    "--media-url-max-file-size-mb 16": ("media.item_bytes", 16 << 20),
    "--allowed-media-domains example.org": ("media.allowed_hosts", ("example.org",)),
    "--mm-processor-worker-num 2": ("media.workers", 2),
    "--hicache-size 2": ("tiers.host_bytes", 2_000_000_000),
    "--hicache-write-policy write_back": ("tiers.write_policy", "write_back"),
    "--hicache-storage-prefetch-policy wait_complete": ("tiers.prefetch", "wait_complete"),
    "--record flight": ("observe.record", "flight"),
    "--random-seed 3": ("seed", 3),
    "--attention-backend reference": ("attention", "reference"),
    "--disable-cuda-graph": ("runner", "eager"),
    "--kv-cache-dtype auto": ("cache.dtype", "model"),
    "--kv-cache-dtype fp8_e4m3": ("cache.dtype", "fp8_e4m3"),
    "--enable-deterministic-inference": ("deterministic", True),
    "--mem-fraction-static 0.8": ("cache.memory", 0.8),
    "--kv-memory 2GiB": ("cache.memory", 2 << 30),
    "--max-total-tokens 4Ki": ("cache.max_tokens", 4096),
    "--page-size 64": ("cache.page_size", 64),
    "--is-embedding": ("task", "vectors"),
    "--encoder-only": ("media.encoder_only", True),
    "--encoder-urls http://a:1 http://b:1": (
        "media.encoder_urls",
        ("http://a:1", "http://b:1"),
    ),
    "--language-only": ("media.encoder_backend", "none"),
    "--language-model-only": ("media.encoder_backend", "none"),
    "--disable-radix-cache": ("cache.prefix", "none"),
    "--radix-eviction-policy lfu": ("cache.eviction", "lfu"),
    "--chunked-prefill-size 512": ("scheduler.chunk_tokens", 512),
    "--chunked-prefill-size -1": ("scheduler.chunk_tokens", 0),
    "--max-prefill-tokens 4096": ("scheduler.max_batch_tokens", 4096),
    "--max-running-requests 8": ("scheduler.max_running_reqs", 8),
    "--max-queued-requests 9": ("scheduler.max_waiting_reqs", 9),
    "--schedule-policy dfs-weight": ("scheduler.policy", "dfs_weight"),
    "--policy fcfs": ("scheduler.policy", "fcfs"),
    "--schedule-conservativeness 0.5": ("scheduler.conservativeness", 0.5),
    "--disable-overlap-schedule": ("scheduler.overlap", "off"),
    "--overlap on": ("scheduler.overlap", "on"),
    "--priority-scheduling-preemption-threshold 3": ("scheduler.preempt_threshold", 3),
    "--watchdog-timeout 60": ("scheduler.hang_timeout_s", 60.0),
    "--disable-priority-preemption": ("scheduler.preempt_threshold", None),
    "--host 0.0.0.0": ("server.host", "0.0.0.0"),
    "--port 31000": ("server.port", 31000),
    "--uds /tmp/s": ("server.uds", "/tmp/s"),
    "--fastapi-root-path /v": ("server.root_path", "/v"),
    "--ssl-certfile c": ("server.ssl_certfile", "c"),
    "--ssl-ca-certs a": ("server.ssl_ca_certs", "a"),
    "--ssl-keyfile k": ("server.ssl_keyfile", "k"),
    "--chat-template f": ("text.chat_template", "f"),
    "--tool-call-parser hermes": ("text.tool_parser", "hermes"),
    "--reasoning-parser qwen3": ("text.reasoning_parser", "qwen3"),
    "--sampling-defaults openai": ("text.sampling_defaults", "openai"),
    "--incremental-streaming-output": ("text.incremental_stream", True),
    "--stream-response-default-include-usage": ("text.stream_include_usage", True),
    "--max-mamba-cache-size 40": ("cache.max_states", 40),
    "--file-storage-path d": ("server.data_dir", "d"),
    "--stream-interval 4": ("text.stream_interval", 4),
    "--enable-cache-report": ("text.cache_report", True),
    "--preferred-sampling-params top_k=5": ("text.preferred_sampling_params", {"top_k": 5}),
    '--default-chat-template-kwargs {"a":[1]}': (
        "text.default_chat_template_kwargs",
        {"a": [1]},
    ),
    "--scheduler.tenant-weights acme=2": ("scheduler.tenant_weights", {"acme": 2.0}),
    "--grammar-backend xgrammar": ("grammar.backend", "xgrammar"),
    "--log-level warning": ("observe.log_level", "warning"),
    "--log-requests": ("observe.log_requests", True),
    "--log-requests-level 3": ("observe.log_requests_level", 3),
    "--log-requests-format json": ("observe.log_requests_format", "json"),
    "--log-requests-target stdout /logs": ("observe.log_requests_target", ("stdout", "/logs")),
    "--uvicorn-access-log-exclude-prefixes /metrics /live": (
        "observe.access_log_exclude",
        ("/metrics", "/live"),
    ),
    "--enable-trace": ("observe.trace", True),
    "--otlp-traces-endpoint collector:4317": ("observe.trace_endpoint", "http://collector:4317"),
    "--otlp-service-name llm": ("observe.trace_service", "llm"),
    '--extra-metric-labels {"region":"eu"}': ("observe.metric_labels", {"region": "eu"}),
    "--tokenizer-metrics-allowed-custom-labels team user": (
        "observe.custom_labels",
        ("team", "user"),
    ),
    "--bucket-time-to-first-token 0.1 1": ("observe.ttft_buckets", (0.1, 1.0)),
    "--bucket-inter-token-latency 0.1 1": ("observe.token_buckets", (0.1, 1.0)),
    "--bucket-e2e-request-latency 1 10": ("observe.e2e_buckets", (1.0, 10.0)),
    "--prompt-tokens-buckets tse 1000 2 8": (
        "observe.prompt_token_buckets",
        ("tse", "1000", "2", "8"),
    ),
    "--generation-tokens-buckets custom 1 10": (
        "observe.output_token_buckets",
        ("custom", "1", "10"),
    ),
    "--lora-paths a=/x /y/b": ("lora.adapters", {"a": "/x", "b": "/y/b"}),
    '--lora-paths {"lora_name":"a","lora_path":"/x"}': ("lora.adapters", {"a": "/x"}),
    "--enable-lora": ("lora.max_per_batch", 8),
    "--max-loras-per-batch 4": ("lora.max_per_batch", 4),
    "--max-lora-rank 16": ("lora.max_rank", 16),
    "--max-loaded-loras 9": ("lora.max_loaded", 9),
    "--lora-eviction-policy fifo": ("lora.eviction", "fifo"),
    "--speculative-algorithm NGRAM": ("speculative.algorithm", "ngram"),
    "--speculative-algorithm NGRAM --speculative-ngram-external-corpus-path f": (
        "speculative.corpus",
        "f",
    ),
    "--speculative-algorithm NGRAM --speculative-ngram-external-corpus-max-tokens 9": (
        "speculative.corpus_tokens",
        9,
    ),
    "--speculative-algorithm E --speculative-draft-model-path d": ("speculative.draft_model", "d"),
    "--speculative-algorithm E --speculative-draft-model d": ("speculative.draft_model", "d"),
    "--speculative-algorithm E --speculative-num-steps 3": ("speculative.num_steps", 3),
    "--speculative-algorithm E --speculative-eagle-topk 4": ("speculative.topk", 4),
    "--speculative-algorithm NEXTN": ("speculative.algorithm", "nextn"),
    "--speculative-algorithm MTP": ("speculative.algorithm", "nextn"),
    "--speculative-algorithm E --speculative-num-draft-tokens 8": (
        "speculative.num_draft_tokens",
        8,
    ),
    "--speculative-algorithm NGRAM --speculative-adaptive": ("speculative.adaptive", True),
    "--speculative-algorithm NGRAM --speculative-ngram-max-trie-depth 9": (
        "speculative.max_match",
        9,
    ),
    "--tp-size 2": ("parallel.tp", 2),
    "--moe-a2a-backend deepep": ("parallel.expert_exchange", "deepep"),
    "--moe-a2a-backend none": ("parallel.expert_exchange", "all_gather"),
    "--moe-dense-tp-size 1": ("parallel.moe_dense_tp", 1),
    "--disable-custom-all-reduce": ("parallel.backend", "nccl"),
    "--pp 2": ("parallel.pp", 2),
    "--pp-max-micro-batch-size 8": ("parallel.pp_batch", 8),
    "--pp-async-batch-depth 1": ("parallel.pp_ahead", 1),
    "--pp-size 2": ("parallel.pp", 2),
    "--pipeline-parallel-size 2": ("parallel.pp", 2),
    "--tensor-parallel-size 2": ("parallel.tp", 2),
    "--tp 2": ("parallel.tp", 2),
    "--ep-size 2": ("parallel.ep", 2),
    "--expert-parallel-size 2": ("parallel.ep", 2),
    "--ep 2": ("parallel.ep", 2),
    "--ep-num-redundant-experts 4": ("parallel.redundant_experts", 4),
    "--init-expert-location f.json": ("parallel.expert_placement", "f.json"),
    "--nnodes 2": ("parallel.nodes", 2),
    "--enable-eplb": ("parallel.rebalance", True),
    "--eplb-rebalance-num-iterations 50": ("parallel.rebalance_steps", 50),
    "--placement ray": ("parallel.placement", "ray"),
    "--use-ray": ("parallel.placement", "ray"),
    "--attn-dp-size 2": ("parallel.attention_dp", 2),
    "--enable-dp-attention": ("parallel.attention_dp", "auto"),
    "--node-rank 1": ("parallel.node_rank", 1),
    "--dist-init-addr h:1": ("parallel.address", "h:1"),
    "--nccl-init-addr h:1": ("parallel.address", "h:1"),
    "--dist-timeout 30": ("parallel.join_timeout_s", 30.0),
    "--disaggregation-mode prefill": ("disagg.role", "prefill"),
    "--disaggregation-mode null": ("disagg", None),
    "--disaggregation-mode decode --enable-pd-role-switch": ("disagg.switchable", True),
    "--enable-pdmux": ("pdmux.wait_ms", 50.0),
    "--disaggregation-mode decode --disaggregation-transfer-backend shm": (
        "disagg.transfer",
        "shm",
    ),
    "--disaggregation-mode decode --disaggregation-bootstrap-port 5": ("disagg.bootstrap_port", 5),
    '--kv-events-config {"publisher":"zmq","topic":"t"}': ("kv_events.topic", "t"),
    '--kv-events-config {"publisher":"null"}': ("kv_events", None),
}
SECRETS = ("api_key", "admin_api_key", "register_key", "ssl_keyfile_password")


def flags(line):
    return parse_flags(line.split(), CONFIG_OPTIONS)


@pytest.mark.parametrize("line", FLAGS)
def test_flag_sets_its_path(line):
    path, value = FLAGS[line]

    config = load(flags(line).given.settings).config

    assert get(config, path) == value


@pytest.mark.parametrize("name", SECRETS)
def test_secret_flag_sets_its_path(name):
    config = load(flags(f"--{name.replace('_', '-')} k").given.settings).config

    assert get(config, f"server.{name}").reveal() == "k"


def test_every_alias_that_sets_something_is_tried_above():
    tried = {word[2:].replace("-", "_") for line in FLAGS for word in line.split()}
    untried = {n for n, a in aliases().items() if a.target} - tried - set(SECRETS)

    assert untried == set()


@pytest.mark.parametrize("name", [n for n, a in aliases().items() if a.target])
def test_alias_targets_exist_and_are_not_fields(name):
    assert aliases()[name].target in {*fields(), *sections()}
    assert name not in fields()


@pytest.mark.parametrize(("value", "why"), [("much", "gigabytes"), ("-1", "gigabytes")])
def test_sizes_of_the_host_tier_are_gigabytes(value, why):
    with pytest.raises(ConfigError, match=f"hicache.size.*{why}"):
        from_keywords({"hicache_size": value})


def test_no_size_of_the_host_tier_leaves_it_to_the_ratio():
    given = from_keywords({"hicache_size": "0", "hicache_ratio": "2"})
    tiers = load(given.settings).config.tiers
    assert (tiers.host_ratio, tiers.host_bytes) == (2.0, None)


REFUSED = sorted(n for n, a in aliases().items() if not a.target and not a.note)


@pytest.mark.parametrize("name", REFUSED)
def test_flags_of_missing_features_are_refused(name):
    with pytest.raises(ConfigError, match=r"not supported yet: .") as error:
        from_keywords({name: "true" if aliases()[name].is_switch else "something"})

    assert name in str(error.value)


@pytest.mark.parametrize(
    "line",
    ["--init-expert-location trivial"],
)
def test_flags_of_missing_features_may_say_that_they_are_not_wanted(line):
    assert flags(line).given.settings == ()


@pytest.mark.parametrize("name", [n for n, a in aliases().items() if a.note])
def test_flags_without_effect_are_mentioned(name):
    value = "" if aliases()[name].is_switch else " 3"
    given = flags(f"--{name.replace('_', '-')}{value}").given

    assert given.settings == ()
    assert "has no effect" in given.notes[0]


@pytest.mark.parametrize("value", ["1", "0", "1.5", "2GiB", "nan", "-0.1"])
def test_mem_fraction_static_is_a_share(value):
    with pytest.raises(ConfigError, match="share of memory"):
        flags(f"--mem-fraction-static {value}")


@pytest.mark.parametrize("value", [{"a": "/x"}, {"lora_name": "a", "lora_path": "/x"}, ["a=/x"]])
def test_lora_paths_takes_tables_and_lists(value):
    given = from_keywords({"lora_paths": value})

    assert load(given.settings).config.lora.adapters == {"a": "/x"}


def test_a_malformed_switch_is_refused():
    with pytest.raises(ConfigError, match=r"expected true \| false"):
        from_keywords({"disable_radix_cache": "maybe"})


# names, types and defaults of SGLang 0.5.23: "b" is a switch, "[...]" takes several values
SGLANG = [
    line.split("\t")
    for line in (Path(__file__).parent / "sglang_flags.tsv").read_text().splitlines()
]


def test_every_flag_of_sglang_is_known():
    names = {name for name, _, _ in SGLANG}

    assert len(names) > 500
    assert names - aliases().keys() - fields().keys() == set()


@pytest.mark.parametrize(
    ("name", "kind", "default"), [row for row in SGLANG if row[0] in aliases() and row[2]]
)
def test_defaults_of_sglang_are_accepted_where_nothing_is_set(name, kind, default):
    alias = aliases()[name]
    if alias.target:
        return
    spelled = f"--{name.replace('_', '-')}"
    given = parse_flags([spelled, default], CONFIG_OPTIONS).given

    assert given.settings == ()
    assert bool(given.notes) == bool(alias.note)


@pytest.mark.parametrize(("name", "kind"), [row[:2] for row in SGLANG if row[0] in aliases()])
def test_switches_and_lists_are_read_as_sglang_reads_them(name, kind):
    alias = aliases()[name]

    assert alias.is_switch == kind.startswith("b")
    if kind.startswith("[") or kind == "list?":
        assert alias.takes_many


def test_lists_of_refused_flags_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"cuda-graph-bs-decode.*not supported yet: graphs"):
        parse_flags(["--cuda-graph-bs-decode", "1", "2", "4"], CONFIG_OPTIONS)


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_sizes_of_items_are_megabytes_above_0(value):
    with pytest.raises(ConfigError, match=r"media.url.*megabytes"):
        from_keywords({"media_url_max_file_size_mb": value})


def test_no_number_of_media_workers_leaves_it_to_the_default():
    given = from_keywords({"mm_processor_worker_num": 0})
    assert load(given.settings).config.media.workers == 1
