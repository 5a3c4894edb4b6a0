"""Train the tokenizer (byte-level BPE, 4,096 entries) and encode the corpus.

    python tokenizer.py --work DIR --out FOLDER

In: DIR/train.jsonl, DIR/held_out.jsonl. Out: tokenizer files in FOLDER, DIR/tokens.npy.xz (uint16, every training
file opened by <bos>) and DIR/held_out_tokens.jsonl, lines {path, token_ids} with no <bos>.
"""

import argparse
import json
import lzma
import random
from pathlib import Path

import numpy as np
from shape import VOCAB_SIZE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS = 2
TRAIN_ON_CHARS = 25_000_000


def main() -> None:
    """Train the tokenizer, then encode both halves of the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    texts = [json.loads(line)["text"] for line in (args.work / "train.jsonl").read_text().splitlines()]
    random.Random(0).shuffle(texts)
    sample, size = [], 0
    for text in texts:
        if size >= TRAIN_ON_CHARS:
            break
        sample.append(text)
        size += len(text)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        sample,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=["<pad>", "<eos>", "<bos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(args.out)

    parts, characters = [], 0
    for start in range(0, len(texts), 256):
        for text, encoding in zip(
            texts[start : start + 256], tokenizer.encode_batch(texts[start : start + 256]), strict=True
        ):
            parts += [np.array([BOS], np.uint16), np.array(encoding.ids, np.uint16)]
            characters += len(text)
    tokens = np.concatenate(parts)
    with lzma.open(args.work / "tokens.npy.xz", "wb", preset=2) as f:
        np.save(f, tokens)
    with open(args.work / "held_out_tokens.jsonl", "w") as f:
        for line in (args.work / "held_out.jsonl").read_text().splitlines():
            row = json.loads(line)
            f.write(json.dumps({"path": row["path"], "token_ids": tokenizer.encode(row["text"]).ids}) + "\n")
    print(json.dumps({"tokens": len(tokens), "characters_per_token": round(characters / len(tokens), 3)}))


if __name__ == "__main__":
    main()
