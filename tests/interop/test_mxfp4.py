"""A GPT-OSS folder with experts in MXFP4: read here, and unpacked by transformers, to the same numbers and logits."""

from __future__ import annotations

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from draftco_jax.models.functional import graph_of
from draftco_jax.models.hf_weights import load_policy

WHY = "the oracle is transformers on torch; pip install 'draftco[interop]'"
torch = pytest.importorskip("torch", reason=WHY)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # optional kernels it cannot find
    transformers = pytest.importorskip("transformers", reason=WHY, minversion="5.24")

pytestmark = [pytest.mark.filterwarnings(f"ignore:::{name}") for name in ("torch", "transformers")]


@pytest.fixture
def folder(tmp_path):
    """Random bytes for the experts, of scales that give kernels of size 0.4 and less; the rest drawn as floats."""
    cfg = transformers.GptOssConfig(
        vocab_size=160, hidden_size=64, intermediate_size=32, head_dim=16, num_hidden_layers=2, num_local_experts=6,
        num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, sliding_window=9,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(cfg)
    rng, tensors = np.random.default_rng(0), {}
    for name, weight in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
            tensors[f"{name}_scales"] = rng.integers(120, 124, (experts, outputs, inputs // 32), dtype=np.uint8)
        else:
            tensors[name] = (0.15 * rng.normal(size=tuple(weight.shape)) + ("norm" in name)).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = cfg.to_dict() | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GptOssForCausalLM"]}))
    return tmp_path


def test_packed_experts_are_what_transformers_unpacks(folder, tmp_path):
    model = transformers.GptOssForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    model.config.quantization_config = None
    ids = torch.randint(0, 160, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits.numpy()
    model.save_pretrained(tmp_path / "unpacked")
    cfg, params = load_policy(folder)
    jax.tree.map(np.testing.assert_array_equal, params, load_policy(tmp_path / "unpacked")[1])
    tokens = jnp.asarray(ids.numpy(), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32)[None], tokens.shape)

    @jax.jit
    def logits(params):
        policy = graph_of(cfg.build).merge(params)
        return policy.logits(policy(tokens, positions, jnp.ones_like(tokens))[0])

    assert 1 < np.abs(expected).max() < 10
    np.testing.assert_allclose(logits(params), expected, rtol=0, atol=1e-5)
