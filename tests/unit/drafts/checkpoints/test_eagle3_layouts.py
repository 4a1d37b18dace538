"""EAGLE-3 files of every publisher: the same draft comes out of each, and goes through an export bit for bit."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from draftco_jax.drafts.base import Shared
from draftco_jax.drafts.eagle3.checkpoint import load_draft, save_draft
from draftco_jax.drafts.vocabulary import map_tensors
from draftco_jax.models.block import Block
from draftco_jax.models.hf_weights import to_tensors
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.transformer import Decoder

TAPS = "eagle_aux_hidden_state_layer_ids"
LAYOUTS = ("ea", "specforge", "automodel", "speculators", "vllm", "nvidia", "deepspec")
DEEPSPEC = {"qk_norm": True, "tap_layers": (0, 1, 3, 5, 7)}
FLAGS = {
    "speculators": {"norm_before_residual": True, "norm_before_fc": True},
    "nvidia": {"norm_before_fc": True},
    "automodel": {"fc_norm": True, "norm_output": True},
    "deepspec": DEEPSPEC,
}


def sizes(cfg):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return {name: getattr(cfg, name) for name in (*names, "rms_norm_eps", "max_position_embeddings")}


def config_of(layout, cfg):
    """config.json as that publisher writes it."""
    taps, boundaries = list(cfg.tap_layers), [tap + 1 for tap in cfg.tap_layers]
    whole = sizes(cfg) | {"head_dim": cfg.head_dim, "rope_theta": cfg.rope_theta}
    reduced = {"draft_vocab_size": cfg.draft_vocab_size}
    classic = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu"}
    return {
        "ea": sizes(cfg) | reduced | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
        "specforge": whole | reduced | classic | {"eagle_config": {TAPS: taps}, "rope_scaling": None},
        "automodel": whole
        | reduced
        | {"architectures": ["LlamaEagle3DraftModel"], "fc_norm": True, "norm_output": True, "num_hidden_layers": 36},
        "speculators": reduced
        | {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "transformer_layer_config": sizes(cfg)
            | {
                "head_dim": cfg.head_dim,
                "rope_parameters": {"rope_theta": cfg.rope_theta, "rope_type": "default"},
            },
            TAPS: boundaries,
            "norm_before_residual": True,
            "norm_before_fc": True,
        },
        "vllm": whole | reduced | {"architectures": ["Eagle3LlamaForCausalLM"], TAPS: boundaries},
        "nvidia": whole
        | reduced
        | classic
        | {"eagle_config": {TAPS: boundaries, "use_last_layernorm": True}, "norm_before_fc": True},
        "deepspec": whole
        | {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "target_layer_ids": taps,
            "ttt_length": cfg.passes,
            "step_loss_decay": cfg.pass_decay,
            "num_target_layers": 36,
        },
    }[layout]


def tensors_of(layout, draft):
    """Tensors under that publisher's names, with the embedding table that most files hold."""
    tensors = to_tensors(draft.params, prefix="")
    if layout != "deepspec":
        tensors |= map_tensors(draft.cfg, draft.graph.constants.get("draft_to_target"))
    tensors["embed_tokens.weight"] = np.full((draft.cfg.vocab_size, draft.cfg.hidden_size), 7, np.float32)
    layer = {"automodel": "model.layers.0.", "ea": "midlayer.", "specforge": "midlayer.", "nvidia": "midlayer."}
    renamed = {}
    for name, tensor in tensors.items():
        new = name.replace("midlayer.", layer.get(layout, "layers.0."))
        prefixed = layout == "automodel" and not new.startswith(("model.", "lm_head", "d2t", "t2d"))
        renamed[f"model.{new}" if prefixed else new] = tensor
    return renamed


@pytest.fixture(scope="session")
def draft_of(make_draft):
    """Layout -> a draft of the variant that layout is used for."""

    def make(layout):
        full = layout == "deepspec"
        return make_draft(**{"passes": 3} | ({} if full else {"draft_vocab_size": 11}) | FLAGS.get(layout, {}))

    return make


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture
def folder(layout, draft_of, write_files, tmp_path):
    draft = draft_of(layout)
    return write_files(tmp_path / layout, config_of(layout, draft.cfg), tensors_of(layout, draft))


def test_every_layout_gives_the_same_draft(layout, folder, draft_of, same_tree):
    draft = draft_of(layout)
    expected = draft.cfg if layout in ("ea", "automodel") else None  # those files do not say everything
    cfg, graph, params = load_draft(folder, expected)
    assert cfg == draft.cfg
    assert "embed_tokens" not in params
    same_tree(params, draft.params)
    same_tree(graph.constants, draft.graph.constants)


def test_import_export_import_is_bit_identical_in_every_layout(layout, folder, draft_of, same_tree, tmp_path):
    draft = draft_of(layout)
    expected = draft.cfg if layout in ("ea", "automodel") else None
    first = load_draft(folder, expected)
    save_draft(tmp_path / "once", *first)
    second = load_draft(tmp_path / "once")  # what we write says everything
    assert second[0] == first[0]
    same_tree((second[1].constants, second[2]), (first[1].constants, first[2]))
    save_draft(tmp_path / "twice", *second)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
    published, written = load_file(folder / "model.safetensors"), load_file(tmp_path / "once" / "model.safetensors")
    if layout in ("specforge", "deepspec"):  # the layouts we write: names as they came, no copy of the embedding
        assert written.keys() == published.keys() - {"embed_tokens.weight"}


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_every_flag_survives_an_export(flag, make_draft, same_tree, tmp_path):
    draft = make_draft(draft_vocab_size=11, **{flag: True})
    save_draft(tmp_path, draft.cfg, draft.graph, draft.params)
    cfg, _, params = load_draft(tmp_path)
    assert cfg == draft.cfg
    same_tree(params, draft.params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_written_as_it_is_and_read_without_loss(dtype, make_draft, same_tree, tmp_path):
    draft = make_draft(draft_vocab_size=11)
    half = jax.tree.map(lambda leaf: leaf.astype(dtype), draft.params)
    save_draft(tmp_path, draft.cfg, draft.graph, half)
    kinds = {name: t.dtype for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert {kinds.pop("d2t"), kinds.pop("t2d")} == {np.dtype(np.int64), np.dtype(bool)}
    assert set(kinds.values()) == {np.dtype(dtype)}
    _, _, params = load_draft(tmp_path)
    same_tree(params, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half))


def test_bug_case_b59_live_tables_are_written_only_where_they_are_given(make_draft, tmp_path):
    draft = make_draft()
    rng = np.random.default_rng(0)
    shared = Shared(jnp.asarray(rng.normal(size=(19, 16)), jnp.float32), jnp.zeros((16, 19)))
    save_draft(tmp_path, draft.cfg, draft.graph, draft.params, shared)
    tensors = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], shared.embedding)
    np.testing.assert_array_equal(tensors["lm_head.weight"], draft.params["lm_head"]["kernel"].T)


def test_bug_case_b22_the_drafts_own_head_is_kept(draft_of, write_files, tmp_path):
    draft = draft_of("specforge")
    folder = write_files(tmp_path, config_of("specforge", draft.cfg), tensors_of("specforge", draft))
    _, _, params = load_draft(folder)
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert np.asarray(params["lm_head"]["kernel"].T).tobytes() == stored.tobytes()


class Adds(Block):
    """A layer that adds 10^layer."""

    def __init__(self, layer):
        super().__init__(mixer=None, ffn=None, norm=lambda: None)
        self.step = 10.0**layer

    def __call__(self, x, call, chosen=None):
        return x + self.step, None


def test_bug_case_b41_output_and_boundary_ids_read_the_same_features(draft_of, write_files, make_draft, tmp_path):
    policy = Decoder(
        Qwen3Config(
            vocab_size=19,
            hidden_size=16,
            intermediate_size=8,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        ),
        rngs=nnx.Rngs(0),
    )
    policy.layers = nnx.List([Adds(layer) for layer in range(4)])
    policy.embed_tokens[...] = jnp.zeros((19, 16))
    tokens = jnp.zeros((1, 2), jnp.int32)
    draft = make_draft(draft_vocab_size=11, tap_layers=(0, 2, 3))
    read = {}
    for layout in ("specforge", "vllm"):
        folder = write_files(tmp_path / layout, config_of(layout, draft.cfg), tensors_of(layout, draft))
        cfg, _, _ = load_draft(folder)
        _, taps, _ = policy(tokens, jnp.array([[0, 1]]), jnp.ones((1, 2), jnp.int32), tap_layers=cfg.tap_layers)
        read[layout] = np.asarray(taps)[0, 0, ::16]
    # Sums after layers 0, 2 and 3; the boundary form of the last one is the layer count, 4.
    np.testing.assert_array_equal(read["specforge"], [1.0, 111.0, 1111.0])
    np.testing.assert_array_equal(read["vllm"], read["specforge"])


def test_bug_case_b41_the_export_says_both_conventions(make_draft, tmp_path):
    draft = make_draft(tap_layers=(1, 3))
    save_draft(tmp_path, draft.cfg, draft.graph, draft.params)
    config = load_config(tmp_path)
    assert config["eagle_config"][TAPS] == [1, 3]  # SpecForge, SGLang
    assert config[TAPS] == [2, 4]  # vLLM


def load_config(folder):
    return json.loads((folder / "config.json").read_text())


def test_bug_case_b40_a_draft_too_short_for_its_policy_fails_at_start_up(draft_of, write_files, tmp_path):
    draft = draft_of("specforge")
    config = config_of("specforge", draft.cfg) | {"max_position_embeddings": 8}
    cfg, _, _ = load_draft(write_files(tmp_path, config, tensors_of("specforge", draft)))
    policy = Qwen3Config(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
    )
    with pytest.raises(ValueError, match="max_position_embeddings=8 must be >= the policy's 32"):
        cfg.check_target(policy)


def test_bug_case_b40_the_rotation_past_the_stated_limit_is_that_of_a_longer_draft(make_draft):
    rng = np.random.default_rng(5)
    embed = jnp.asarray(rng.normal(size=(1, 3, 16)), jnp.float32)
    taps = jnp.asarray(rng.normal(size=(1, 3, 32)), jnp.float32)
    states = []
    for limit in (8, 32):
        draft = make_draft(max_position_embeddings=limit)
        module = draft.graph.merge(draft.params)
        states.append(module.passes([embed], taps, jnp.array([[18, 19, 20]]), jnp.ones((1, 3), jnp.int32))[0])
    np.testing.assert_array_equal(*states)
    assert np.isfinite(np.asarray(states[0])).all()


@pytest.mark.parametrize(
    ("layout", "changes", "pattern"),
    [
        (
            "specforge",
            {"architectures": ["DeepseekV3ForCausalLMEagle3"]},
            "architectures=DeepseekV3.* supported: Llama",
        ),
        ("specforge", {"architectures": ["A", "B"]}, "must name one class"),
        ("specforge", {"attention_bias": True}, "attention_bias=true is not supported"),
        ("specforge", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("specforge", {"quantization_config": {"quant_method": "fp8"}}, "packed"),
        ("specforge", {"target_hidden_size": 32}, "target_hidden_size=32 is not hidden_size=16"),
        ("specforge", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "of type 'yarn' is not supported"),
        ("specforge", {"rope_scaling": {"type": "llama3"}}, "of type 'llama3' is not supported"),
        ("specforge", {"rope_parameters": {"rope_theta": 5.0}}, "contradict each other"),
        ("specforge", {"rope_theta": None}, r"\['rope_theta'\] missing.*10000"),
        ("specforge", {"head_dim": None}, r"\['head_dim'\] missing.* = 4"),
        ("specforge", {"max_position_embeddings": None}, r"\['max_position_embeddings'\] missing.*2048"),
        ("specforge", {"rms_norm_eps": None}, r"\['rms_norm_eps'\] missing"),
        ("specforge", {"draft_vocab_size": None}, r"\['draft_vocab_size'\] missing.*rows of lm_head"),
        ("specforge", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("speculators", {"embed_requires_grad": True}, "embeddings of its own"),
        ("specforge", {"eagle_config": {TAPS: [0, 1], "parallel_draft_step": 4}}, "P-EAGLE"),
        ("specforge", {"parallel_drafting": True}, "P-EAGLE"),
        ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}, "one final hidden state"),
        ("specforge", {"fc_norm": "yes"}, "fc_norm=.* must be true or false"),
        ("specforge", {"fc_norm": [True, False]}, "same for all taps"),
        ("specforge", {"norm_before_residual": 1}, "norm_before_residual=1 must be true or false"),
        ("specforge", {"norm_output": True}, "two meanings.*norm_output_meaning.*classic EAGLE-3.*EAGLE-3.1"),
        ("specforge", {"norm_output": False}, "two meanings"),
        ("specforge", {"norm_output": False, "norm_output_meaning": "head"}, "leaves out the norm before the head"),
        ("speculators", {"norm_before_residual": None}, "norm_before_residual is missing; vLLM takes it as true"),
        ("ea", {}, r"layer_ids is missing.* 1, N//2 - 1 and N - 4"),
        ("automodel", {}, "layer_ids is missing"),
        ("deepspec", {"target_layer_ids": None}, "layer_ids is missing"),
    ],
)
def test_what_a_config_does_not_say_or_asks_in_vain_is_named(
    layout, changes, pattern, draft_of, write_files, refused, tmp_path
):
    draft = draft_of(layout)
    folder = write_files(tmp_path / "draft", config_of(layout, draft.cfg) | changes, tensors_of(layout, draft))
    refused(load_draft, folder, pattern)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"eagle_config": {TAPS: [1, 2], "use_last_layernorm": True}}, "may count outputs .*tap_convention"),
        ({TAPS: [0, 1]}, r"\[0, 1\] in eagle_config and \[0, 1\] at the top level"),
        ({"eagle_config": None, TAPS: [0, 1]}, "taps the embeddings"),
        ({"eagle_config": {TAPS: [0, 1]}, "tap_convention": "input"}, "must be output or boundary"),
        ({"eagle_config": {TAPS: [True, 1]}}, "list of layer numbers"),
    ],
)
def test_bug_case_b41_taps_of_an_unsaid_convention_are_refused(
    changes, pattern, draft_of, write_files, refused, tmp_path
):
    draft = draft_of("specforge")
    folder = write_files(
        tmp_path / "draft", config_of("specforge", draft.cfg) | changes, tensors_of("specforge", draft)
    )
    refused(load_draft, folder, pattern)


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({"eagle_config": {TAPS: [1, 2], "use_last_layernorm": True}, "tap_convention": "output"}, (1, 2)),
        ({"eagle_config": {TAPS: [1, 2], "use_last_layernorm": True}, "tap_convention": "boundary"}, (0, 1)),
        ({"eagle_config": {TAPS: [0, 1]}, TAPS: [1, 2]}, (0, 1)),
        ({"eagle_config": None, TAPS: [1, 2]}, (0, 1)),
    ],
)
def test_bug_case_b41_a_stated_convention_decides(changes, taps, draft_of, write_files, tmp_path):
    draft = draft_of("specforge")
    config = config_of("specforge", draft.cfg) | changes
    cfg, _, _ = load_draft(write_files(tmp_path, config, tensors_of("specforge", draft)))
    assert cfg.tap_layers == taps


@pytest.mark.parametrize(
    ("value", "meaning", "fed_back"),
    [(True, "head", False), (True, "feedback", True), (False, "feedback", False), (None, None, False)],
)
def test_norm_output_is_read_by_its_stated_meaning(value, meaning, fed_back, draft_of, write_files, tmp_path):
    draft = draft_of("specforge")
    config = config_of("specforge", draft.cfg) | {"norm_output": value, "norm_output_meaning": meaning}
    cfg, _, _ = load_draft(write_files(tmp_path, config, tensors_of("specforge", draft)))
    assert cfg.norm_output is fed_back


def test_what_a_config_says_is_not_overridden_by_an_expected_one(draft_of, write_files, make_draft, tmp_path):
    draft = draft_of("specforge")
    folder = write_files(tmp_path, config_of("specforge", draft.cfg), tensors_of("specforge", draft))
    expected = make_draft(draft_vocab_size=11, rope_theta=5.0, tap_layers=(1, 2), passes=7).cfg
    cfg, _, _ = load_draft(folder, expected)
    assert (cfg.rope_theta, cfg.tap_layers, cfg.passes) == (draft.cfg.rope_theta, draft.cfg.tap_layers, 7)


def test_an_expected_config_turns_no_flag_on_that_the_file_is_silent_about(draft_of, write_files, make_draft, tmp_path):
    draft = draft_of("ea")
    folder = write_files(tmp_path, config_of("ea", draft.cfg), tensors_of("ea", draft))
    flags = {"norm_before_residual": True, "norm_output": True}  # neither shows in the tensors
    cfg, _, _ = load_draft(folder, make_draft(draft_vocab_size=11, **flags).cfg)
    assert cfg == draft.cfg


def test_one_setting_in_two_spellings_is_read_where_they_agree(draft_of, write_files, tmp_path):
    draft = draft_of("specforge")
    config = config_of("specforge", draft.cfg) | {"rope_parameters": {"rope_theta": int(draft.cfg.rope_theta)}}
    cfg, _, _ = load_draft(write_files(tmp_path, config, tensors_of("specforge", draft)))
    assert cfg.rope_theta == draft.cfg.rope_theta


def test_bug_case_b60_a_config_copied_from_a_tied_target_does_not_cost_the_draft_its_head(
    draft_of, write_files, tmp_path
):
    draft = draft_of("specforge")  # 11 rows of head, 19 of embedding
    config = config_of("specforge", draft.cfg) | {"tie_word_embeddings": True}
    loaded = load_draft(write_files(tmp_path / "in", config, tensors_of("specforge", draft)))
    np.testing.assert_array_equal(loaded[2]["lm_head"]["kernel"], draft.params["lm_head"]["kernel"])
    save_draft(tmp_path / "out", *loaded)
    assert load_config(tmp_path / "out")["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"layers.1.self_attn.q_proj.weight": np.zeros((2, 2), np.float32)}, "draft of several layers"),
        ({"mask_hidden": np.zeros(3, np.float32)}, "P-EAGLE"),
        ({"input_norm.weight": np.zeros(32, np.float32)}, r"unexpected tensors \['input_norm.weight'\]"),
        ({"model.norm.weight": np.zeros(16, np.float32)}, "norm.weight is there under two names"),
        ({"norm.weight": np.zeros(16, np.int8)}, "norm.weight is stored as I8, supported: BF16, F16, F32"),
        ({"norm.weight": np.zeros(16, np.float64)}, "norm.weight is stored as F64"),
        ({"d2t": np.zeros(11, np.float32)}, "d2t is stored as F32"),
        ({"d2t": np.zeros((11, 1), np.int64)}, "d2t is int64 of shape"),
        ({"t2d": np.zeros(18, bool)}, "d2t and t2d name different target ids"),
        ({"lm_head.weight": None}, r"missing tensors \['lm_head.weight'\]"),
    ],
)
def test_tensors_that_do_not_belong_are_named(change, pattern, draft_of, write_files, refused, tmp_path):
    draft = draft_of("specforge")
    tensors = tensors_of("specforge", draft) | change
    folder = write_files(tmp_path / "draft", config_of("specforge", draft.cfg), tensors)
    refused(load_draft, folder, pattern)


def test_a_norm_of_queries_with_a_reduced_vocabulary_has_no_layout(make_draft, tmp_path, refused):
    draft = make_draft(draft_vocab_size=11, qk_norm=True)
    refused(lambda folder: save_draft(folder, draft.cfg, draft.graph, draft.params), tmp_path, "no published layout")
