"""Gaussian processes of BoTorch over what was measured: log-TPS over all knobs, log-perplexity over the quality knobs.

The one module of the samplers that imports torch. All points lie in the unit cube of `Problem.point`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from botorch.acquisition.multi_objective.analytic import ExpectedHypervolumeImprovement
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.utils.multi_objective.box_decompositions.non_dominated import FastNondominatedPartitioning
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEAST_NOISE = 1.1e-3  # standard deviation in units of the outcomes' own
FIT_STEPS = 60
AT_ONCE = 256  # points predicted together
NOT_MEASURED = 0  # the number of a point that is none of the measurements

torch.set_num_threads(1)  # the matrices are small; threads would only disturb what is being measured


@dataclass(frozen=True)
class Process:
    """A fitted Gaussian process z, and what it stands for: y = centre + scale · z."""

    model: Any
    centre: float
    scale: float

    def predict(self, points: Array, relative_to: Array | None = None) -> tuple[Array, Array]:
        """Mean and standard deviation of the outcome, without noise, at `points` (n × d).

        With `relative_to` (d) the deviation is that of the difference to the outcome there: what is not known of both
        alike, such as how hard the texts are, says nothing of which is better.
        """
        means, variances = [], []
        with torch.no_grad(), _quiet():
            for start in range(0, len(points), AT_ONCE):  # the joint covariance of few is cheap
                some = points[start : start + AT_ONCE]
                at = some if relative_to is None else np.vstack([some, relative_to])
                found = self.model.posterior(_numbered(at, NOT_MEASURED))
                variance = found.variance.squeeze(-1).numpy()
                if relative_to is not None:
                    shared = found.distribution.covariance_matrix[-1].numpy()
                    variance = (variance + variance[-1] - 2 * shared)[:-1]
                means.append(found.mean.squeeze(-1).numpy()[: len(some)])
                variances.append(np.maximum(variance, 1e-12))
        mean, sd = np.concatenate(means), np.sqrt(np.concatenate(variances))
        return self.centre + self.scale * mean, self.scale * sd


def fit(points: Array, outcomes: Array, noise: Array) -> Process:
    """Fit a process to outcomes (n) at points (n × d), whose errors have the covariance `noise` (n × n).

    More noise than that, of each outcome by itself, is fitted too.
    """
    centre, scale = float(outcomes.mean()), float(max(outcomes.std(), 1e-6))
    model = _model(points, (outcomes - centre) / scale, noise / scale**2)
    with _quiet():
        try:
            fit_gpytorch_mll(
                ExactMarginalLogLikelihood(model.likelihood, model),
                optimizer_kwargs={"options": {"maxiter": FIT_STEPS}},
                max_attempts=1,
            )
        except (ModelFittingError, RuntimeError):
            model.eval()  # the priors' own lengthscales
    return Process(model, centre, scale)


def with_beliefs(process: Process, points: Array) -> Process:
    """The same process as if `points` had been measured and were as predicted: what is being measured elsewhere."""
    if not len(points):
        return process
    known = process.model.train_inputs[0][:, :-1].numpy()
    with torch.no_grad(), _quiet():
        believed = process.model.posterior(_numbered(points, NOT_MEASURED)).mean.squeeze(-1).numpy()
    noise = process.model.covar_module.kernels[1].covariance[1:, 1:].numpy()
    size = len(known) + len(points)
    larger = np.zeros((size, size))
    larger[: len(known), : len(known)] = noise
    outcomes = np.concatenate([process.model.train_targets.numpy(), believed])
    model = _model(np.vstack([known, points]), outcomes, larger)
    model.covar_module.kernels[0].load_state_dict(process.model.covar_module.kernels[0].state_dict())
    model.mean_module.load_state_dict(process.model.mean_module.state_dict())
    model.likelihood.second_noise_covar.load_state_dict(process.model.likelihood.second_noise_covar.state_dict())
    model.eval()
    return Process(model, process.centre, process.scale)


def _model(points: Array, outcomes: Array, noise: Array) -> Any:
    """A SingleTaskGP in its starting state: Matérn 5/2 with BoTorch's priors for lengthscales, and the known noise."""
    count, dimensions = points.shape
    likelihood = FixedNoiseGaussianLikelihood(
        noise=torch.full((count,), LEAST_NOISE**2, dtype=torch.float64), learn_additional_noise=True
    )
    likelihood.second_noise_covar.initialize(noise=1e-3)
    smooth = get_covar_module_with_dim_scaled_prior(
        ard_num_dims=dimensions, use_rbf_kernel=False, active_dims=list(range(dimensions))
    )
    return SingleTaskGP(
        _numbered(points, np.arange(1, count + 1)),
        torch.from_numpy(outcomes).unsqueeze(-1),
        likelihood=likelihood,
        covar_module=smooth + KnownNoise(torch.from_numpy(noise), dimensions),
        outcome_transform=None,
    )


class KnownNoise(Kernel):  # type: ignore[misc]
    """The covariance of measurement errors, by the number of the measurement in column `column`; 0 is none of them."""

    def __init__(self, covariance: Any, column: int) -> None:
        super().__init__()
        self._column = column
        self.covariance = torch.nn.functional.pad(covariance, (1, 0, 1, 0))

    def forward(self, x1: Any, x2: Any, diag: bool = False, last_dim_is_batch: bool = False, **_: Any) -> Any:
        """Errors of the measurements in x1 against those in x2."""
        first, second = x1[..., self._column].long(), x2[..., self._column].long()
        if diag:
            return self.covariance[first, second]
        return self.covariance[first.unsqueeze(-1), second.unsqueeze(-2)]


def _numbered(points: Array, numbers: Any) -> Any:
    return torch.from_numpy(np.column_stack([points, np.broadcast_to(numbers, len(points))]))


@dataclass(frozen=True)
class Prediction:
    """What is expected of n settings: ln TPS and ln perplexity, each with its standard deviation."""

    speed: Array
    speed_sd: Array
    log_ppl: Array
    log_ppl_sd: Array


def hypervolume_gain(expected: Prediction, front: Array, worst: tuple[float, float], least_log_ppl: float) -> Array:
    """Expected growth of the hypervolume by each of n settings, in ln TPS: averaged over the perplexities it spans.

    Args:
        expected: of the settings.
        front: (ln TPS, ln perplexity) of what was measured, m × 2; points beyond `worst` span nothing.
        worst: ln TPS and ln perplexity that the hypervolume is spanned from.
        least_log_ppl: where the perplexities begin over which is averaged.

    Daulton et al., Differentiable Expected Hypervolume Improvement, NeurIPS 2020; the analytic form of BoTorch.
    """
    turned = torch.from_numpy(front * np.array([1.0, -1.0]))  # both up
    least = torch.tensor([worst[0], -worst[1]], dtype=torch.float64)
    partitioning = FastNondominatedPartitioning(ref_point=least, Y=turned[(turned > least).all(dim=1)])
    acquisition = ExpectedHypervolumeImprovement(_Predicted(expected), least.tolist(), partitioning)
    with torch.no_grad():
        gains = acquisition(torch.arange(len(expected.speed), dtype=torch.float64).reshape(-1, 1, 1))
    return np.asarray(gains.numpy() / (worst[1] - least_log_ppl))


class _Predicted(Model):  # type: ignore[misc]
    """Predictions behind BoTorch's interface of a model: its points are their numbers."""

    num_outputs = 2

    def __init__(self, expected: Prediction) -> None:
        super().__init__()
        means, sds = (expected.speed, -expected.log_ppl), (expected.speed_sd, expected.log_ppl_sd)
        self._mean = torch.from_numpy(np.column_stack(means))
        self._variance = torch.from_numpy(np.column_stack(sds) ** 2)

    def posterior(self, numbers: Any, *_: Any, **__: Any) -> Any:
        chosen = numbers.squeeze(-1).long()
        return SimpleNamespace(mean=self._mean[chosen], variance=self._variance[chosen])


def _quiet() -> warnings.catch_warnings[None]:
    return warnings.catch_warnings(action="ignore")
