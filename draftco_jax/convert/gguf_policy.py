"""A policy out of a GGUF file: config and weights of a Llama, under the published names of transformers.

llama.cpp turns queries and keys in pairs of neighbours, transformers in halves of a head, so its converter has laid the
rows of q and k in another order: row 2 i + j of a head is row j H/2 + i of the published one. That is undone here. The
file says everything else: sizes, theta, eps, and by the absence of a head that it is the embedding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from draftco_jax.convert.gguf_file import GgufFile
from draftco_jax.errors import UserError
from draftco_jax.models.functional import Params, abstract_params
from draftco_jax.models.hf_weights import from_tensors
from draftco_jax.models.llama import LlamaConfig

_ARCHITECTURE = "llama"
_OF_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def config_of(file: GgufFile) -> LlamaConfig:
    """Sizes and constants.

    Raises:
        UserError: another architecture, a setting missing, or one that is not supported.
    """
    found = file.settings.get("general.architecture")
    if found != _ARCHITECTURE:
        raise UserError(
            f"{file.path}: general.architecture={found!r} must be {_ARCHITECTURE!r}, the only one read from GGUF; "
            "give the model's Hugging Face folder instead"
        )
    width, heads = _setting(file, "embedding_length"), _setting(file, "attention.head_count")
    head_dim = _setting(file, "attention.key_length", width // heads)
    _refuse(file, head_dim)
    try:
        return LlamaConfig(
            vocab_size=_vocabulary_rows(file),
            hidden_size=width,
            intermediate_size=_setting(file, "feed_forward_length"),
            num_hidden_layers=_setting(file, "block_count"),
            num_attention_heads=heads,
            num_key_value_heads=_setting(file, "attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=_shortest(_setting(file, "attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest(_setting(file, "rope.freq_base", 1e4)),
            max_position_embeddings=_setting(file, "context_length"),
            tie_word_embeddings="output.weight" not in file.names,
        )
    except ValueError as error:
        raise UserError(f"{file.path}: {error}") from error


def params_of(file: GgufFile, cfg: LlamaConfig) -> Params:
    """Weights in float32, every tensor accounted for."""
    tensors = {published_name(file, name): file.read(name) for name in file.names}
    for name, values in tensors.items():
        heads = {"q_proj": cfg.num_attention_heads, "k_proj": cfg.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None:
            tensors[name] = halves_of(values, heads, name, file)
    return from_tensors(abstract_params(partial(cfg.build)), tensors, str(file.path))


def published_name(file: GgufFile, name: str) -> str:
    """Name in transformers of a tensor of the file: blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if name in _OF_MODEL:
        return _OF_MODEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _OF_LAYER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_OF_LAYER[parts[2]]}.weight"
    raise UserError(
        f"{file.path}: tensor {name} is no part of the Llama policies read here, which have neither biases nor tables "
        "of rotary frequencies nor experts; give the model's Hugging Face folder instead"
    )


def halves_of(values: np.ndarray, heads: int, name: str, file: GgufFile) -> np.ndarray:
    """Rows of q or k, [N * H, D], from pairs of neighbours to halves of each head."""
    if values.ndim != 2 or values.shape[0] % (2 * heads):
        raise UserError(
            f"{file.path}: {name} has shape {values.shape}, whose rows must be {heads} even heads; get it again"
        )
    rows, width = values.shape
    return values.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _setting(file: GgufFile, name: str, default: Any = None) -> Any:
    value = file.settings.get(f"{_ARCHITECTURE}.{name}", default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UserError(f"{file.path}: {_ARCHITECTURE}.{name}={value!r} must be one number above 0; get the file again")
    return value


def _refuse(file: GgufFile, head_dim: int) -> None:
    """What would be computed in another way than by the config that is written."""
    expected = {
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "attention.sliding_window": 0,
        "expert_count": 0,
        "logit_scale": 1.0,
    }
    for name, only in expected.items():
        value = file.settings.get(f"{_ARCHITECTURE}.{name}", only)
        if value != only:
            raise UserError(
                f"{file.path}: {_ARCHITECTURE}.{name}={value!r} must be {only!r}, nothing else is read from GGUF; give "
                "the model's Hugging Face folder instead"
            )


def _vocabulary_rows(file: GgufFile) -> int:
    """Rows of the embedding: what `llama.vocab_size` says, else one for each token of the tokenizer."""
    tokens = file.settings.get("tokenizer.ggml.tokens")
    return _setting(file, "vocab_size", len(tokens) if isinstance(tokens, list) else None)


def _shortest(value: float) -> float:
    """The decimal number that was meant: the file holds float32, in which 1e-5 is 9.999999747378752e-06."""
    return float(str(np.float32(value)))
