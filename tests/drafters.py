"""Models with random weights that draft for the miniature: nothing of theirs is accepted, and nothing may change."""

import json
from pathlib import Path

import torch
from conftest import MINIATURE
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from search.modelfiles import read_config, text_config

HEADS, HEAD_SIZE, WIDTH = 2, 32, 64


def draft_model(folder: Path) -> Path:
    """A Llama of one layer with the miniature's vocabulary."""
    target = text_config(read_config(MINIATURE / "target"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=target["vocab_size"],
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=target["max_position_embeddings"],
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def eagle3(folder: Path) -> Path:
    """An EAGLE-3 head: one layer over the embedding and three hidden states of the miniature."""
    target = text_config(read_config(MINIATURE / "target"))
    hidden, vocabulary = target["hidden_size"], target["vocab_size"]
    shapes = {
        **{f"midlayer.self_attn.{name}_proj.weight": (HEADS * HEAD_SIZE, 2 * hidden) for name in "qkv"},
        "midlayer.self_attn.o_proj.weight": (hidden, HEADS * HEAD_SIZE),
        **{f"midlayer.mlp.{name}_proj.weight": (WIDTH, hidden) for name in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": (hidden, WIDTH),
        **{f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")},
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    draw = torch.Generator().manual_seed(0)
    weights = {name: (0.02 * torch.randn(*shape, generator=draw)).bfloat16() for name, shape in shapes.items()}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "max_position_embeddings": target["max_position_embeddings"],
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
