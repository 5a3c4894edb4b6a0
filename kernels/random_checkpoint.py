"""A random Gemma 4 of E4B's shape with a drafter, for timing: configs on disk, weights drawn where vLLM loads them.

The shape is that of google/gemma-4-E4B-it's language model and of its MTP assistant. Weights are random but for one
number a row, which makes both models give the same token whatever they read: every draft is accepted, so that a step is
always K + 1 tokens and throughput says how long a step takes. Nothing can be learned from it about quality or
acceptance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

LOAD_FORMAT = "pareto-random"
TOKEN = 7777
"""What both models always say."""
PULL = 0.5
"""Weight by which that token's row stands out in the one dimension that carries the pull."""

_ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": _ROPE,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
}
TARGET: dict[str, Any] = {
    **_TEXT,
    "architectures": ["Gemma4ForCausalLM"],
    "final_logit_softcapping": 30.0,
    "hidden_size": 2560,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 10240,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    "num_attention_heads": 8,
    "num_hidden_layers": 42,
    "num_kv_shared_layers": 18,
    "vocab_size_per_layer_input": 262144,
}
DRAFTER: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "backbone_hidden_size": 2560,
    "centroid_intermediate_top_k": 49,
    "dtype": "bfloat16",
    "model_type": "gemma4_assistant",
    "num_centroids": 2048,
    "text_config": {
        **_TEXT,
        "final_logit_softcapping": None,
        "hidden_size": 256,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2048,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "vocab_size_per_layer_input": 0,
    },
    "tie_word_embeddings": True,
    "use_ordered_embeddings": True,
}


def write_configs(folder: Path) -> tuple[Path, Path]:
    """Write folder/target and folder/drafter, a config.json each; returns the two."""
    target, drafter = folder / "target", folder / "drafter"
    for path, config in ((target, TARGET), (drafter, DRAFTER)):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return target, drafter


def register_loader() -> None:
    """Let this process load such models with `load_format=LOAD_FORMAT`."""
    from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader

    @register_model_loader(LOAD_FORMAT)
    class RandomModelLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            with torch.no_grad():
                steer(model.state_dict())


def steer(weights: dict[str, torch.Tensor]) -> None:
    """Make random weights of a target or drafter run without overflow and always say TOKEN.

    Dimension 0 of every hidden state is made positive and much larger than the others; in the output embedding TOKEN's
    row alone is large there. The layers between are random, and small beside what they add to.
    """
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            tensor.fill_(0.01 if "post_" in name else 1.0)
        elif name.endswith("layer_scalar"):
            tensor.fill_(1.0)
        elif name.endswith("token_ordering"):
            tensor.copy_(torch.randperm(tensor.numel(), device=tensor.device))
    drafts = any(name.endswith("masked_embedding.token_ordering") for name in weights)
    if not drafts:
        embedding = _only(weights, "embed_tokens.weight")
        embedding[:, 0] = 0.1 * PULL  # the residual stream starts from it
        embedding[TOKEN, 0] = PULL
        return
    embedding = _only(weights, "embed_tokens.weight")  # of the drafter's own size: its output embedding
    embedding[:, 0] = 0.0
    embedding[TOKEN, 0] = PULL
    ordering, centroids = _only(weights, "token_ordering"), _only(weights, "centroids.weight")
    tokens = ordering.numel() // centroids.shape[0]
    centroids[:, 0] = 0.0
    centroids[int((ordering == TOKEN).nonzero().item()) // tokens, 0] = PULL
    into = _only(weights, "pre_projection.weight")  # [hidden, target's embedding and hidden state]
    into[0] = 0.0
    into[0, 0] = into[0, into.shape[1] // 2] = 0.1
    back = _only(weights, "post_projection.weight")
    back[0] = 0.0
    back[0, 0] = 1.0


def _only(weights: dict[str, torch.Tensor], ending: str) -> torch.Tensor:
    """The one tensor with a name that ends so; several names may share it."""
    (found,) = {tensor.data_ptr(): tensor for name, tensor in weights.items() if name.endswith(ending)}.values()
    return found
