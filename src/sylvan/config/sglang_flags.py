"""SGLang's flags without a counterpart: ignored with a note, or refused with the missing feature.

`name` is a switch, `name=value` takes a value, with SGLang's default, and `name*=` any number of
values. Defaults are accepted, because they request nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

NO_EFFECT: Mapping[str, str] = {
    "white space is always limited by fixed patterns": "constrained_json_max_whitespace_cnt=",
    "there is no such disk cache": "disable_outlines_disk_cache",
    "texts are always tokenised and detokenised in batches": (
        "enable_tokenizer_batch_encode disable_tokenizer_batch_decode "
        "enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size=32 "
        "dynamic_batch_tokenizer_batch_timeout=0.002 batch_notify_size=16"
    ),
    "sessions may always stream, and never need the cache": (
        "enable_streaming_session enable_session_radix_cache"
    ),
    "thinking budgets are always enforced": "enable_strict_thinking",
    "items are scored one by one, with the same scores": "enable_mis",
    "the server is ready without a warm-up": (
        "warmups= disable_flashinfer_autotune flashinfer_autotune_skip_ops= pre_warm_nccl"
    ),
    "the garbage collector runs only while the server is idle": (
        "gc_threshold= gc_warning_threshold_secs=0.0 enable_cudagraph_gc"
    ),
    "ranks communicate over loopback, on free ports": (
        "nccl_port= gated_launch_port= disable_attn_tp_gather "
        "enable_dp_attention_local_control_broadcast disable_aiter_allreduce_fusion_in_decode "
        "disable_aiter_allreduce_fusion_in_prefill enforce_disable_flashinfer_allreduce_fusion "
        "disable_flashinfer_cutlass_moe_fp4_allgather engine_info_bootstrap_port=6789"
    ),
    "short messages go by symmetric memory where GPUs have any": "enable_torch_symm_mem",
    "the scheduler reads new requests before each step": "scheduler_recv_interval=1",
    "certificates are always renewed from files that changed": "enable_ssl_refresh",
    "metrics are those of the only scheduler": "enable_metrics_for_all_schedulers",
    "request times are in meta_info and in metrics": (
        "show_time_cost enable_request_time_stats_logging"
    ),
    "server.access_log controls the logs of the HTTP server": "log_level_http=",
    "shared experts are computed separately, with the same result": (
        "disable_shared_experts_fusion enforce_shared_experts_fusion"
    ),
    "chunked prompts always use the prefix cache": "disable_chunked_prefix_cache",
    "memory is always divided among full and window layers": (
        "swa_full_tokens_ratio= disable_hybrid_swa_memory swa_prefix_tails="
    ),
    "cache.max_states sets the number of states": "mamba_full_memory_ratio=",
    "weights are mapped and read ahead as the file system allows": (
        "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads=4"
    ),
    "thinking that a template omits is not in the prompt, and so not cached": (
        "strip_thinking_cache"
    ),
    "requests ask for ids (return_prompt_token_ids, return_token_ids)": (
        "return_input_ids return_output_ids"
    ),
    "attention always sums in float32": "triton_attention_reduce_in_fp32",
    "each device has one implementation of adapters": (
        "lora_backend=csgmv max_lora_chunk_size=16 lora_use_virtual_experts"
    ),
    "adapters may change all linear layers, the embedding and the head": "lora_target_modules*=",
    "adapters are always loaded in the background": "enable_lora_overlap_loading",
    "an adapter with wrong tensors is always rejected": "lora_strict_loading",
    "images are always decoded by Pillow": (
        "disable_fast_image_processor image_processor_backend=auto"
    ),
    "digests of items are always computed here": "trust_mm_content_hashes",
    "items are fetched concurrently, without workers": "mm_io_worker_num=0",
    "prepared items are kept as long as their requests": "mm_preprocess_cache_size_mb=",
    "items reach the scheduler with their requests": (
        "mm_feature_transport= enable_broadcast_mm_inputs_process"
    ),
}
"""Why flags have no effect, and these flags; any value is accepted."""

REFUSED: Mapping[str, str] = {
    "gRPC instead of HTTP (--grpc-port serves both)": (
        "smg_grpc_mode grpc_response_timeout_secs=300 smg_http_sidecar_port= sidecar= sidecar_args="
    ),
    "HTTP/2": (
        "enable_http2 http2_max_concurrent_streams=200 http2_initial_connection_window_size=1048576"
    ),
    "several processes on one port": "enable_http_worker_reuseport",
    "chat templates in requests": "trust_request_chat_template",
    "choosing one of several chat templates at the start (requests do: chat_template)": (
        "hf_chat_template_name="
    ),
    "templates for completions (models that fill in are known)": "completion_template=",
    "tools that the server runs": "tool_server=",
    "speech while it is spoken (/v1/audio/transcriptions takes whole sounds)": (
        "asr_max_buffer_seconds=60 asr_max_concurrent_sessions=32"
    ),
    "other tokenizer libraries": "tokenizer_backend=huggingface",
    "other white space in JSON": (
        "constrained_json_whitespace_pattern= constrained_json_disable_any_whitespace"
    ),
    "other priority orders (larger is more urgent)": (
        "schedule_low_priority_values_first default_priority_value= abort_on_priority_when_disabled"
    ),
    "other preemption orders than by priority and age": "retraction_policy=length",
    "other step limits than max_batch_tokens and chunk_tokens": (
        "prefill_max_requests= prefill_decode_interval= prefill_decode_interval_min_bs=0 "
        "enable_dynamic_chunking enable_prefill_delayer prefill_delayer_max_delay_passes=30 "
        "prefill_delayer_token_usage_low_watermark= prefill_delayer_forward_passes_buckets= "
        "prefill_delayer_wait_seconds_buckets= prefill_delayer_queue_min_ratio= "
        "prefill_delayer_max_delay_ms= min_free_slots_delay="
    ),
    "settings of eviction policies": "radix_eviction_policy_config=",
    "other prefix caches": (
        "radix_cache_backend= enable_lmcache lmcache_config_file= enable_flexkv "
        "flexkv_config_file= enable_unified_cache_external_linker "
        "unified_cache_external_linker_backend=mooncake unified_cache_external_linker_config= "
        "enable_linker_mla_dedup"
    ),
    "other layouts of the KV cache": (
        "enable_page_major_kv_layout enable_unified_memory c128_page_size=16 "
        "prefill_only_disable_kv_cache prefill_kv_cache_dequant_dtype=auto enable_hisparse "
        "hisparse_config="
    ),
    "other limits of the host tier": (
        "hicache_host_memory_fraction=0.8 hicache_host_memory_mode=cache"
    ),
    "copies of weights in host memory (resuming reads the checkpoint again)": (
        "enable_weights_cpu_backup enable_draft_weights_cpu_backup"
    ),
    "weights in host memory": (
        "offload_group_size=-1 offload_num_in_group=1 offload_prefetch_step=1 offload_mode=cpu "
        "ple_offload_embedding= ple_offload_backend=pinned ple_offload_dir="
    ),
    "experts in host memory": (
        "enable_paged_experts paged_experts_num_resident= kt_weight_path= kt_method=AMXINT4 "
        "kt_cpuinfer= kt_threadpool_count=2 kt_num_gpu_experts= "
        "kt_max_deferred_experts_per_token="
    ),
    "context and attention parallelism": (
        "attn_cp_size=1 dcp_size=1 dcp_comm_backend= dcp_replicate_q_proj= "
        "cp_strategy= enable_prefill_cp enable_cp_decode_attn_tp enable_dsa_cache_layer_split "
        "enable_kv_cache_sharding enable_dp_lm_head enable_tp_lm_head_all_to_all= "
        "enable_attn_tp_input_scattered enable_shared_experts_attn_tp shared_experts_tp_size= "
        "enable_dense_mlp_attn_tp enable_layernorm_sp enable_megamoe_for_layernorm_sp "
        "moe_dp_size=1 dwdp_size=1 boundary_reduction=auto"
    ),
    "several replicas": (
        "load_balance_method=auto load_publish_endpoint= load_snapshot_publish_interval=15"
    ),
    "other choices of how rows reach experts (--moe-a2a-backend deepep, or --ep alone)": (
        "deepep_v2_mode=direct deepep_config= deepep_dispatcher_output_dtype=auto "
        "flashinfer_a2a_dispatch_type= fuseep_mode=2 ep_dispatch_algorithm="
    ),
    "expert parallelism": (
        "eplb_algorithm=auto "
        "eplb_rebalance_layers_per_chunk= eplb_min_rebalancing_utilization_threshold=1.0 "
        "expert_distribution_recorder_mode= expert_distribution_recorder_buffer_size= "
        "expert_balancedness_report_mode=off elastic_ep_backend= enable_elastic_expert_backup "
        "mooncake_ib_device= enable_waterfill ep_join_mode= ep_join_rank_offset=0 "
        "elastic_ep_initial_size= elastic_ep_scale_timeout=600 max_ep_size="
    ),
    "overlap of half batches": (
        "enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold=0.48"
    ),
    "collectives of GPUs": (
        "enable_nccl_nvls enable_symm_mem enable_mscclpp "
        "enable_quant_communications flashinfer_allreduce_fusion_backend= "
        "enable_aiter_allreduce_fusion enable_fused_moe_sum_all_reduce"
    ),
    "choosing kernels of experts (they follow from the format, the rows and the chip)": (
        "moe_runner_backend=auto enable_w4a4_mxfp4_megamoe flashinfer_mxfp4_moe_precision=default"
    ),
    "choosing kernels of matrices (they follow from the format, the rows and the chip)": (
        "fp8_gemm_runner_backend=auto fp8_gemm_backend=auto fp4_gemm_runner_backend=auto "
        "fp4_gemm_backend=auto bf16_gemm_backend=auto enable_tf32_matmul="
    ),
    "attention kernels by kind of step (each backend has one for either)": (
        "prefill_attention_backend= decode_attention_backend= triton_attention_num_kv_splits=8 "
        "triton_attention_split_tile_size= flashinfer_mla_disable_ragged enable_lean_attention="
    ),
    "sparse attention of DeepSeek": (
        "dsa_prefill_backend= dsa_decode_backend= dsa_triton_union=0 "
        "dsa_paged_mqa_logits_backend=auto dsa_topk_backend=sgl-kernel dsv4_attn_backend=auto "
        "dsv4_prefill_backend=auto enable_deepseek_v4_fp4_indexer enable_dsa_fused_indexer= "
        "enable_return_indexer_topk qsa_indexer_dtype=auto"
    ),
    "other fused kernels": (
        "enable_fused_qk_norm_rope= enable_nvidia_megakernel enable_amd_monokernel "
        "enable_scattered_sconv"
    ),
    "a head that multiplies in float32": "enable_fp32_lm_head",
    "graphs other than by runner (graph captures whole steps, eager none)": (
        "cuda_graph_config= cuda_graph_backend_decode= cuda_graph_backend_prefill= "
        "cuda_graph_max_bs_decode= cuda_graph_max_bs_prefill= cuda_graph_bs_decode*= "
        "cuda_graph_bs_prefill= cuda_graph_max_seq_len_prefill= cuda_graph_prefill_max_context= "
        "disable_decode_cuda_graph disable_prefill_cuda_graph debug_cuda_graph "
        "enable_profile_cuda_graph enable_torch_compile_debug_mode torch_compile_max_bs=32"
    ),
    "choosing kernels of linear attention (each device has one)": (
        "linear_attn_backend=triton linear_attn_decode_backend= linear_attn_prefill_backend= "
        "linear_attn_verify_backend="
    ),
    "choosing kernels and forms of recurrent states": (
        "mamba_backend=triton mamba_ssm_dtype= mamba_max_states_per_path=-1 "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds=0 "
        "mamba_radix_cache_strategy=auto mamba_track_interval=256 enable_int8_mamba_checkpoint "
        "int8_mamba_ckpt_size= enable_linear_replayssm linear_replayssm_cache_len=16 "
        "enable_linear_replayssm_spec"
    ),
    "diffusion language models": "dllm_algorithm= dllm_algorithm_config= dllm_fdfo=true",
    "choosing kernels of the draft model (they are those of the served one)": (
        "speculative_draft_attention_backend= speculative_moe_a2a_backend= "
        "speculative_moe_runner_backend="
    ),
    "speculative decoding of this kind": (
        "speculative_accept_threshold_acc=1.0 speculative_accept_threshold_single=1.0 "
        "speculative_adaptive_config= speculative_attention_mode=prefill "
        "speculative_dflash_block_size= speculative_domino_candidate_pool_size=2048 "
        "speculative_draft_kv_cache_dtype= "
        "speculative_draft_load_format= speculative_draft_model_quantization= "
        "speculative_draft_model_revision= speculative_draft_sink_size= "
        "speculative_draft_window_size= speculative_dsa_topk_backend=sgl-kernel "
        "speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_block_size= "
        "speculative_dspark_confidence_sts_path= speculative_dspark_sps_table_path= "
        "speculative_enable_w4a4_mxfp4_megamoe= speculative_ngram_capacity=10000000 "
        "speculative_ngram_external_sam_budget=0 "
        "speculative_ngram_match_type=BFS speculative_ngram_max_bfs_breadth=10 "
        "speculative_ngram_min_bfs_breadth=1 "
        "speculative_token_map= speculative_use_block_verification "
        "speculative_use_rejection_sampling enable_multi_layer_eagle uno_lora_path= "
        "spec_trace_dir= decoupled_spec_bind_endpoint= decoupled_spec_connect_endpoints= "
        "decoupled_spec_rank= decoupled_spec_role=null"
    ),
    "outer matrices shared by an adapter's experts": "experts_shared_outer_loras=",
    "waiting for a slot by time (--lora-max-overtakes counts requests)": (
        "lora_drain_wait_threshold=0.0"
    ),
    "prefill and decode on different servers": (
        "disaggregation_decode_allocation_policy=early "
        "disaggregation_decode_enable_offload_kvcache "
        "disaggregation_decode_extra_slots= disaggregation_decode_host_receive_threshold=1.0 "
        "disaggregation_decode_polling_interval=1 disaggregation_decode_retraction_backup= "
        "disaggregation_ib_device= "
        "num_reserved_decode_tokens=512 optimistic_prefill_attempts=0 "
        "pdmux_config_path= sm_group_num=8"
    ),
    "finding encoder servers, and transfers other than HTTP (media.encoder_urls)": (
        "encoder_transfer_backend=auto encoder_bootstrap_port=8997 encoder_register_urls=[] "
        "enable_adaptive_dispatch_to_encoder"
    ),
    "replays of windows after an encoder": (
        "enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay="
    ),
    "limits for each kind of item (media.items limits all of a request)": (
        "limit_mm_data_per_request="
    ),
    "settings of a model's processor (requests choose sizes)": "mm_process_config=",
    "encoders on several devices": "mm_enable_dp_encoder",
    "choosing the attention of encoders (media.encoder_backend)": "mm_attention_backend=",
    "vectors of items shared by servers (each keeps its own: media.vector_bytes)": (
        "enable_prefix_mm_cache enable_mm_global_cache mm_global_cache_backend=mooncake"
    ),
    "other interpolations of an encoder's positions": "enable_precise_embedding_interpolation",
    "other readers of checkpoints": (
        "model_loader_extra_config={} model_config_parser=auto custom_weight_loader= "
        "startup_weight_load_mode=serial weight_loader_disable_mmap "
        "weight_loader_drop_cache_after_load delete_ckpt_after_loading model_checksum= "
        "decrypted_config_file= decrypted_draft_config_file= modelexpress_config= "
        "checkpoint_engine_wait_weights_before_ready weight_cache_mode=off weight_cache_socket= "
        "weight_cache_timeout=1800"
    ),
    "weights from a running server": (
        "remote_instance_weight_loader_backend=nccl "
        "remote_instance_weight_loader_seed_instance_ip= "
        "remote_instance_weight_loader_seed_instance_service_port= "
        "remote_instance_weight_loader_send_weights_group_ports= "
        "remote_instance_weight_loader_start_seed_via_transfer_engine"
    ),
    "other quantisation methods (--quantization, sylvan quantize)": (
        "quantization_param_path= quantize_and_serve rl_quant_profile= modelopt_quant= "
        "modelopt_checkpoint_restore_path= modelopt_checkpoint_save_path= modelopt_export_path="
    ),
    "training that matches the sampler bit for bit": "rl_on_policy_target=",
    "returning hidden states and routed experts": (
        "return_hidden_states_mode= enable_return_aux_hidden_states "
        "return_aux_hidden_state_layer_ids= enable_return_routed_experts"
    ),
    "watermarks": "enable_watermark watermark_config=",
    "returning sampling masks": "sampling_mask_max_tokens=4096",
    "choosing GPUs, NUMA nodes and signals": (
        "gpu_id_step=1 numa_node= custom_sigquit_handler= soft_watchdog_timeout= "
        "mlx_enable_sampling"
    ),
    "dumps of requests and tensors": (
        "crash_dump_folder= debug_tensor_dump_output_folder= debug_tensor_dump_layers= "
        "debug_tensor_dump_input_file= forward_hooks= msprobe_dump_config= kv_canary=none "
        "kv_canary_real_data=none kv_canary_sweep_interval=0"
    ),
    "other metrics than those of /metrics": (
        "tokenizer_metrics_custom_labels_header=x-custom-labels "
        "export_metrics_to_file export_metrics_to_file_dir= enable_mfu_metrics "
        "enable_forward_pass_metrics forward_pass_metrics_worker_id= "
        "forward_pass_metrics_ipc_name= stat_loggers="
    ),
    "traces of other modules than requests": "trace_modules=request",
    "markers for NVIDIA's profiler": "enable_layerwise_nvtx_marker",
}
"""Features that are missing, and the flags that request them."""
