"""Policies of every family against transformers on fresh random weights, with the settings that families vary.

For each policy: whole rows and every hidden state; packed documents against each alone; a prompt read on token by
token; the loss and the gradient of every parameter; files written by either side and read by the other.

Weights are drawn anew, norms, sinks, biases and decay rates too, so that no part is silent. Logits are of size 4 and
less; both sides compute in float32 and add in another order.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.functional import graph_of
from draftco_jax.models.hf_weights import load_policy, save_policy
from draftco_jax.training.fine_tune import cross_entropy
from draftco_jax.types import PackedBatch

WHY = "the oracle is transformers on torch; pip install 'draftco[interop]'"
torch = pytest.importorskip("torch", reason=WHY)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # optional kernels it cannot find
    transformers = pytest.importorskip("transformers", reason=WHY, minversion="5.24")

# Their own deprecations are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings(f"ignore:::{name}") for name in ("torch", "transformers")]

ATOL = 1e-5
SIZES = {"vocab_size": 160, "hidden_size": 48, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
DENSE = SIZES | {"intermediate_size": 64, "num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
LLAMA31 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 |= {"original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "rope_theta": 15e4, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 4096, "truncate": False}
DELTA = SIZES | EXPERTS | {"shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
DELTA |= {"linear_num_value_heads": 4, "linear_value_head_dim": 12, "num_hidden_layers": 3}
DELTA |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
MAMBA = SIZES | {"mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16}
MAMBA |= {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 32, "n_routed_experts": 6}
MAMBA |= {"num_experts_per_tok": 2, "intermediate_size": 40}
MAMBA |= {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]}
OSS = SIZES | {"intermediate_size": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 3}
OSS |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
OSS |= {"rope_parameters": YARN, "max_position_embeddings": 131072}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


ONE = {"num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True}
MROPE = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
CASES = {
    "llama: rotary of 3.1": ("Llama", DENSE | {"rope_parameters": LLAMA31}),
    "llama: SmolLM2": ("Llama", DENSE | TIED | rope(1e5) | {"num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama: every head its keys, linear": (
        "Llama", DENSE | {"num_key_value_heads": 4} | rope(1e4, rope_type="linear", factor=4.0),
    ),
    "qwen3": ("Qwen3", DENSE | rope(1e6)),
    "qwen3: tied, one key head": ("Qwen3", DENSE | TIED | ONE | rope(1e4)),
    "qwen3_moe": ("Qwen3Moe", DENSE | EXPERTS | rope(1e6) | {"norm_topk_prob": True}),
    "qwen3_moe: weights as drawn, tied": (
        "Qwen3Moe", DENSE | EXPERTS | TIED | ONE | rope(1e7) | {"norm_topk_prob": False},
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", DELTA | rope(1e7, partial_rotary_factor=0.25, **MROPE)),
    "qwen3_5_moe: half rotated, as many keys as values, tied": (
        "Qwen3_5Moe",
        DELTA | TIED | ONE | rope(1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)
        | {"linear_num_key_heads": 4, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
    ),
    "nemotron_h": ("NemotronH", MAMBA | {"norm_topk_prob": True}),
    "nemotron_h: bounded dt": ("NemotronH", MAMBA | {"norm_topk_prob": True, "time_step_limit": [0.05, 0.4]}),
    "nemotron_h: one group, weights as drawn": (
        "NemotronH",
        MAMBA | ONE | {"norm_topk_prob": False, "n_groups": 1, "routed_scaling_factor": 1.5}
        | {"layers_block_type": ["full_attention", "linear_attention", "mlp", "moe"]},
    ),
    "gpt_oss": ("GptOss", OSS),
    "gpt_oss: bounds of YaRN rounded, all in windows": (
        "GptOss", OSS | ONE | {"rope_parameters": YARN | {"truncate": True}, "layer_types": ["sliding_attention"] * 3},
    ),
    "gpt_oss: no windows, plain rotary, low clamp": (
        "GptOss", OSS | TIED | rope(1e4) | {"layer_types": ["full_attention"] * 3, "swiglu_limit": 0.5},
    ),
}  # fmt: skip
# More than the 64 tokens that gated delta nets go by, and the 16 of these Mamba layers.
LENGTH, PROMPT = 72, 11
DOCUMENTS = ((1, 2, 47, 22), (66, 5, 1))


def drawn(name: str, weight: Any, noise: Any, model: Any) -> Any:
    """A weight by its part: attention that is not flat, states and logits of size 4 and less."""
    by_last_name = {
        "A_log": lambda: torch.log(0.5 + 4 * torch.sigmoid(noise)),
        "dt_bias": lambda: noise - 1.5,
        "sinks": lambda: 0.3 * noise,
        "D": lambda: weight + 0.3 * noise,
    }
    part = name.rsplit(".", 1)[-1]
    if part in by_last_name:
        return by_last_name[part]()
    if name in ("model.norm.weight", "model.norm_f.weight"):
        return 0.3 * (1 + 0.3 * noise) - ("Qwen3_5" in type(model).__name__) * torch.ones_like(noise)  # stored around 0
    if "norm" in name:
        return weight + 0.3 * noise
    return gain(name, part, weight, model) * noise


def gain(name: str, part: str, weight: Any, model: Any) -> float:
    """Standard deviation of kernels and biases."""
    if "bias" in part:
        return 0.3
    if "embed" in name or "lm_head" in name:
        return 0.15 if model.config.tie_word_embeddings else 0.3
    if "conv1d" in name:
        return 0.5
    if weight.ndim == 3:
        return 0.12
    if "out_proj" in name:  # recurrences normalise what may be small, and rounding with it
        return 0.2 * weight.shape[-1] ** -0.5
    sharp = any(part in name for part in ("q_proj", "k_proj", "gate.weight", "router"))
    return (1.2 if sharp else 0.5) * weight.shape[-1] ** -0.5


def randomise(model: Any, seed: int) -> None:
    """Draw every weight, and the routers' corrections, which are buffers."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        noise = torch.randn(weight.shape, generator=generator)
        if "inv_freq" not in name:
            with torch.no_grad():
                weight.copy_(drawn(name, weight, noise, model))


class Theirs(NamedTuple):
    """transformers' model, its folder, and what it gives for whole rows."""

    model: Any
    folder: Any
    ids: Any
    logits: np.ndarray
    states: list[np.ndarray]  # after each block, the last one after the final norm


def limited(model: Any) -> Any:
    """Mamba layers that hold dt to the config's own `time_step_limit`; their prefill looks at time_step_min instead."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(float(bound) for bound in model.config.time_step_limit)
    return model


def read_by_them(model: Any, ids: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits and states, these taken with hooks."""
    states: list[np.ndarray] = []
    keep = lambda module, given, out: states.append((out[0] if isinstance(out, tuple) else out).numpy())  # noqa: E731
    body = model.model
    hooks = [m.register_forward_hook(keep) for m in (*body.layers[:-1], getattr(body, "norm", None) or body.norm_f)]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.numpy()
    for hook in hooks:
        hook.remove()
    return logits, states


@pytest.fixture(scope="module", params=CASES)
def theirs(request, tmp_path_factory) -> Theirs:
    torch.set_num_threads(1)
    family, settings = CASES[request.param]
    cfg = getattr(transformers, family + ("TextConfig" if family == "Qwen3_5Moe" else "Config"))(**settings)
    cfg._attn_implementation = cfg._experts_implementation = "eager"
    model = limited(getattr(transformers, f"{family}ForCausalLM")(cfg).float().eval())
    randomise(model, seed=list(CASES).index(request.param))
    folder = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    ids = torch.randint(0, 160, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    logits, states = read_by_them(model, ids)
    assert 1 < np.abs(logits).max() < 4
    return Theirs(model, folder, ids, logits, states)


class Ours(NamedTuple):
    """The same policy here; `read` gives logits and states of packed rows."""

    cfg: Any
    graph: Any
    params: Any
    ids: jax.Array
    read: Any


@pytest.fixture(scope="module")
def ours(theirs) -> Ours:
    cfg, params = load_policy(theirs.folder)
    graph, layers = graph_of(cfg.build), cfg.num_hidden_layers - 1

    @jax.jit
    def read(params, tokens, positions, segments):
        policy = graph.merge(params)
        found = policy(tokens, positions, segments, tap_layers=tuple(range(layers)))
        return policy.logits(found[0]), (*jnp.split(found[1], layers, axis=-1), found[0])

    return Ours(cfg, graph, params, jnp.asarray(theirs.ids.numpy(), jnp.int32), read)


@pytest.fixture
def close(record_property):
    """Holds numbers to theirs, and leaves the largest difference in the JUnit report."""
    worst: dict[str, float] = {}

    def check(what: str, found: Any, expected: np.ndarray, atol: float = ATOL, scale: float = 1.0) -> None:
        found = np.asarray(found)
        assert found.shape == expected.shape, what
        worst[what] = max(worst.get(what, 0.0), float(np.abs(found - expected).max(initial=0.0)) / scale)
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol * scale, err_msg=what)

    yield check
    for what, difference in worst.items():
        record_property(what, difference)


def test_logits_and_states_of_whole_rows(theirs, ours, close):
    places = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], ours.ids.shape)
    logits, states = ours.read(ours.params, ours.ids, places, jnp.ones_like(ours.ids))
    assert len(states) == len(theirs.states)
    for layer, (state, expected) in enumerate(zip(states, theirs.states, strict=True)):
        assert np.abs(expected).max() < 6, f"layer {layer}: too large for the bound"
        close("states", state, expected)
    close("logits", logits, theirs.logits)


def test_packed_documents_are_what_they_give_for_each_alone(theirs, ours, close):
    rows = lambda make: jnp.asarray(  # noqa: E731
        [np.concatenate([make(n, length) for n, length in enumerate(row)]) for row in DOCUMENTS], jnp.int32
    )
    positions, segments = rows(lambda n, length: np.arange(length)), rows(lambda n, length: np.full(length, n + 1))
    logits, states = ours.read(ours.params, ours.ids, positions, segments)
    for row, lengths in enumerate(DOCUMENTS):
        for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
            place = slice(start, start + length)
            alone, their_states = read_by_them(theirs.model, theirs.ids[row : row + 1, place])
            close("packed logits", logits[row, place], alone[0])
            for state, expected in zip(states, their_states, strict=True):
                close("packed states", state[row, place], expected[0])


def read_on_by_them(model: Any, ids: Any) -> np.ndarray:
    """A prompt, then one token a call."""
    with torch.no_grad():
        out = model(ids[:, :PROMPT], use_cache=True)
        parts, cache = [out.logits], out.past_key_values
        for t in range(PROMPT, LENGTH):
            parts.append(model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(parts, dim=1).numpy()


def test_a_prompt_and_every_token_after_it(theirs, ours, close):
    @jax.jit
    def step(params, tokens, start, cache, lengths):
        policy = ours.graph.merge(params)
        found = policy.step(tokens, start, cache, tap_layers=(), lengths=lengths)
        return policy.logits(found[0]), found[2]

    full = lambda value: jnp.full(2, value, jnp.int32)  # noqa: E731
    cache = ours.graph.merge(ours.params).empty_cache(2, LENGTH)
    logits, cache = step(ours.params, ours.ids[:, :PROMPT], full(0), cache, full(PROMPT))
    parts = [logits]
    for t in range(PROMPT, LENGTH):
        logits, cache = step(ours.params, ours.ids[:, t : t + 1], full(t), cache, None)
        parts.append(logits)
    logits = jnp.concatenate(parts, axis=1)
    close("cached logits, whole rows", logits, theirs.logits)
    if getattr(ours.cfg, "time_step_limit", (0.0, None)) == (0.0, None):  # their single steps bound no dt
        close("cached logits", logits, read_on_by_them(theirs.model, theirs.ids))


def test_loss_and_the_gradient_of_every_parameter(theirs, ours, close, tmp_path):
    """Their gradients are saved as if they were weights, and read here as such."""
    model = copy.deepcopy(theirs.model)
    loss = model(theirs.ids, labels=theirs.ids, use_cache=False).loss
    loss.backward()
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.zero_()  # chooses, and has no gradient
    for weight in model.parameters():
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    model.save_pretrained(tmp_path)
    _, expected = load_policy(tmp_path)

    shape = ours.ids.shape
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], shape)
    mask, zeros = (positions > 0).astype(jnp.float32), jnp.zeros(shape, jnp.float32)
    batch = PackedBatch(ours.ids, positions, jnp.ones_like(ours.ids), mask, zeros, zeros, zeros, positions)
    found, gradients = jax.jit(jax.value_and_grad(lambda p: cross_entropy(p, batch, ours.graph, 4096)))(ours.params)
    close("loss", found, np.float32(loss.item()))
    whole = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(expected)))
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    for (path, leaf), wanted in zip(leaves, jax.tree.leaves(expected), strict=True):
        name, wanted = jax.tree_util.keystr(path), np.asarray(wanted)
        if "e_score_correction_bias" in name:
            np.testing.assert_array_equal(leaf, 0)
            continue
        size = np.abs(wanted).max()
        assert size > 0, f"{name}: nothing to compare with"
        close("gradients", leaf, wanted, scale=float(size))
        close(
            "gradient norms",
            np.linalg.norm(leaf),
            np.asarray(np.linalg.norm(wanted)),
            scale=float(np.linalg.norm(wanted)),
        )
    assert whole > 0.1


def loaded_by_them(theirs: Theirs, folder: Any, dtype: Any) -> Any:
    model, report = type(theirs.model).from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return limited(model.eval())


def test_our_files_give_their_logits_bit_for_bit(theirs, ours, tmp_path):
    save_policy(tmp_path, ours.cfg, ours.params)
    logits, _ = read_by_them(loaded_by_them(theirs, tmp_path, torch.float32), theirs.ids)
    np.testing.assert_array_equal(logits, theirs.logits)
    cfg, params = load_policy(tmp_path)
    assert cfg == ours.cfg
    jax.tree.map(np.testing.assert_array_equal, params, ours.params)


def test_bfloat16_files_hold_the_same_values_on_both_sides(theirs, ours, tmp_path):
    model = copy.deepcopy(theirs.model).bfloat16()
    model.save_pretrained(tmp_path / "theirs")
    cfg, params = load_policy(tmp_path / "theirs", dtype=jnp.bfloat16)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), ours.params)
    jax.tree.map(np.testing.assert_array_equal, params, rounded)
    wide = load_policy(tmp_path / "theirs")[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.float32)), wide, params)
    save_policy(tmp_path / "ours", cfg, params)
    found = loaded_by_them(theirs, tmp_path / "ours", torch.bfloat16).state_dict()
    for name, expected in model.state_dict().items():
        assert torch.equal(found[name].float(), expected.float()), name
