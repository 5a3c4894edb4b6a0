"""Train the MTP drafter on the target's own hidden states, keys and values; then its centroids.

    python train_drafter.py --work DIR --target FOLDER --out FOLDER [--seconds 545] [--rollouts 3]

A draft step at position p reads the target's keys and values up to p, its input is cat(scaled target embedding of the
last token, hidden state), and its position is p at every step: that is how vLLM drafts. Step 0 takes the target's
hidden state at p and the token after it; step j takes its own previous output and the j-th token after that. Since
the position does not move, one causal pass over a whole text does step j for every p at once.

In: DIR/tokens.npy.xz, DIR/held_out_tokens.jsonl, a trained target. Out: bf16 weights and config in FOLDER; the last
line printed is JSON with the step count and the acceptance by position, for several top-k, on greedy continuations of
held-out files.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from optimizer import Clock, optimizers
from shape import CONTEXT, NATIVE_WINDOW, NUM_CENTROIDS, drafter_config, save
from train_target import chunks, load_tokens, masks
from transformers import DynamicCache, Gemma4AssistantForCausalLM, Gemma4ForCausalLM

STEP_WEIGHT = 0.9  # of draft step j: STEP_WEIGHT ** j
OFF_PATH_WEIGHT = 0.1  # where the text has left the target's greedy path, a draft could not have been accepted anyway
SOFT_SHARE = 0.3  # of the loss: the target's whole distribution; the rest is its argmax
TOP_KS = (128, 64, 32, 16, 8, 4, 2, 1)


@torch.no_grad()
def rollouts(target, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy continuations: (batch, prompt + new_tokens)."""
    cache = DynamicCache(config=target.config)
    out, last = [prompts], prompts
    for _ in range(new_tokens):
        hidden = target.model(input_ids=last, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        last = (hidden @ target.lm_head.weight.T).argmax(-1, keepdim=True)
        out.append(last)
    return torch.cat(out, 1)


class Bench:
    """The frozen target beside the drafter, and the passes that both need."""

    def __init__(self, target, drafter, device: str):
        self.target, self.drafter, self.device = target, drafter, device
        self.mask = masks(CONTEXT, NATIVE_WINDOW, device)

    @torch.no_grad()
    def target_pass(self, x: torch.Tensor):
        """Hidden states, shared keys and values by layer type, and softcapped logits of the target."""
        out = self.target.model(input_ids=x, attention_mask=self.mask, use_cache=False, return_shared_kv_states=True)
        logits = out.last_hidden_state @ self.target.lm_head.weight.T
        return (
            out.last_hidden_state,
            dict(out.shared_kv_states),
            torch.tanh(logits.float() / 30.0).mul_(30.0).bfloat16(),
        )

    def draft_pass(self, tokens: torch.Tensor, hidden: torch.Tensor, shared: dict):
        """One draft step at every position: the drafter's own hidden states, and what it feeds back."""
        embedded = self.target.model.embed_tokens(tokens)
        states = self.drafter.pre_projection(torch.cat([embedded, hidden], -1))
        positions = torch.arange(tokens.size(1), device=tokens.device)[None]
        own = self.drafter.model(
            inputs_embeds=states,
            attention_mask=self.mask,
            position_ids=positions,
            shared_kv_states=shared,
            use_cache=False,
        ).last_hidden_state
        return own, self.drafter.post_projection(own)

    def draft_steps(self, x: torch.Tensor, hidden: torch.Tensor, shared: dict, steps: int):
        """Yield (j, hidden states) for every draft step; rows near the end have no token left and hold padding."""
        for j in range(steps):
            own, hidden = self.draft_pass(F.pad(x[:, 1 + j :], (0, 1 + j)), hidden, shared)
            yield j, own


def step_loss(own, head, logits, best, weight):
    """Loss of one draft step: (1 - SOFT_SHARE) to the target's argmax, SOFT_SHARE to its distribution."""
    log_q = F.log_softmax((own @ head.to(own.dtype).T).float(), -1)
    soft = -(F.softmax(logits.float(), -1) * log_q).sum(-1)
    hard = -log_q.gather(-1, best[..., None])[..., 0]
    return ((SOFT_SHARE * soft + (1 - SOFT_SHARE) * hard) * weight).sum() / weight.sum()


def path_weights(x: torch.Tensor, best: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Per step j, a weight for every position p: 1 where tokens p+2 .. p+1+j follow the greedy path."""
    n = x.size(1) - 1 - steps
    follows = (x[:, 1:] == best[:, :-1]).float()  # follows[:, q]: token q+1 is the target's own choice
    on_path = torch.ones(x.size(0), n, device=x.device)
    weights = []
    for j in range(steps):
        weights.append(torch.where(on_path > 0, 1.0, OFF_PATH_WEIGHT))
        on_path = on_path * follows[:, 1 + j : 1 + j + n]
    return weights


def balanced_clusters(rows: torch.Tensor, clusters: int, rounds: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Clusters of equal size over unit rows (n, d). Returns the ordering (n,), cluster by cluster, and the centres."""
    rows = F.normalize(rows.float().cpu(), dim=1)
    n, capacity = len(rows), len(rows) // clusters
    centres = rows[torch.randperm(n, generator=torch.Generator().manual_seed(0))[:clusters]]
    for _ in range(rounds):
        similarity = rows @ centres.T
        members: list[list[int]] = [[] for _ in range(clusters)]
        taken = bytearray(n)
        for pair in similarity.flatten().argsort(descending=True).tolist():
            row, cluster = divmod(pair, clusters)
            if not taken[row] and len(members[cluster]) < capacity:
                members[cluster].append(row)
                taken[row] = 1
        ordering = torch.tensor(members)
        centres = F.normalize(rows[ordering].mean(1), dim=1)
    return ordering.flatten(), centres


@torch.no_grad()
def acceptance(bench: Bench, x: torch.Tensor, start: int, steps: int = 7) -> dict:
    """Cumulative greedy acceptance by position over texts whose tokens from `start` on are the target's own."""
    embedder, head = bench.drafter.masked_embedding, bench.drafter.lm_head.weight
    cluster_of = torch.empty(head.size(0), dtype=torch.long, device=head.device)
    cluster_of[embedder.token_ordering] = (
        torch.arange(head.size(0), device=head.device) // embedder.vocab_size_per_centroid
    )
    n = CONTEXT - 1 - steps
    found = {}
    parts = [(part, *bench.target_pass(part)) for part in x.split(32)]
    for top_k in TOP_KS:
        hits, count = torch.zeros(steps), 0
        for part, hidden, shared, _ in parts:
            alive = torch.ones(len(part), n - start, device=part.device, dtype=torch.bool)
            for j, own in bench.draft_steps(part, hidden, shared, steps):
                own = own[:, start:n]
                chosen = embedder.centroids(own).topk(top_k, -1).indices
                open_ = torch.zeros(*own.shape[:2], embedder.num_centroids, dtype=torch.bool, device=own.device)
                open_.scatter_(-1, chosen, True)
                logits = (own @ head.T).masked_fill(~open_[..., cluster_of], float("-inf"))
                alive &= logits.argmax(-1) == part[:, start + 2 + j : n + 2 + j]
                hits[j] += alive.sum().item()
            count += alive.numel()
        found[top_k] = [round(h / count, 3) for h in hits.tolist()]
    return found


def main() -> None:
    """Train the drafter, then its centroids, and report acceptance."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=545, help="loading, rollouts and compiling included")
    parser.add_argument("--centroid-seconds", type=float, default=20)
    parser.add_argument("--steps", type=int, default=6, help="draft steps trained")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=3, help="rounds of greedy text from the target")
    parser.add_argument("--rollout-batch", type=int, default=1024)
    parser.add_argument("--rollout-tokens", type=int, default=320)
    parser.add_argument("--rollout-share", type=float, default=0.5, help="of a batch")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=4e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    device, steps, began = args.device, args.steps, time.monotonic()
    torch.manual_seed(1)
    torch._dynamo.config.recompile_limit = 64
    torch.set_float32_matmul_precision("high")

    tokens = load_tokens(args.work, device)
    target = (
        Gemma4ForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).to(device).eval().requires_grad_(False)
    )
    config = drafter_config(target.config)
    config.dtype = torch.float32
    drafter = Gemma4AssistantForCausalLM(config).float().to(device)
    for layer in drafter.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, layer.self_attn.head_dim**-0.25)
    # The head starts as the target's own, in its strongest directions.
    u, s, _ = torch.linalg.svd(target.lm_head.weight.float(), full_matrices=False)
    with torch.no_grad():
        drafter.lm_head.weight.copy_((u * s)[:, : drafter.hidden_size])
    drafter.masked_embedding.requires_grad_(False)
    bench = Bench(target, drafter, device)

    prompt_length = CONTEXT - args.rollout_tokens
    t = time.monotonic()
    own_text = torch.cat(
        [
            rollouts(target, chunks(tokens, args.rollout_batch, prompt_length), args.rollout_tokens)
            for _ in range(args.rollouts)
        ]
    )
    rows = [json.loads(line)["token_ids"] for line in (args.work / "held_out_tokens.jsonl").read_text().splitlines()]
    held_out = torch.tensor([r[:prompt_length] for r in rows if len(r) >= prompt_length][:128], device=device)
    held_out = rollouts(target, held_out, args.rollout_tokens)
    print(f"{tuple(own_text.shape)} tokens of the target's own in {time.monotonic() - t:.0f} s", flush=True)

    def batch() -> torch.Tensor:
        n = round(args.batch * args.rollout_share)
        pick = torch.randint(0, len(own_text), (n,), device=device)
        return torch.cat([own_text[pick], chunks(tokens, args.batch - n, CONTEXT)])

    loss_of = step_loss

    def train_loss() -> torch.Tensor:
        x = batch()
        hidden, shared, logits = bench.target_pass(x)
        best = logits.argmax(-1)
        weights = path_weights(x, best, steps)
        n = CONTEXT - 1 - steps
        total = torch.zeros((), device=device)
        with torch.autocast(device, torch.bfloat16):
            for j, own in bench.draft_steps(x, hidden, shared, steps):
                here = slice(1 + j, 1 + j + n)
                total = total + STEP_WEIGHT**j * loss_of(
                    own[:, :n], drafter.lm_head.weight, logits[:, here], best[:, here], weights[j]
                )
        return total / sum(STEP_WEIGHT**j for j in range(steps))

    if not args.no_compile:
        t = time.monotonic()
        try:
            for layer in [*target.model.layers, *drafter.model.layers]:
                layer.compile()
            loss_of = torch.compile(step_loss)
            train_loss().backward()
        except Exception as error:
            print(f"compile failed, going on without: {type(error).__name__}: {str(error)[:300]}", flush=True)
            torch._dynamo.config.disable = True
            loss_of = step_loss
        drafter.zero_grad(set_to_none=True)
        print(f"compiled in {time.monotonic() - t:.0f} s", flush=True)

    built = optimizers(drafter, args.muon_lr, args.adam_lr)
    clock = Clock(args.seconds - (time.monotonic() - began))
    step, losses = 0, []
    while not clock.done():
        clock.apply(built, step)
        loss = train_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in drafter.parameters() if p.grad is not None], 1.0, foreach=True)
        for optimizer in built:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            losses.append(loss.item())
            print(f"step {step} loss {losses[-1]:.4f} {clock.elapsed_s:.0f} s", flush=True)
        elif step % 10 == 0 and device == "cuda":
            torch.cuda.synchronize()
        step += 1

    for layer in [*target.model.layers, *drafter.model.layers]:
        layer._compiled_call_impl = None
    drafter.to(torch.bfloat16).requires_grad_(False)
    embedder = drafter.masked_embedding
    ordering, centres = balanced_clusters(drafter.lm_head.weight, NUM_CENTROIDS)
    embedder.token_ordering.copy_(ordering)
    cluster_of = torch.empty(len(ordering), dtype=torch.long, device=device)
    cluster_of[ordering.to(device)] = torch.arange(len(ordering), device=device) // embedder.vocab_size_per_centroid
    centroids = (centres.to(device) * 8).requires_grad_(True)
    optimizer = torch.optim.Adam([centroids], lr=0.03)
    clock, centroid_step = Clock(args.centroid_seconds), 0
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]
    while not clock.done():
        clock.apply([optimizer], centroid_step)
        x = batch()
        hidden, shared, _ = bench.target_pass(x)
        loss = torch.zeros((), device=device)
        for _, own in bench.draft_steps(x, hidden, shared, min(steps, 4)):
            own = own[:, : CONTEXT - 1 - steps].flatten(0, 1)
            label = cluster_of[(own @ drafter.lm_head.weight.T).argmax(-1)]
            loss = loss + F.cross_entropy(own.float() @ centroids.T, label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        centroid_step += 1
    embedder.centroids.weight.data.copy_(centroids.detach())
    save(drafter, args.out)

    by_top_k = acceptance(bench, held_out, prompt_length)
    result = {
        "steps": step,
        "centroid_steps": centroid_step,
        "last_loss": round(sum(losses[-3:]) / len(losses[-3:]), 4),
        "acceptance": by_top_k,
        "accepted_a_step_at_4": {k: round(sum(v[:4]), 3) for k, v in by_top_k.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
