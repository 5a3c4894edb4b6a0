"""Muon for the matrices, AdamW for the rest, and a learning rate that follows the wall clock.

Muon (Jordan et al., 2024) replaces a matrix's momentum by its nearest orthogonal matrix, found by five Newton-Schulz
steps. Matrices of one shape go through those steps together, as one batch: the models here are many small layers.
"""

import time

import torch


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximate orthogonal factors of `matrices` (n, rows, columns), in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    wide = x.size(1) <= x.size(2)
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum; the update of a (rows, columns) matrix is scaled by sqrt(max(1, rows / columns))."""

    def __init__(self, params, lr: float, momentum: float = 0.95):
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter from its gradient; `closure` is ignored."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                grads = torch.stack([p.grad for p in params])
                state = self.state[params[0]]
                buffer = state.setdefault("momentum", torch.zeros_like(grads))
                buffer.lerp_(grads, 1 - group["momentum"])
                update = orthogonalise(grads.lerp(buffer, group["momentum"]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_add_(params, list(update.to(params[0].dtype).unbind(0)), alpha=-scale)


def optimizers(model: torch.nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon over the matrices inside layers and projections; AdamW over embeddings and norms."""
    matrices, rest = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (matrices if p.dim() == 2 and "embed" not in name and "lm_head" not in name else rest).append(p)
    built: list[torch.optim.Optimizer] = [Muon(matrices, lr=muon_lr)]
    built.append(
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=rest[0].is_cuda)
    )
    for optimizer in built:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return built


class Clock:
    """Learning-rate factor by wall time: short warm-up, plateau, then a line to zero over the last `decay` part."""

    def __init__(self, seconds: float, decay: float = 0.5):
        self.seconds, self.decay, self.start = seconds, decay, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self.start

    def done(self) -> bool:
        """Whether the time is up."""
        return self.elapsed_s >= self.seconds

    def apply(self, built: list[torch.optim.Optimizer], step: int) -> float:
        """Set the learning rates for this moment and return the factor."""
        left = max(0.0, 1.0 - self.elapsed_s / self.seconds)
        factor = min(1.0, (step + 1) / 100, left / self.decay)
        for optimizer in built:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
        return factor
