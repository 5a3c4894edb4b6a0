"""The vLLM plugin: what each patch refuses, what it leaves to vLLM, and what it says of itself.

vLLM is a stand-in here, with the names, signatures and attributes of its release 0.26 that the patches look at; a real
one is in test_kernels_vllm.py.
"""

import asyncio
import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kernels import plugin
from kernels.centroid_head import without_tokens
from kernels.draft_loop import DraftLoop
from kernels.patches import base, draft_graph, window_attention
from kernels.patches.base import PatchRefusedError
from search.engine.protocol import EngineError
from search.engine.readback import EffectiveKnobs, ReadBack
from search.manifest import patch_keys

TRITON_ATTN = "vllm.v1.attention.backends.triton_attn"
GEMMA_MTP = "vllm.model_executor.models.gemma4_mtp"
V1_DRAFTER, V1_BASE = "vllm.v1.spec_decode.gemma4", "vllm.v1.spec_decode.llm_base_proposer"
V2_BASE = "vllm.v1.worker.gpu.spec_decode.speculator"
V2_LOOP = "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator"
V2_GRAPHS = "vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils"


def function(name, parameters, result=None):
    """A function with these parameters; its calls are collected in `.calls`."""
    calls = []
    scope = {"calls": calls, "result": result}
    exec(f"def {name}({', '.join(parameters)}):\n    calls.append(locals())\n    return result", scope)
    scope[name].calls = calls
    return scope[name]


@pytest.fixture
def vllm(monkeypatch):
    """Stand-in for vLLM 0.26 on a CUDA GPU; changes to it are the test's own."""
    for key in plugin.PATCHES:
        monkeypatch.delenv(key, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(base, "active", {})
    monkeypatch.setattr(plugin, "active", base.active)

    def module(path, **attributes):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[name])
        vars(sys.modules[path]).update(attributes)
        return sys.modules[path]

    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_type="cuda")
    stand_in = module("vllm", __version__="0.26.0")
    module("vllm.platforms", current_platform=platform)
    optional = window_attention.PARAMETERS.split()
    needed, optional = optional[:16], [f"{name}=None" for name in optional[16:]]
    module(TRITON_ATTN, unified_attention=function("unified_attention", [*needed, *optional]))

    class Gemma4MTPMaskedEmbedder:
        get_top_tokens = function("get_top_tokens", ["self", "hidden_states", "lm_head_weight"], "stock")

    class Gemma4MTP:
        _get_full_lm_head_weight = function("_get_full_lm_head_weight", ["self"], "head weight")

    class SpecDecodeBaseProposer:
        __init__ = function("__init__", ["self", "vllm_config"])

    class Gemma4Proposer(SpecDecodeBaseProposer):
        load_model = function("load_model", ["self", "target_model"])

    class DraftModelSpeculator:
        _greedy_sample_draft = function("_greedy_sample_draft", ["self", "hidden_states"], "stock")
        load_model = function("load_model", ["self", "target_model"])

    class AutoRegressiveSpeculator(DraftModelSpeculator):
        capture = function("capture", ["self"])
        init_cudagraph_manager = function("init_cudagraph_manager", ["self", "cudagraph_mode"])
        _generate_draft = function("_generate_draft", ["self", *draft_graph.BATCH, "cudagraph_runtime_mode=None"])
        _multi_step_decode = function(
            "_multi_step_decode", ["self", "num_reqs", "skip_attn", "batch_desc", "num_tokens_across_dp"]
        )

    module(GEMMA_MTP, Gemma4MTP=Gemma4MTP, Gemma4MTPMaskedEmbedder=Gemma4MTPMaskedEmbedder)
    module(V1_BASE, SpecDecodeBaseProposer=SpecDecodeBaseProposer)
    module(V1_DRAFTER, Gemma4Proposer=Gemma4Proposer)
    module(V2_BASE, DraftModelSpeculator=DraftModelSpeculator)
    module(V2_LOOP, AutoRegressiveSpeculator=AutoRegressiveSpeculator)
    module(V2_GRAPHS, SpeculatorCudaGraphManager=GraphManager)
    return stand_in


class GraphManager:
    """Stand-in for vLLM's manager of a speculator's graphs: a graph is the list of passes that were captured."""

    def __init__(self, vllm_config, device, cudagraph_mode, decode_query_len, lora_capture_cases=None):
        self.vllm_config, self.device = vllm_config, device
        self.cudagraph_mode, self.decode_query_len = cudagraph_mode, decode_query_len
        self.graphs, self.replayed = {}, []

    def needs_capture(self):
        return self.cudagraph_mode == "FULL"

    def capture(
        self,
        forward_fn,
        model_state,
        input_buffers,
        block_tables,
        attn_groups,
        kv_cache_config,
        progress_bar_desc="",
    ):
        self.graphs["one request"] = forward_fn(1, 1, "metadata", "slots", None, "NONE")

    def run_fullgraph(self, desc):
        self.replayed.append(desc)


def of(name, attribute):
    return getattr(sys.modules[name], attribute)


# Switches.


def test_without_keys_nothing_of_vllm_is_changed(vllm):
    stock = of(TRITON_ATTN, "unified_attention")
    plugin.register()
    assert plugin.report() == {}
    assert of(TRITON_ATTN, "unified_attention") is stock


@pytest.mark.parametrize("value", ["", "0"])
def test_a_key_that_is_off_installs_nothing(vllm, monkeypatch, value):
    monkeypatch.setenv("FA_SLIDING", value)
    plugin.register()
    assert plugin.report() == {}


@pytest.mark.parametrize("value", ["true", "yes", "2", " 1"])
def test_a_key_with_another_value_is_refused(vllm, monkeypatch, value):
    monkeypatch.setenv("DRAFT_GRAPH", value)
    with pytest.raises(PatchRefusedError, match=r"DRAFT_GRAPH is '.*': it must be 1 \(on\) or 0 \(off\)"):
        plugin.register()


def test_all_patches_fit_the_release_they_were_written_for_and_say_that_they_act(vllm, monkeypatch, caplog):
    for key in plugin.PATCHES:
        monkeypatch.setenv(key, "1")
    with caplog.at_level("INFO", logger="vllm.pareto"):
        plugin.register()
        plugin.register()  # vLLM may load plugins twice
    assert plugin.report() == {key: {"taken": 0, "left": 0} for key in sorted(plugin.PATCHES)}
    assert [record.message.split(" is active")[0] for record in caplog.records] == list(plugin.PATCHES)


@pytest.mark.parametrize("key", plugin.PATCHES)
def test_a_patch_that_is_removed_leaves_vllm_as_it_was(vllm, key):
    owners = [module for name, module in sys.modules.items() if name.startswith("vllm")]
    owners += [value for module in owners for value in vars(module).values() if isinstance(value, type)]
    before = [dict(vars(owner)) for owner in owners]
    patch = plugin.install(key)
    assert [dict(vars(owner)) for owner in owners] != before
    patch.remove()
    assert [dict(vars(owner)) for owner in owners] == before
    assert plugin.report() == {}


def test_the_plugin_is_imported_without_torch_and_vllm():
    # vLLM logs a plugin whose import fails and goes on without it: a key would then be set and never read.
    code = "import sys, kernels.plugin; print([m for m in ('torch', 'vllm', 'triton') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# Refusals.


@pytest.mark.parametrize("key", plugin.PATCHES)
def test_without_a_cuda_gpu_a_key_is_refused(vllm, monkeypatch, key):
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_type="xpu")
    monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", platform)
    monkeypatch.setenv(key, "1")
    with pytest.raises(PatchRefusedError, match=f"{key}=1 is refused: .*NVIDIA GPU.*xpu.*Unset {key}"):
        plugin.register()


@pytest.mark.parametrize("key", plugin.PATCHES)
@pytest.mark.parametrize("version", ["0.27.1", "0.33.0", "1.0", "0.2.6"])
def test_an_unknown_release_is_refused_by_its_name(vllm, key, version):
    vllm.__version__ = version
    with pytest.raises(PatchRefusedError, match=f"{key}=1 is refused: it knows vLLM 0.26, and this is vLLM {version}"):
        plugin.install(key)


CHANGES = {
    "FA_SLIDING": [(TRITON_ATTN, None, "unified_attention")],
    "FUSED_CENTROID_HEAD": [
        (GEMMA_MTP, "Gemma4MTP", "_get_full_lm_head_weight"),
        (GEMMA_MTP, "Gemma4MTPMaskedEmbedder", "get_top_tokens"),
        (V1_DRAFTER, "Gemma4Proposer", "load_model"),
        (V2_BASE, "DraftModelSpeculator", "_greedy_sample_draft"),
        (V2_BASE, "DraftModelSpeculator", "load_model"),
    ],
    "DRAFT_GRAPH": [
        (V2_LOOP, "AutoRegressiveSpeculator", "_multi_step_decode"),
        (V2_LOOP, "AutoRegressiveSpeculator", "_generate_draft"),
        (V2_LOOP, "AutoRegressiveSpeculator", "capture"),
        (V2_LOOP, "AutoRegressiveSpeculator", "init_cudagraph_manager"),
        (V2_GRAPHS, "SpeculatorCudaGraphManager", "__init__"),
        (V2_GRAPHS, "SpeculatorCudaGraphManager", "capture"),
        (V2_GRAPHS, "SpeculatorCudaGraphManager", "run_fullgraph"),
    ],
}
EACH_CHANGE = [(key, *change) for key, changes in CHANGES.items() for change in changes]


@pytest.mark.parametrize(("key", "module", "owner", "name"), EACH_CHANGE)
def test_a_function_with_a_new_parameter_is_refused_before_anything_is_changed(
    vllm, monkeypatch, key, module, owner, name
):
    holder = of(module, owner) if owner else sys.modules[module]
    monkeypatch.setattr(holder, name, function("changed", ["self", "something_new"]))
    before = [dict(vars(m)) for n, m in sorted(sys.modules.items()) if n.startswith("vllm")]
    with pytest.raises(
        PatchRefusedError, match=rf"{key}=1 is refused: .*{name} of this vLLM takes \(.*something_new\)"
    ):
        plugin.install(key)
    assert [dict(vars(m)) for n, m in sorted(sys.modules.items()) if n.startswith("vllm")] == before
    assert plugin.report() == {}


@pytest.mark.parametrize(("key", "module", "owner", "name"), [c for c in EACH_CHANGE if c[-1] != "__init__"])
def test_a_function_that_is_gone_is_refused(vllm, monkeypatch, key, module, owner, name):
    holder = of(module, owner) if owner else sys.modules[module]
    monkeypatch.setattr(holder, name, None)
    with pytest.raises(PatchRefusedError, match=f"{key}=1 is refused: this vLLM has no .*{name}. Unset {key}"):
        plugin.install(key)


# FA_SLIDING.


def attention_call(**changes):
    q = torch.zeros(8, 4, 64, dtype=torch.bfloat16)
    cache = torch.zeros(3, 16, 2, 64, dtype=torch.bfloat16)
    call = dict.fromkeys(window_attention.PARAMETERS.split())
    call |= {"q": q, "k": cache, "v": cache, "out": torch.zeros_like(q)}
    call |= {"max_seqlen_q": 8, "max_seqlen_k": 40, "causal": True, "window_size": (511, 0), "softcap": 0}
    call |= {"block_table": torch.zeros(1, 3, dtype=torch.int32), "kv_quant_mode": 0, "chunk_lookback": -1}
    call |= {"softmax_scale": 1.0, "k_descale": torch.ones(1), "v_descale": torch.ones(1), "seq_threshold_3D": 8}
    return call | changes


@pytest.fixture
def attention(vllm, monkeypatch):
    """The patched function, with the kernel's own calls in `.taken` and vLLM's in `.left`."""
    import kernels.window_attention

    taken = []
    monkeypatch.setattr(kernels.window_attention, "window_attention", lambda *args, **rest: taken.append(rest))
    left = of(TRITON_ATTN, "unified_attention").calls
    plugin.install("FA_SLIDING")
    return SimpleNamespace(call=of(TRITON_ATTN, "unified_attention"), taken=taken, left=left)


@pytest.mark.parametrize(("window_size", "window"), [((511, 0), 512), ((0, 0), 1), ((-1, -1), 0)])
def test_a_step_of_few_rows_is_taken_with_the_window_in_tokens(attention, window_size, window):
    attention.call(**attention_call(window_size=window_size))
    assert attention.left == []
    assert attention.taken == [
        {"scale": 1.0, "max_query_rows": 8, "window": window, "softcap": 0, "max_seq_len": 40},
    ]
    assert plugin.report() == {"FA_SLIDING": {"taken": 1, "left": 0}}


LEFT = {
    "a prompt": {"max_seqlen_q": 17},
    "a large batch": {"block_table": torch.zeros(17, 3, dtype=torch.int32)},
    "bidirectional": {"causal": False},
    "causal by sequence": {"causal": torch.ones(1, dtype=torch.bool)},
    "a window to both sides": {"window_size": (511, 511)},
    "another head size": {"q": torch.zeros(8, 4, 80, dtype=torch.bfloat16)},
    "another dtype": {"k": torch.zeros(3, 16, 2, 64, dtype=torch.float8_e4m3fn)},
    "a quantised cache": {"kv_quant_mode": 1},
    "chunks": {"chunk_lookback": 0},
    **{name: {name: torch.ones(1)} for name in window_attention.UNSUPPORTED},
}


@pytest.mark.parametrize("changes", LEFT.values(), ids=LEFT)
def test_what_the_kernel_does_not_compute_is_left_to_vllm(attention, changes):
    call = attention_call(**changes)
    attention.call(**call)
    assert attention.taken == []
    assert len(attention.left) == 1 and all(attention.left[0][name] is value for name, value in call.items())
    assert plugin.report() == {"FA_SLIDING": {"taken": 0, "left": 1}}


# FUSED_CENTROID_HEAD.


@pytest.fixture
def head_calls(vllm, monkeypatch):
    """Calls of the fused head, which is installed."""
    import kernels.centroid_head

    calls = []

    def fused(hidden, centroids, ordering, lm_head, top_k, **rest):
        calls.append({"ordering": ordering, "lm_head": lm_head, "top_k": top_k, "ties": rest["ties"]})
        return "fused"

    monkeypatch.setattr(kernels.centroid_head, "centroid_top_token", fused)
    monkeypatch.setattr(kernels.centroid_head, "make_workspace", lambda rows, centroids: (rows, centroids))
    plugin.install("FUSED_CENTROID_HEAD")
    return calls


def drafter(**changes):
    """A Gemma 4 drafter model of four centroids with two tokens each."""
    model = of(GEMMA_MTP, "Gemma4MTP")()
    head = of(GEMMA_MTP, "Gemma4MTPMaskedEmbedder")()
    head.centroids = SimpleNamespace(weight="centroids")
    head.token_ordering, head.num_centroids = torch.tensor([4, 0, 6, 2, 1, 7, 3, 5]), 4
    head.centroid_intermediate_top_k = 3
    model.masked_embedding, model._suppress_token_ids = head, None
    vars(model).update(changes)
    return model


def speculator(model, method="greedy", local_argmax=False):
    made = of(V2_LOOP, "AutoRegressiveSpeculator")()
    made.model, made.use_local_argmax_reduction = model, local_argmax
    made.speculative_config = SimpleNamespace(draft_sample_method=method)
    return made


def test_the_v2_runner_drafts_through_the_fused_head_with_ties_by_token(head_calls):
    made = speculator(drafter())
    made.load_model("target")
    assert made._greedy_sample_draft(torch.zeros(1, 8)) == "fused"
    (call,) = head_calls
    assert (call["ties"], call["top_k"], call["lm_head"]) == ("token", 3, "head weight")
    assert call["ordering"] is made.model.masked_embedding.token_ordering
    assert plugin.report()["FUSED_CENTROID_HEAD"] == {"taken": 1, "left": 0}


def test_the_v1_runner_drafts_through_the_fused_head_with_ties_by_candidate(head_calls):
    assert drafter().masked_embedding.get_top_tokens(torch.zeros(2, 8), "weight") == "fused"
    assert (head_calls[0]["ties"], head_calls[0]["lm_head"]) == ("candidate", "weight")


def test_tokens_that_may_not_be_drafted_are_no_candidates(head_calls):
    made = speculator(drafter(_suppress_token_ids=[6, 5]))
    made.load_model("target")
    made._greedy_sample_draft(torch.zeros(1, 8))
    assert head_calls[0]["ordering"].tolist() == [4, 0, 2, 2, 1, 7, 3, 3]


def test_a_centroid_of_tokens_that_may_not_be_drafted_is_an_error():
    with pytest.raises(ValueError, match="only tokens that may not be drafted"):
        without_tokens(torch.tensor([4, 0, 6, 2]), 2, [2, 6])


def test_many_rows_are_left_to_vllms_head(head_calls):
    made, many = speculator(drafter()), torch.zeros(17, 8)
    assert made._greedy_sample_draft(many) == "stock"
    assert made.model.masked_embedding.get_top_tokens(many, "weight") == "stock"
    assert plugin.report()["FUSED_CENTROID_HEAD"] == {"taken": 0, "left": 2}


def test_a_drafter_without_a_centroid_head_refuses_the_fused_one(head_calls):
    model = drafter(masked_embedding=None)
    with pytest.raises(PatchRefusedError, match="drafter .Gemma4MTP. has no centroid head"):
        speculator(model).load_model("target")
    proposer = of(V1_DRAFTER, "Gemma4Proposer")("config")
    proposer.model = model
    with pytest.raises(PatchRefusedError, match="has no centroid head"):
        proposer.load_model("target")


def test_a_centroid_head_that_looks_otherwise_is_refused(head_calls):
    model = drafter()
    del model.masked_embedding.token_ordering
    with pytest.raises(PatchRefusedError, match="Gemma4MTPMaskedEmbedder of this vLLM has no token_ordering"):
        speculator(model).load_model("target")


def test_sampled_drafts_refuse_the_fused_head(head_calls):
    with pytest.raises(PatchRefusedError, match="draft_sample_method"):
        speculator(drafter(), method="probabilistic").load_model("target")


# DRAFT_GRAPH.


def looping(drafts=4, **changes):
    """A speculator of vLLM's V2 runner that writes down the pass number it sees in each of its passes."""
    made = of(V2_LOOP, "AutoRegressiveSpeculator")()
    attributes = {
        **dict.fromkeys(draft_graph.SPECULATOR_ATTRIBUTES),
        "current_draft_step": torch.tensor(0),
        "num_speculative_steps": drafts,
        "advance_draft_positions": False,
        "eplb_state": None,
        "decode_cudagraph_manager": GraphManager("config", "cuda", "FULL", 1),
        "vllm_config": SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode="PIECEWISE")),
    }
    vars(made).update(attributes | changes)
    made.seen = []
    made._generate_draft = lambda *batch: made.seen.append((int(made.current_draft_step), batch))
    return made


def test_a_loop_holds_every_pass_with_its_number_for_every_number_of_drafts(vllm):
    made = looping(drafts=4)
    counter = made.current_draft_step
    DraftLoop(made).capture()
    assert [step for step, _ in made.seen] == [1, 2, 3, 1, 2, 1]  # of 4, 3 and 2 drafts
    assert {batch for _, batch in made.seen} == {(1, 1, "metadata", "slots", None, "NONE")}
    assert made.current_draft_step is counter and int(counter) == 0


def test_the_number_of_drafts_can_change_from_step_to_step(vllm):
    made = looping(drafts=4)
    loop = DraftLoop(made)
    loop.capture()
    for drafts in (4, 2, 3):
        made.num_speculative_steps = drafts
        assert loop.replay("one request")
    assert {drafts: manager.replayed for drafts, manager in loop._graphs.items()} == {
        drafts: ["one request"] for drafts in (2, 3, 4)
    }
    made.num_speculative_steps = 5
    assert not loop.replay("one request")


def test_a_captured_batch_is_one_launch_and_another_is_left_to_vllm(vllm):
    stock = of(V2_LOOP, "AutoRegressiveSpeculator")._multi_step_decode.calls
    plugin.install("DRAFT_GRAPH")
    made = looping()
    made._multi_step_decode(1, False, "one request", None)  # a dummy run before the capture
    assert len(stock) == 1
    made.init_cudagraph_manager("FULL")
    made.capture()
    made._multi_step_decode(1, False, "one request", None)
    assert len(stock) == 1
    made._multi_step_decode(3, False, "three requests", None)
    assert stock[-1]["num_reqs"] == 3
    assert plugin.report()["DRAFT_GRAPH"] == {"taken": 1, "left": 2}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"advance_draft_positions": True}, "positions of this drafter .* advance"),
        ({"eplb_state": "balanced"}, "EPLB"),
        ({"decode_cudagraph_manager": GraphManager("config", "cuda", "NONE", 1)}, "cudagraph_mode PIECEWISE"),
    ],
)
def test_a_drafter_whose_loop_cannot_be_captured_refuses_the_graph(vllm, changes, why):
    plugin.install("DRAFT_GRAPH")
    with pytest.raises(PatchRefusedError, match=f"DRAFT_GRAPH=1 is refused: .*{why}"):
        looping(**changes).init_cudagraph_manager("FULL")


def test_a_drafter_that_looks_otherwise_refuses_the_graph(vllm):
    plugin.install("DRAFT_GRAPH")
    made = looping()
    del made.block_tables
    with pytest.raises(PatchRefusedError, match="AutoRegressiveSpeculator of this vLLM has no block_tables"):
        made.init_cudagraph_manager("FULL")


def test_a_drafter_of_the_v1_runner_refuses_the_graph(vllm):
    plugin.install("DRAFT_GRAPH")
    with pytest.raises(PatchRefusedError, match="DRAFT_GRAPH=1 is refused: the V1 model runner"):
        of(V1_DRAFTER, "Gemma4Proposer")("config")


# Read-back.


def test_a_worker_reports_what_its_patches_took_and_left(attention):
    attention.call(**attention_call())
    attention.call(**attention_call(max_seqlen_q=512))
    assert ReadBack().active_patches() == {"FA_SLIDING": {"taken": 1, "left": 1}}


def test_a_key_that_no_plugin_honours_is_a_mismatch_not_a_reading(vllm, monkeypatch):
    monkeypatch.setenv("FA_SLIDING", "1")
    with pytest.raises(EngineError, match="FA_SLIDING cannot act: vLLM did not load the plugin vllm_pareto") as caught:
        ReadBack().effective_knobs()
    assert caught.value.kind == "mismatch"


@pytest.fixture
def answer(monkeypatch):
    """What a warm server says to a GET: status and JSON."""
    monkeypatch.setattr("search.engine.readback.warm", SimpleNamespace(is_set=lambda: True))

    def get(path, collective_rpc):
        sent = []

        async def send(message):
            sent.append(message)

        client = SimpleNamespace(collective_rpc=collective_rpc)
        scope = {"type": "http", "path": path, "app": SimpleNamespace(state=SimpleNamespace(engine_client=client))}
        asyncio.run(EffectiveKnobs(None)(scope, None, send))
        return sent[0]["status"], json.loads(sent[1]["body"])

    return get


def test_a_server_answers_with_its_workers_patches(answer):
    asked = []

    async def collective_rpc(method):
        asked.append(method)
        return [{"FA_SLIDING": {"taken": 42, "left": 0}}, "another worker"]

    assert answer("/patches", collective_rpc) == (200, {"FA_SLIDING": {"taken": 42, "left": 0}})
    assert asked == ["active_patches"]


def test_a_server_whose_worker_refuses_says_why(answer):
    async def collective_rpc(method):
        raise Exception("Call to collective_rpc method failed: FA_SLIDING cannot act")  # as vLLM does

    assert answer("/effective", collective_rpc) == (
        500,
        {"error": "Call to collective_rpc method failed: FA_SLIDING cannot act"},
    )


# Manifest.


def test_a_manifest_carries_the_keys_of_patches_that_acted_and_no_others():
    facts = {"patches": ["FA_SLIDING", "FUSED_CENTROID_HEAD", "cpu-centroid-head"]}
    assert patch_keys(facts, {"num_speculative_tokens": 7}) == {"FA_SLIDING": "1", "FUSED_CENTROID_HEAD": "1"}
    assert patch_keys({"engine": "simulated"}, {"num_speculative_tokens": 7}) == {}


@pytest.mark.parametrize(
    ("drafts", "keys"), [(0, ["FA_SLIDING"]), (1, ["FA_SLIDING", "FUSED_CENTROID_HEAD"]), (2, list(plugin.PATCHES))]
)
def test_a_manifest_carries_no_key_of_a_patch_that_has_nothing_to_do(drafts, keys):
    assert list(patch_keys({"patches": list(plugin.PATCHES)}, {"num_speculative_tokens": drafts})) == keys
