# SPDX-License-Identifier: Apache-2.0
"""Which tiny models we can make: one row a family, each a Hugging Face configuration.

A row says how to build the *dense* model; what is quantised afterwards is in `_quantise`.
Sizes are the smallest that vLLM's CPU kernels accept (hidden size 128, head size 32), so that
a family costs about a second to make and three to start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

VOCAB: Final = 512
PADDED_VOCAB: Final = 500  # not a multiple of 64: vLLM pads it, and no checkpoint tensor ever fills the tail

BASE: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}

MLA: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}

_OPT: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 128,
}

_GROUPED: Final[Mapping[str, Any]] = {
    "head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

YARN: Final[Mapping[str, Any]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150000.0,
}


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        config: name of the configuration class in `transformers`.
        model: name of the model class in `transformers`.
        settings: arguments of the configuration.
        tags: what is special about it, for tests that choose (tied, moe, hybrid, quantised, padding; `order`:
            the checkpoint writes one element several times with different values, so that what a load leaves
            there depends on the order of its tensors).
        quantise: name of a recipe of `_quantise`, applied to the dense tensors, or "".
        head: for checkpoints whose configuration says tied but which hold a head all the same:
            "equal" or "other"; "" for what the model itself saves.
        modal: name of a row of `_modal`, for a model that reads more than text; or "".
    """

    config: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    quantise: str = ""
    head: str = ""
    modal: str = ""


def _row(
    stem: str, *tags: str, model: str = "", quantise: str = "", head: str = "", **settings: Any
) -> Family:
    name = model or f"{stem}ForCausalLM"
    return Family(f"{stem}Config", name, {**BASE, **settings}, frozenset(tags), quantise, head)


def _qwen2(*tags: str, **more: Any) -> Family:
    return _row("Qwen2", *tags, **more)


def _quantised(recipe: str, base: Callable[..., Family] = _qwen2, **settings: Any) -> Family:
    return base("quantised", quantise=recipe, **settings)


FAMILIES: Final[Mapping[str, Family]] = {
    # dense
    "qwen2": _qwen2(),
    "llama": _row("Llama"),
    "qwen3": _row("Qwen3", head_dim=32),
    "phi3": _row("Phi3"),
    "vocab_padded": _row("Llama", "padding", vocab_size=PADDED_VOCAB),
    "deepseek_dense": _row(
        "DeepseekV2", "mla", **{**MLA, "first_k_dense_replace": 2, "topk_method": "greedy"}
    ),
    # tied heads
    "qwen2tied": _qwen2("tied", tie_word_embeddings=True),
    "tied_head_equal": _qwen2("tied", tie_word_embeddings=True, head="equal"),
    "tied_head_other": _qwen2("tied", tie_word_embeddings=True, head="other"),
    "tied_padded": _qwen2("tied", "padding", tie_word_embeddings=True, vocab_size=PADDED_VOCAB),
    "gemma2": _row("Gemma2", "tied", head_dim=32, tie_word_embeddings=True, sliding_window=64),
    "gemma3": _row(
        "Gemma3Text",
        "tied",
        model="Gemma3ForCausalLM",
        head_dim=32,
        tie_word_embeddings=True,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "opt": Family(
        "OPTConfig",
        "OPTForCausalLM",
        {
            **_OPT,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
        frozenset({"tied"}),
    ),
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB,
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        frozenset({"tied"}),
    ),
    "cohere2": _row("Cohere2", "tied", tie_word_embeddings=True, sliding_window=64, logit_scale=0.25),
    # experts
    "mixtral": _row("Mixtral", "moe", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "gpt_oss": _row(
        "GptOss",
        "moe",
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=YARN,
    ),
    "qwen2_moe": _row(
        "Qwen2Moe",
        "moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
    ),
    "qwen3_moe": _row(
        "Qwen3Moe", "moe", head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
    "olmoe": _row("Olmoe", "moe", num_experts=4, num_experts_per_tok=2),
    "granite_moe": _row(
        "GraniteMoe", "moe", "tied", num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=True
    ),
    "deepseek_moe": _row(
        "DeepseekV2", "moe", "mla", **{**MLA, "first_k_dense_replace": 1, "topk_method": "greedy"}
    ),
    "deepseek_v3": _row(
        "DeepseekV3", "moe", "mla", **{**MLA, "first_k_dense_replace": 1, "topk_method": "noaux_tc"}
    ),
    "glm4_moe": _row("Glm4Moe", "moe", **_GROUPED),
    # state-space models and hybrids
    "mamba2": Family(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 128,
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 32,
            "num_hidden_layers": 2,
            "expand": 2,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 32,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "tie_word_embeddings": False,
        },
        frozenset({"ssm"}),
    ),
    "falcon_h1": _row(
        "FalconH1",
        "hybrid",
        "ssm",
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
        head_dim=32,
    ),
    "granite_hybrid": _row(
        "GraniteMoeHybrid",
        "hybrid",
        "ssm",
        "moe",
        "tied",
        tie_word_embeddings=True,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=128,
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
        position_embedding_type="rope",
    ),
    "nemotron_h": _row(
        "NemotronH",
        "hybrid",
        "ssm",
        num_hidden_layers=3,
        hybrid_override_pattern="M*-",
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=1,
        ssm_state_size=32,
        conv_kernel=4,
        chunk_size=32,
        expand=2,
    ),
    "zamba2": _row(
        "Zamba2",
        "hybrid",
        "ssm",
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        num_key_value_heads=4,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_ngroups=1,
        n_mamba_heads=8,
        chunk_size=32,
        num_mem_blocks=1,
        adapter_rank=16,
        use_shared_attention_adapter=False,
        use_mem_rope=True,
        tie_word_embeddings=True,
    ),
    "lfm2": _row(
        "Lfm2",
        "hybrid",
        "tied",
        layer_types=["conv", "full_attention"],
        conv_dim=128,
        conv_L_cache=3,
        conv_use_xavier_init=False,
        block_dim=128,
        block_ff_dim=256,
        block_multiple_of=64,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
    ),
    "qwen3_next": _row(
        "Qwen3Next",
        "hybrid",
        "moe",
        head_dim=32,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    # quantised, from Qwen2
    "w8a8dyn": _quantised("w8a8dyn"),
    "w8a8static": _quantised("w8a8static"),
    "awq": _quantised("awq"),
    "gptq": _quantised("gptq"),
    "w4a16": _quantised("w4a16", num_key_value_heads=4),
    "w4a16asym": _quantised("w4a16asym", num_key_value_heads=4),
    # q, k and v each write one `weight_shape`, and here they disagree.
    "w4a16gqa": _qwen2("quantised", "order", quantise="w4a16"),
    "w8a8dyn_tied": _quantised("w8a8dyn", tie_word_embeddings=True),
}

# Rows that were written after the engine was finished, to see what families it has never met do; `make test-full` runs
# them all. All passed unchanged but `doge`, whose traced graph holds a constant on the meta device.
_VISION: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

MORE: Final[Mapping[str, Family]] = {
    # images, by an encoder with attention of its own
    "idefics3": Family(
        "Idefics3Config",
        "Idefics3ForConditionalGeneration",
        {
            "text_config": {**BASE, "model_type": "llama"},
            "vision_config": _VISION,
            "image_token_id": 501,
            "scale_factor": 2,
            "tie_word_embeddings": False,
        },
        modal="idefics3",
    ),
    # images, by queries that attend to an encoder
    "blip2": Family(
        "Blip2Config",
        "Blip2ForConditionalGeneration",
        {
            "vision_config": _VISION,
            "qformer_config": {**_VISION, "encoder_hidden_size": 64},
            "text_config": {"model_type": "opt", **_OPT},
            "num_query_tokens": 4,
            "image_token_index": 500,
        },
        frozenset({"tied"}),
        modal="blip2",
    ),
    # audio; a decoder that attends to an encoder
    "whisper": Family(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_source_positions": 150,
            "max_target_positions": 448,
            "decoder_start_token_id": 500,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        frozenset({"tied"}),
        modal="whisper",
    ),
    "starcoder2": _row("Starcoder2", "tied", tie_word_embeddings=True),
    "falcon": Family(
        "FalconConfig",
        "FalconForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        frozenset({"tied"}),
    ),
    "bloom": Family(
        "BloomConfig",
        "BloomForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 128,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        frozenset({"tied"}),
    ),
    "gptj": Family(
        "GPTJConfig",
        "GPTJForCausalLM",
        {
            "vocab_size": VOCAB,
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "rotary_dim": 16,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        {
            "vocab_size": VOCAB,
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "multi_query": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        frozenset({"tied"}),
    ),
    "gpt_neox": _row("GPTNeoX"),
    "phi": _row("Phi"),
    "gemma": _row("Gemma", "tied", head_dim=32, tie_word_embeddings=True),
    "gemma3n": _row(
        "Gemma3nText",
        "tied",
        model="Gemma3nForCausalLM",
        head_dim=32,
        tie_word_embeddings=True,
        num_hidden_layers=4,
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB,
        layer_types=["sliding_attention", "full_attention"] * 2,
        altup_num_inputs=2,
        laurel_rank=16,
        activation_sparsity_pattern=[0.0] * 4,
        sliding_window=64,
    ),
    "vaultgemma": _row("VaultGemma", "tied", head_dim=32, tie_word_embeddings=True, sliding_window=64),
    "olmo": _row("Olmo"),
    "olmo2": _row("Olmo2"),
    "olmo3": _row("Olmo3"),
    "stablelm": _row("StableLm"),
    "exaone4": _row("Exaone4", sliding_window=64),
    "granite": _row("Granite", "tied", tie_word_embeddings=True),
    "ernie45": _row("Ernie4_5"),
    "hunyuan": _row("HunYuanDenseV1", head_dim=32),
    "seed_oss": _row("SeedOss", head_dim=32),
    "smollm3": _row("SmolLM3"),
    "arcee": _row("Arcee"),
    "apertus": _row("Apertus"),
    "nemotron": _row("Nemotron"),
    "persimmon": _row("Persimmon", num_key_value_heads=4),
    "glm": _row("Glm", head_dim=32),
    "glm4": _row("Glm4", head_dim=32),
    "cohere": _row("Cohere", "tied", tie_word_embeddings=True),
    "helium": _row("Helium", head_dim=32),
    "jais2": _row("Jais2"),
    "doge": _row("Doge"),  # vLLM runs it through its backend for transformers' own modules
    "ernie45_moe": _row(
        "Ernie4_5_Moe",
        "moe",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "hunyuan_moe": _row("HunYuanMoEV1", "moe", head_dim=32, num_experts=4, moe_topk=2),
    "flex_olmo": _row("FlexOlmo", "moe", num_experts=4, num_experts_per_tok=2),
    "lfm2_moe": _row(
        "Lfm2Moe",
        "hybrid",
        "moe",
        "tied",
        layer_types=["conv", "full_attention"],
        conv_L_cache=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        num_dense_layers=1,
        tie_word_embeddings=True,
    ),
    "dots1": _row("Dots1", "moe", **_GROUPED),
    "solar_open": _row("SolarOpen", "moe", **_GROUPED),
    "glm4_moe_lite": _row("Glm4MoeLite", "moe", "mla", **{**MLA, "first_k_dense_replace": 1}),
}
