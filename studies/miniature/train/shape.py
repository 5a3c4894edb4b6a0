"""The shapes of the miniature: one Gemma 4 target and its MTP drafter.

In: nothing. Out: `target_config()` and `drafter_config()` as transformers configs, and `save()`, which writes a model
in bf16 with a config that transformers 5.13 to 5.19 and vLLM 0.26 to 0.33 read alike.

A step of a small model on a CPU costs time by the layer, not by the parameter. The target is therefore many thin
layers and the drafter few, so that a drafter pass is much cheaper than a target step, as it is with the large models
on a GPU.
"""

import json
from pathlib import Path

from transformers import Gemma4AssistantConfig, Gemma4TextConfig

VOCAB_SIZE = 4096
NATIVE_WINDOW = 512
CONTEXT = 1024
NUM_CENTROIDS = 128
CENTROID_TOP_K = 32

TARGET = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "groups": 3,  # each group: `sliding_per_group` sliding layers, then one full layer
    "sliding_per_group": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 128,
    "hidden_size_per_layer_input": 16,
}
DRAFTER = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}

ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def target_config(shape: dict | None = None) -> Gemma4TextConfig:
    """Config of the target; `shape` replaces entries of TARGET (timing studies, dry runs)."""
    s = {**TARGET, **(shape or {})}
    groups, sliding = s.pop("groups"), s.pop("sliding_per_group")
    layer_types = (["sliding_attention"] * sliding + ["full_attention"]) * groups
    return Gemma4TextConfig(
        **_common(),
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_kv_shared_layers=0,
        final_logit_softcapping=30.0,
        **s,
    )


def drafter_config(target: Gemma4TextConfig, shape: dict | None = None) -> Gemma4AssistantConfig:
    """Config of the drafter: one sliding and one full layer, both reading the target's keys and values."""
    s = {**DRAFTER, **(shape or {})}
    layer_types = s.pop("layer_types", ["sliding_attention", "full_attention"])
    full = target.per_layer_config[target.num_hidden_layers - 1]
    sliding = target.per_layer_config[0]
    text = Gemma4TextConfig(
        **_common(),
        vocab_size_per_layer_input=0,
        hidden_size_per_layer_input=0,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_kv_shared_layers=len(layer_types),
        num_key_value_heads=sliding.num_key_value_heads,
        head_dim=sliding.head_dim,
        global_head_dim=full.head_dim,
        **s,
    )
    return Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=target.hidden_size,
        use_ordered_embeddings=True,
        num_centroids=NUM_CENTROIDS,
        centroid_intermediate_top_k=CENTROID_TOP_K,
    )


def save(model, folder: Path) -> None:
    """Write `model` in bf16, in shards of at most 8 MB, with the portable spelling of its config."""
    import torch

    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="8MB")
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config")):
        if part is not None and "per_layer_config" in part:
            # Releases before per_layer_config read global_head_dim; later ones derive the former from the latter.
            per_layer = part.pop("per_layer_config")
            part["global_head_dim"] = next(iter(per_layer.values()))["head_dim"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _common() -> dict:
    return {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "sliding_window": NATIVE_WINDOW,
        "rope_parameters": {k: dict(v) for k, v in ROPE.items()},
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "dtype": "bfloat16",
    }
