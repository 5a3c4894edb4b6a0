"""vLLM's patches as knobs of a study: read, searched, switched on a running engine, written into the manifest."""

import json
import sys
from types import SimpleNamespace

import pytest

from kernels import plugin
from kernels.patches import base
from kernels.patches.base import Patch, PatchRefusedError
from search import run
from search.engine.live import LiveKnobs
from search.engine.protocol import EngineError, Load
from search.engine.simulated import SimulatedEngine
from search.errors import UsageError
from search.knobs import canonical, quality_part
from search.manifest import patch_keys
from search.spec import read_study

TOP_K = "  centroid_top_k: {low: 1, high: 128, log: true}\n"
PATCHES = "".join(f"  {key}: {{low: 0, high: 1}}\n" for key in plugin.PATCHES)


def test_a_study_may_search_the_patches(edit_study):
    spec = read_study(edit_study(TOP_K, TOP_K + PATCHES))
    assert [knob.name for knob in spec.knobs][3:] == list(plugin.PATCHES)
    assert [knob.affects_quality for knob in spec.knobs][3:] == [True, False, False]


def test_a_patch_is_on_or_off(edit_study):
    with pytest.raises(UsageError, match=r"line \d+: knobs.FA_SLIDING: high \(2\) is over 1"):
        read_study(edit_study(TOP_K, "  FA_SLIDING: {low: 0, high: 2}\n"))


def test_only_the_drafters_patches_need_a_drafter(edit_study):
    folder = edit_study("  drafter: example/drafter\n", "")
    file = folder / "study.yaml"
    lines = [line for line in file.read_text().splitlines() if "centroid_top_k" not in line and "num_spec" not in line]
    text = "\n".join(lines)
    file.write_text(text.replace("knobs:", "knobs:\n  FA_SLIDING: {low: 0, high: 1}"))
    assert [knob.name for knob in read_study(folder).knobs] == ["sliding_window", "FA_SLIDING"]
    file.write_text(text.replace("knobs:", "knobs:\n  DRAFT_GRAPH: {low: 0, high: 1}"))
    with pytest.raises(UsageError, match="knobs.DRAFT_GRAPH needs a drafter"):
        read_study(folder)


@pytest.mark.parametrize(("drafts", "kept"), [(0, [1, 0, 0]), (1, [1, 1, 0]), (2, [1, 1, 1])])
def test_settings_that_differ_in_patches_without_work_are_one(drafts, kept):
    native = {"sliding_window": 512, "num_speculative_tokens": 0, **dict.fromkeys(plugin.PATCHES, 0)}
    found = canonical({"num_speculative_tokens": drafts, **dict.fromkeys(plugin.PATCHES, 1)}, native)
    assert [found[key] for key in plugin.PATCHES] == kept


def test_a_setting_without_patches_is_spelt_as_before():
    native = {"sliding_window": 512, "num_speculative_tokens": 0}
    assert canonical({"num_speculative_tokens": 3}, native) == {"sliding_window": 512, "num_speculative_tokens": 3}


def test_perplexity_hangs_on_the_attention_patch_alone():
    assert quality_part(dict.fromkeys(plugin.PATCHES, 1)) == {"FA_SLIDING": 1}


def test_the_simulated_engine_starts_without_patches():
    limits = {"num_speculative_tokens": 4, "FA_SLIDING": 1}
    loaded = SimulatedEngine().load(Load(model="m", drafter="d", args={}, limits=limits))
    assert loaded.native["FA_SLIDING"] == 0 and "DRAFT_GRAPH" not in loaded.native


def test_a_search_of_patches_runs_to_its_end(edit_study, tmp_path, monkeypatch, capfd):
    folder = edit_study(TOP_K, TOP_K + PATCHES)
    monkeypatch.chdir(tmp_path)
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    command = ["--study", str(folder), "--storage", storage, "--engine", "simulated", "--trials", "30", "--json"]
    assert run.main([*command, "--confirm", "0"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["trials"]["complete"] + found["trials"]["pruned"] == 30
    settings = [point["knobs"] for point in found["front"]]
    assert all(set(plugin.PATCHES) <= set(knobs) for knobs in settings)


# On a running engine.


class Runner(SimpleNamespace):
    """A V2 model runner with one sliding layer; counts its captures."""

    def __init__(self, device):
        layer = SimpleNamespace(sliding_window=512, impl=SimpleNamespace(sliding_window=(511, 0)))
        super().__init__(
            device=SimpleNamespace(type=device),
            cudagraph_manager=None,
            attn_groups=[],
            speculator=None,
            speculative_config=None,
            model=None,
            req_states=SimpleNamespace(),
            compilation_config=SimpleNamespace(static_forward_context={"layer": layer}, cudagraph_capture_sizes=[]),
        )


@pytest.fixture
def engine(monkeypatch):
    """Live knobs of an engine on a GPU; patches install as stand-ins, and captures are only counted."""
    monkeypatch.setattr(base, "active", {})
    monkeypatch.setattr(plugin, "active", base.active)
    for key, module in plugin.PATCHES.items():
        stand_in = SimpleNamespace(install=lambda key=key: base.activate(Patch(key), "as a stand-in"))
        monkeypatch.setitem(sys.modules, module, stand_in)

    def on(device):
        runner = Runner(device)
        worker = SimpleNamespace(model_runner=runner)
        core = SimpleNamespace(
            scheduler=SimpleNamespace(num_spec_tokens=0, dynamic_sd_lookup=[]),
            model_executor=SimpleNamespace(driver_worker=worker),
        )
        live = LiveKnobs(core)
        if live._graphs is not None:
            captured = []
            monkeypatch.setattr(live._graphs, "capture", lambda: captured.append(sorted(base.active)))
            live.captured = captured
        return live

    return on


def test_a_patch_is_switched_before_the_graphs_are_captured_again(engine):
    live = engine("cuda")
    live.apply({"FA_SLIDING": 1, "DRAFT_GRAPH": 0})
    live.apply({"FA_SLIDING": 0, "DRAFT_GRAPH": 1})
    assert live.captured == [["FA_SLIDING"], ["DRAFT_GRAPH"]]


def test_patches_that_act_are_read_back(engine):
    live = engine("cuda")
    live.apply({"FA_SLIDING": 1})
    assert live.read_back() == {"sliding_window": 512, "FA_SLIDING": 1}
    live.apply({"FA_SLIDING": 0})
    assert live.read_back() == {"sliding_window": 512}


def test_without_a_gpu_a_patch_is_no_knob(engine):
    with pytest.raises(EngineError, match="FA_SLIDING is a knob on a GPU alone") as caught:
        engine("cpu").apply({"FA_SLIDING": 1})
    assert caught.value.kind == "bad-setting"


def test_a_patch_that_refuses_is_a_bad_setting(engine, monkeypatch):
    def install():
        raise PatchRefusedError("FA_SLIDING=1 is refused: it knows vLLM 0.26.")

    monkeypatch.setitem(sys.modules, plugin.PATCHES["FA_SLIDING"], SimpleNamespace(install=install))
    with pytest.raises(EngineError, match="it knows vLLM 0.26") as caught:
        engine("cuda").apply({"FA_SLIDING": 1})
    assert caught.value.kind == "bad-setting"


# In the manifest.


def test_the_manifest_carries_the_searched_value_whatever_the_worker_was_built_with():
    facts = {"patches": list(plugin.PATCHES)}  # all that are searched are installed when the engine is built
    setting = {"num_speculative_tokens": 7, "FA_SLIDING": 0, "FUSED_CENTROID_HEAD": 1, "DRAFT_GRAPH": 0}
    assert patch_keys(facts, setting) == {"FUSED_CENTROID_HEAD": "1"}
