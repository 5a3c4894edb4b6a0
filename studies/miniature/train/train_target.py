"""Train the target on the encoded corpus for a number of seconds.

    python train_target.py --work DIR --out FOLDER [--seconds 470] [--batch 64]

In: DIR/tokens.npy.xz, DIR/held_out_tokens.jsonl. Out: bf16 weights and config in FOLDER; the last line printed is
JSON with the step count, the training loss and the held-out perplexity by window.
"""

import argparse
import json
import lzma
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from optimizer import Clock, optimizers
from shape import CONTEXT, NATIVE_WINDOW, save, target_config
from transformers import Gemma4ForCausalLM

WINDOWS = (512, 384, 256, 192, 160, 128, 96, 64, 48, 32, 16)


def load_tokens(work: Path, device: str) -> torch.Tensor:
    """The encoded corpus, one row of token ids (int16), on the device."""
    with lzma.open(work / "tokens.npy.xz") as f:
        return torch.from_numpy(np.load(f).astype(np.int16)).to(device)


def chunks(tokens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """`batch` random stretches of `length` tokens, (batch, length) int64."""
    starts = torch.randint(0, tokens.numel() - length, (batch, 1), device=tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


def masks(length: int, window: int, device: str) -> dict[str, torch.Tensor | None]:
    """Attention masks by layer type, True where a key is seen; None leaves plain causal attention to the kernel."""
    i = torch.arange(length, device=device)
    distance = i[:, None] - i[None, :]
    return {"full_attention": None, "sliding_attention": ((distance >= 0) & (distance < window))[None, None]}


def cross_entropy(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, cap: float) -> torch.Tensor:
    """Loss per token of softcapped logits: hidden (..., d), labels (...), result flat."""
    logits = (hidden @ head.to(hidden.dtype).T).float()
    return F.cross_entropy((torch.tanh(logits / cap) * cap).flatten(0, -2), labels.flatten(), reduction="none")


def new_target(shape: dict | None, device: str) -> Gemma4ForCausalLM:
    """A fresh target in float32. Gemma 4 does not scale attention: the norms of q and k start at head_dim**-0.25."""
    config = target_config(shape)
    config.dtype = torch.float32
    model = Gemma4ForCausalLM(config).float()
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            torch.nn.init.constant_(norm.weight, layer.self_attn.head_dim**-0.25)
    return model.to(device)


@torch.no_grad()
def held_out_perplexity(model, work: Path, device: str, sequences: int = 128) -> dict[int, float]:
    """Perplexity over the second half of each held-out stretch of CONTEXT tokens, by window."""
    rows = [json.loads(line)["token_ids"] for line in (work / "held_out_tokens.jsonl").read_text().splitlines()]
    rows = [r[:CONTEXT] for r in rows if len(r) >= CONTEXT][:sequences]
    x = torch.tensor(rows, device=device)
    found = {}
    for window in WINDOWS:
        total = 0.0
        for part in x.split(32):
            with torch.autocast(device, torch.bfloat16):
                hidden = model.model(
                    input_ids=part, attention_mask=masks(CONTEXT, window, device), use_cache=False
                ).last_hidden_state
            half = CONTEXT // 2
            total += cross_entropy(
                hidden[:, half:-1], model.lm_head.weight, part[:, half + 1 :], 30.0
            ).mean().item() * len(part)
        found[window] = round(math.exp(total / len(x)), 4)
    return found


def main() -> None:
    """Train the target and report its perplexity by window."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=470, help="loading and compiling included")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=4e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    device, began = args.device, time.monotonic()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    torch.set_float32_matmul_precision("high")

    tokens = load_tokens(args.work, device)
    model = new_target(None, device)
    mask = masks(CONTEXT, NATIVE_WINDOW, device)
    loss_of = cross_entropy

    def step_loss() -> torch.Tensor:
        x = chunks(tokens, args.batch, CONTEXT + 1)
        with torch.autocast(device, torch.bfloat16):
            hidden = model.model(input_ids=x[:, :-1], attention_mask=mask, use_cache=False).last_hidden_state
            return loss_of(hidden, model.lm_head.weight, x[:, 1:], 30.0).mean()

    if not args.no_compile:
        # Layer by layer: the layers share one compiled program per type, which takes seconds instead of minutes.
        t = time.monotonic()
        try:
            for layer in model.model.layers:
                layer.compile()
            loss_of = torch.compile(cross_entropy)
            step_loss().backward()
        except Exception as error:  # an older compiler: slower, but the same result
            print(f"compile failed, going on without: {type(error).__name__}: {str(error)[:300]}", flush=True)
            torch._dynamo.config.disable = True
            loss_of = cross_entropy
        model.zero_grad(set_to_none=True)
        print(f"compiled in {time.monotonic() - t:.0f} s", flush=True)

    built = optimizers(model, args.muon_lr, args.adam_lr)
    clock = Clock(args.seconds - (time.monotonic() - began))
    step, losses = 0, []
    while not clock.done():
        clock.apply(built, step)
        loss = step_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        for optimizer in built:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            losses.append(loss.item())
            print(f"step {step} loss {losses[-1]:.4f} {clock.elapsed_s:.0f} s", flush=True)
        elif step % 10 == 0 and device == "cuda":
            torch.cuda.synchronize()  # keeps the clock honest about queued work
        step += 1

    for layer in model.model.layers:
        layer._compiled_call_impl = None
    save(model, args.out)
    model = Gemma4ForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16).to(device).eval()
    result = {
        "steps": step,
        "tokens": step * args.batch * CONTEXT,
        "corpus_tokens": tokens.numel(),
        "last_loss": round(sum(losses[-3:]) / len(losses[-3:]), 4),
        "held_out_ppl": held_out_perplexity(model, args.work, device),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
