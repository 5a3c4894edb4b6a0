"""vLLM with and without the patches: the comparison's arithmetic on any machine, a real vLLM on a CUDA GPU."""

import importlib.metadata
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import MINIATURE

from kernels import end_to_end, identity, plugin, random_checkpoint
from kernels.end_to_end import Case, Timed, WrongTokensError, require_same
from kernels.identity import BITS, Text, compare, step_at


def vllm_on_a_gpu():
    try:
        return torch.cuda.is_available() and importlib.metadata.version("vllm").startswith("0.26.")
    except importlib.metadata.PackageNotFoundError:
        return False


gpu = pytest.mark.skipif(not vllm_on_a_gpu(), reason="needs a CUDA GPU and vLLM 0.26")


# The comparison.


@pytest.mark.parametrize("value", [1.0, 1.5, 2.0, 7.9, 17.25, 0.3])
def test_a_step_of_bfloat16_is_the_distance_to_the_next_number_it_holds(value):
    here = torch.tensor(value, dtype=torch.bfloat16)
    there = (here.view(torch.int16) + 1).view(torch.bfloat16)
    assert step_at(float(here), BITS["bfloat16"]) == float(there) - float(here)


def text(tokens, best=10.0, gap=1.0, drafts=4, accepted=8):
    return Text(tuple(tokens), (best,) * len(tokens), (best - gap,) * len(tokens), drafts, accepted)


def test_texts_that_part_at_a_tie_are_told_from_texts_that_part_where_vllm_was_sure():
    stock = [text([1, 2, 3]), text([1, 2, 3], gap=0.05), text([1, 2, 3])]
    other = [text([1, 2, 3], best=10.25), text([1, 9, 9]), text([9, 2, 3], accepted=4)]
    found = compare(stock, other)
    assert (found["prompts"], found["equal"]) == (3, 1)
    assert [(p["prompt"], p["position"], p["is_tie"]) for p in found["partings"]] == [(1, 1, True), (2, 0, False)]
    assert found["largest_logit_shift"] == 0.25  # of the equal text; nothing is compared after a parting
    assert found["accepted_a_step"] == pytest.approx(20 / 12)


def timed(token, tps):
    return Timed(tokens=(token,) * 8, wall_s=8 / tps, decode_s=7 / tps, drafts=1, accepted=7)


def test_a_variant_with_other_tokens_than_stock_has_no_figure():
    require_same(Case(272, 512, 1.15), {"stock": [timed(5, 100)], "all": [timed(5, 200)]})
    with pytest.raises(WrongTokensError, match="all gave other tokens than stock at context 272"):
        require_same(Case(272, 512, 1.15), {"stock": [timed(5, 100)], "all": [timed(6, 200)]})


def test_a_figure_is_the_median_over_runs_and_its_ratio_to_stocks():
    runs = {"stock": [timed(5, tps) for tps in (90, 100, 400)], "all": [timed(5, tps) for tps in (149, 150, 151)]}
    row = end_to_end._row(Case(272, 512, 1.15), runs, {"stock": {}, "all": {"FA_SLIDING": {"taken": 1, "left": 0}}})
    assert row["variants"]["all"]["tps"] == pytest.approx(150)
    assert row["variants"]["all"]["ratio"] == pytest.approx(1.5)
    assert row["variants"]["all"]["accepted_a_step"] == 7
    assert "| 272, 512 | all | 150.0 | 1.500 | 1.15 |" in "\n".join(end_to_end.table({"cases": [row]}))


# The random checkpoint.


def test_the_random_models_have_e4bs_shape(tmp_path):
    target, drafter = (
        json.loads((p / "config.json").read_text()) for p in random_checkpoint.write_configs(tmp_path / "made")
    )
    assert (target["num_hidden_layers"], len(target["layer_types"]), target["hidden_size"]) == (42, 42, 2560)
    assert [i for i, kind in enumerate(target["layer_types"]) if kind == "full_attention"] == list(range(5, 42, 6))
    assert (drafter["num_centroids"], drafter["backbone_hidden_size"]) == (2048, 2560)
    assert drafter["text_config"]["vocab_size"] % drafter["num_centroids"] == 0


def test_both_random_models_say_one_token_whatever_they_read():
    torch.manual_seed(0)
    vocabulary, backbone, size, centroids = 8192, 64, 32, 64

    def small(*shape):
        return torch.empty(shape).uniform_(-1e-3, 1e-3)

    target = {"model.embed_tokens.weight": small(vocabulary, backbone), "model.norm.weight": small(backbone)}
    drafter = {
        "model.embed_tokens.weight": small(vocabulary, size),
        "model.pre_projection.weight": small(size, 2 * backbone),
        "model.post_projection.weight": small(backbone, size),
        "masked_embedding.centroids.weight": small(centroids, size),
        "masked_embedding.token_ordering": torch.zeros(vocabulary, dtype=torch.int64),
    }
    drafter["lm_head.weight"] = drafter["model.embed_tokens.weight"]
    for weights in (target, drafter):
        random_checkpoint.steer(weights)
    assert sorted(drafter["masked_embedding.token_ordering"].tolist()) == list(range(vocabulary))
    assert target["model.norm.weight"].eq(1).all()

    def norm(x):
        return x / x.square().mean(-1, keepdim=True).sqrt()

    embedding, head = target["model.embed_tokens.weight"], drafter["lm_head.weight"]
    read = torch.randint(vocabulary, (50,))
    hidden = norm(embedding[read] * math.sqrt(backbone))
    assert (hidden @ embedding.T).argmax(-1).eq(random_checkpoint.TOKEN).all()
    for _ in range(3):
        said = embedding[torch.full((50,), random_checkpoint.TOKEN)] * math.sqrt(backbone)
        inner = norm(torch.cat([said, hidden], -1) @ drafter["model.pre_projection.weight"].T)
        ordering = drafter["masked_embedding.token_ordering"].view(centroids, -1)
        best = (inner @ drafter["masked_embedding.centroids.weight"].T).argmax(-1)
        assert (ordering[best] == random_checkpoint.TOKEN).any(-1).all()
        assert (inner @ head.T).argmax(-1).eq(random_checkpoint.TOKEN).all()
        hidden = inner @ drafter["model.post_projection.weight"].T


# A real vLLM.


def run_in_a_process_of_its_own(*command):
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr[-4000:]


@gpu
@pytest.mark.vllm
@pytest.mark.parametrize("dtype", identity.COMPARED)
def test_greedy_tokens_of_the_miniature_are_stocks_but_for_ties(tmp_path, dtype):
    file = tmp_path / "found.json"
    command = ("kernels.identity", str(MINIATURE), "--dtype", dtype, "--json", str(file))
    code, said = run_in_a_process_of_its_own(*command)
    assert code == 0, said
    found = json.loads(file.read_text())
    for window, names in identity.COMPARED[dtype].items():
        assert found[f"{window}, {identity.AGAIN}"]["partings"] == []
        for name in names:
            row = found[f"{window}, {name}"]
            assert all(row["patches"][key]["taken"] for key in end_to_end.VARIANTS[name])
            assert row["accepted_a_step"] == pytest.approx(found[f"{window}, stock"]["accepted_a_step"], rel=0.05)


@gpu
@pytest.mark.vllm
def test_the_patches_of_this_vllm_are_the_ones_that_are_known():
    code = "from kernels import plugin; plugin.register(); print(*plugin.report())"
    environment = {**os.environ, **dict.fromkeys(plugin.PATCHES, "1")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == sorted(plugin.PATCHES)
