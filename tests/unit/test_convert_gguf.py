"""GGUF in: bytes laid down by the published format, values by a formula of each block, logits of what was written."""

from __future__ import annotations

import json
import struct
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from draftco_jax.convert import Wishes, convert
from draftco_jax.convert.gguf_file import is_gguf, read_gguf
from draftco_jax.errors import UserError
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.hf_weights import load_policy, to_tensors
from draftco_jax.models.llama import LlamaConfig
from draftco_jax.text.chat import Chat

pytest.importorskip("gguf")

U32, F32, BOOL, TEXT, ARRAY, I32 = 4, 6, 7, 8, 9, 5  # kinds of settings
KINDS = {"F32": 0, "Q4_1": 3, "Q8_0": 8}  # of tensors
LETTERS = tokenizers.pre_tokenizers.ByteLevel.alphabet()
TOKENS = ["<|end|>", "<|start|>", *sorted(LETTERS), "12", "ab", "Ġab", "[pad]"]
CFG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=5e4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }} {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)
SETTINGS = {
    "general.architecture": (TEXT, "llama"),
    "llama.context_length": (U32, 64),
    "llama.embedding_length": (U32, 32),
    "llama.block_count": (U32, 2),
    "llama.feed_forward_length": (U32, 64),
    "llama.attention.head_count": (U32, 4),
    "llama.attention.head_count_kv": (U32, 2),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.rope.freq_base": (F32, 5e4),
    "llama.rope.dimension_count": (U32, 8),
    "tokenizer.ggml.model": (TEXT, "gpt2"),
    "tokenizer.ggml.pre": (TEXT, "smollm"),
    "tokenizer.ggml.tokens": (TEXT, TOKENS),
    "tokenizer.ggml.token_type": (I32, [3, 3, *[1] * (len(TOKENS) - 3), 5]),
    "tokenizer.ggml.merges": (TEXT, ["1 2", "a b", "Ġ ab"]),
    "tokenizer.ggml.bos_token_id": (U32, 1),
    "tokenizer.ggml.eos_token_id": (U32, 0),
    "tokenizer.chat_template": (TEXT, TEMPLATE),
}
NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


# ---- the format, by hand ----


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind, value):
    return text(value) if kind == TEXT else struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], value)


def setting(name, kind, value):
    if not isinstance(value, list):
        return text(name) + struct.pack("<I", kind) + scalar(kind, value)
    head = struct.pack("<IIQ", ARRAY, kind, len(value))
    return text(name) + head + b"".join(scalar(kind, each) for each in value)


def gguf_bytes(settings, tensors, version=3):
    """`tensors`: name -> (kind, sizes from slow to fast, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(settings))
    head += b"".join(setting(name, *value) for name, value in settings.items())
    data = b""
    for name, (kind, sizes, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *reversed(sizes))
        head += struct.pack("<IQ", KINDS.get(kind, kind), len(data))
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data


def q8_0(values):
    """Blocks of 32: a float16 scale d, 32 int8 codes c; a value is d c. (bytes, values that they stand for)."""
    raw, back = b"", []
    for block in values.reshape(-1, 32):
        d = np.float16(np.abs(block).max() / 127)
        codes = np.rint(block / np.float32(d)).astype(np.int8)
        raw += d.tobytes() + codes.tobytes()
        back.append(np.float32(d) * codes.astype(np.float32))
    return raw, np.array(back, np.float32).reshape(values.shape)


def q4_1(values):
    """Blocks of 32: float16 d and m, 16 bytes of codes 0..15 (i low, i + 16 high); a value is d c + m."""
    raw, back = b"", []
    for block in values.reshape(-1, 32):
        d, m = np.float16((block.max() - block.min()) / 15), np.float16(block.min())
        codes = np.clip(np.rint((block - np.float32(m)) / np.float32(d)), 0, 15).astype(np.uint8)
        raw += d.tobytes() + m.tobytes() + (codes[:16] | codes[16:] << 4).tobytes()
        back.append(np.float32(d) * codes.astype(np.float32) + np.float32(m))
    return raw, np.array(back, np.float32).reshape(values.shape)


def pairs_of(values, heads):
    """Rows of q and k as llama.cpp wants them: of each head rows 0, H/2, 1, H/2 + 1, ..."""
    size = values.shape[0] // heads
    order = [h * size + i + j for h in range(heads) for i in range(size // 2) for j in (0, size // 2)]
    return values[order]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(path of the file, the tensors of transformers' names that it stands for)."""
    rng, tensors, meant = np.random.default_rng(0), {}, {}
    for name, like in to_tensors(abstract_zeros()).items():
        values = rng.normal(size=like.shape).astype(np.float32) * (like.shape[-1] ** -0.5 if like.ndim > 1 else 1)
        *place, last, _ = name.removeprefix("model.").split(".")
        kind = "F32" if like.ndim == 1 or last == "v_proj" else "Q8_0" if last == "embed_tokens" else "Q4_1"
        heads = {"q_proj": 4, "k_proj": 2}.get(last)
        # A block of 32 lies within a row, so the order of rows and the rounding do not meet.
        raw, meant[name] = {"F32": lambda v: (v.tobytes(), v), "Q8_0": q8_0, "Q4_1": q4_1}[kind](values)
        if heads is not None:
            raw, _ = q4_1(pairs_of(values, heads))
        where = f"blk.{place[1]}." if place and place[0] == "layers" else ""
        tensors[f"{where}{NAMES[last]}.weight"] = (kind, like.shape, raw)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    path.write_bytes(gguf_bytes(SETTINGS, tensors))
    return path, meant, tensors


def abstract_zeros():
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract_params(CFG.build))


@pytest.fixture(scope="module")
def folder(written, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "policy"
    found = convert(written[0], out)
    assert found.written == {"policy": out}
    assert found.notes == ["dequantised from 7 tensors of F32, 12 tensors of Q4_1, 1 tensors of Q8_0"]
    return out


# ---- what comes out ----


def test_values_are_those_of_the_blocks_formulas_and_q_and_k_stand_as_transformers_wants_them(written, folder):
    cfg, params = load_policy(folder)
    assert cfg == CFG, "eps is the decimal number 1e-5 and not its float32"
    found = to_tensors(params)
    assert found.keys() == written[1].keys()
    for name, values in written[1].items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_logits_are_those_of_the_llama_that_was_written_in_pairs_of_neighbours(written, folder):
    """The oracle turns neighbours, as llama.cpp does, with the rows as they lie in the file."""
    cfg, params = load_policy(folder)
    ids = np.array([[1, 40, 41, 70, 5, 9]], np.int32)
    graph = graph_of(partial(cfg.build))

    @jax.jit
    def logits(params, ids):
        model = graph.merge(params)
        return model.logits(model(ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)).hidden)

    ours = np.asarray(logits(params, ids))[0]
    np.testing.assert_allclose(ours, llama_cpp_logits(written[0], ids[0]), rtol=0, atol=2e-5)


def llama_cpp_logits(path, ids):
    file = read_gguf(path)
    norm = lambda x, w: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w  # noqa: E731
    x, n = file.read("token_embd.weight")[ids], len(ids)
    angle = np.arange(n)[:, None] * 5e4 ** (-np.arange(4) / 4)

    def turned(rows):
        even, odd = rows[..., 0::2], rows[..., 1::2]
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.stack([even * c - odd * s, even * s + odd * c], -1).reshape(rows.shape)

    for layer in range(2):
        w = lambda name, layer=layer: file.read(f"blk.{layer}.{name}.weight").astype(np.float64)  # noqa: E731
        h = norm(x, w("attn_norm"))
        q, k, v = ((h @ w(f"attn_{name}").T).reshape(n, -1, 8) for name in "qkv")
        q, k, v = turned(q), np.repeat(turned(k), 2, 1), np.repeat(v, 2, 1)
        scores = np.einsum("qnd,knd->nqk", q, k) / 8**0.5 + np.triu(np.full((n, n), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("nqk,knd->qnd", weights, v).reshape(n, -1) @ w("attn_output").T
        h = norm(x, w("ffn_norm"))
        gate, up = h @ w("ffn_gate").T, h @ w("ffn_up").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w("ffn_down").T
    return norm(x, file.read("output_norm.weight")) @ file.read("token_embd.weight").T


def test_the_tokenizer_cuts_digits_one_by_one_and_keeps_control_tokens_and_template(folder):
    chat = Chat.load(folder)
    at = {token: i for i, token in enumerate(TOKENS)}
    # "12" is a merge, but digits stand alone; the space goes to the word behind it.
    assert chat.tokenizer.encode("ab 12 ab") == (at["ab"], at["Ġ"], at["1"], at["2"], at["Ġab"])
    assert chat.tokenizer.encode("<|end|>")[0] == at["<"], "a user's text is no control token"
    ids = chat.encode([{"role": "u", "content": "ab"}], add_generation_prompt=True).ids
    assert ids[:5] == (1, at["u"], at["Ġab"], 0, 1) and chat.stops.ids == (0,)
    assert chat.tokenizer.decode(ids) == "u abassistant "
    assert "[pad]" not in chat.tokenizer.backend.get_vocab(), "an unused row has no text"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 0}
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0


def test_gpt2_cuts_leave_digits_together_and_a_begin_token_is_written_where_the_file_asks(written, tmp_path):
    changed = {"tokenizer.ggml.pre": (TEXT, "gpt-2"), "tokenizer.ggml.add_bos_token": (BOOL, True)}
    changed["tokenizer.ggml.eot_token_id"] = (U32, 1)
    (tmp_path / "in.gguf").write_bytes(gguf_bytes(SETTINGS | changed, written[2]))
    convert(tmp_path / "in.gguf", tmp_path / "out", Wishes(dtype="bfloat16"))
    chat = Chat.load(tmp_path / "out")
    assert chat.tokenizer.encode("12") == (1, TOKENS.index("12")) and chat.stops.ids == (0, 1)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_head_of_its_own_unties_the_embedding(written, tmp_path):
    head = np.full((len(TOKENS), 32), 0.5, np.float32)
    tensors = written[2] | {"output.weight": ("F32", head.shape, head.tobytes())}
    (tmp_path / "in.gguf").write_bytes(gguf_bytes(SETTINGS, tensors))
    convert(tmp_path / "in.gguf", tmp_path / "out")
    cfg, params = load_policy(tmp_path / "out")
    assert not cfg.tie_word_embeddings
    np.testing.assert_array_equal(to_tensors(params)["lm_head.weight"], head)


# ---- what is refused ----


def test_a_file_that_is_none_is_told_by_its_first_bytes(tmp_path, written):
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04 and so on")
    (tmp_path / "b").write_bytes(b"not a model at all")
    assert is_gguf(written[0]) and is_gguf(tmp_path / "a.gguf") and not is_gguf(tmp_path / "b")
    (tmp_path / "c").write_bytes(written[0].read_bytes())
    assert is_gguf(tmp_path / "c"), "whatever it is called"
    refused(tmp_path / "a.gguf", tmp_path, "is no GGUF file: it must begin with b'GGUF', not b'PK")
    (tmp_path / "d.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "d.gguf", tmp_path, "cut short or damaged")


def refused(path, tmp_path, said, **wishes):
    with pytest.raises(UserError, match=said) as caught:
        convert(path, tmp_path / "out", Wishes(**wishes))
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_file_cut_anywhere_is_refused_in_a_line(written, tmp_path):
    whole = written[0].read_bytes()
    for end in (20, 24, 40, 300, len(whole) // 3, len(whole) - 4000, len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:end])
        refused(tmp_path / "cut.gguf", tmp_path, "cut short or damaged")


@pytest.mark.parametrize(
    "offset", [2**64 - 64, 2**64 - 32, 0, 32, 2**40], ids=["header", "end", "first", "within", "far"]
)
def test_tensors_that_lie_in_the_table_in_one_another_or_nowhere_are_damage(offset, tmp_path):
    values = np.arange(64, dtype=np.float32)
    raw = bytearray(gguf_bytes({}, {"one": ("F32", (64,), values.tobytes()), "two": ("F32", (64,), values.tobytes())}))
    place = raw.index(text("two")) + len(text("two")) + 4 + 8 + 4  # behind the count of dims, the dim and the kind
    assert struct.unpack("<Q", raw[place : place + 8]) == (256,)
    raw[place : place + 8] = struct.pack("<Q", offset)
    (tmp_path / "moved.gguf").write_bytes(raw)
    with pytest.raises(UserError, match="cut short or damaged"):
        read_gguf(tmp_path / "moved.gguf")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"general.architecture": (TEXT, "mamba")}, "general.architecture='mamba' must be 'llama'"),
        ({"llama.rope.scaling.type": (TEXT, "yarn")}, "llama.rope.scaling.type='yarn' must be 'none'"),
        ({"llama.expert_count": (U32, 8)}, "llama.expert_count=8 must be 0"),
        ({"llama.block_count": (TEXT, "two")}, "llama.block_count='two' must be one number above 0"),
        ({"llama.attention.head_count": (U32, 5)}, "llama.rope.dimension_count=8 must be 6"),
        ({"llama.attention.head_count": (U32, 0)}, "llama.attention.head_count=0 must be one number above 0"),
        ({"llama.block_count": (U32, 3)}, "missing tensors .'model.layers.2"),
        ({"tokenizer.ggml.model": (TEXT, "llama")}, "tokenizer.ggml.model='llama' must be 'gpt2'"),
        ({"tokenizer.ggml.pre": (TEXT, "qwen2")}, "tokenizer.ggml.pre='qwen2' must be one of smollm"),
        ({"tokenizer.ggml.pre": (TEXT, "default")}, "pre='default' must be one of smollm.*gpt-2; convert the"),
        ({"tokenizer.ggml.merges": (TEXT, ["1 2", "12"])}, "merges holds '12', which is no pair"),
        ({"tokenizer.ggml.merges": (TEXT, ["1 2", "1 zz"])}, "merges do not fit the tokens"),
        ({"tokenizer.ggml.eos_token_id": (U32, 10**6)}, "eos_token_id=1000000 must be in 0.."),
        ({"tokenizer.ggml.tokens": (TEXT, ["a"] * len(TOKENS))}, "holds a token twice"),
    ],
)
def test_settings_that_are_not_read_are_refused_in_a_line(changed, said, written, tmp_path):
    (tmp_path / "in.gguf").write_bytes(gguf_bytes(SETTINGS | changed, written[2]))
    refused(tmp_path / "in.gguf", tmp_path, said)


def test_a_file_that_names_no_cut_of_texts_is_refused_and_not_cut_as_gpt2(written, tmp_path):
    settings = {name: value for name, value in SETTINGS.items() if name != "tokenizer.ggml.pre"}
    (tmp_path / "in.gguf").write_bytes(gguf_bytes(settings, written[2]))
    refused(tmp_path / "in.gguf", tmp_path, "tokenizer.ggml.pre=None must be one of smollm")


def test_versions_kinds_and_tensors_that_are_not_read_are_refused_in_a_line(written, tmp_path):
    path, tensors = tmp_path / "in.gguf", written[2]
    path.write_bytes(gguf_bytes(SETTINGS, tensors, version=4))
    refused(path, tmp_path, "GGUF version=4 must be one of 2, 3")
    path.write_bytes(gguf_bytes(SETTINGS, tensors | {"x.weight": (999, (32,), bytes(128))}))
    refused(path, tmp_path, "a tensor is stored in kind 999, which")
    path.write_bytes(gguf_bytes(SETTINGS, tensors | {"rope_freqs.weight": ("F32", (4,), bytes(16))}))
    refused(path, tmp_path, "tensor rope_freqs.weight is no part")
    norm = tensors["output_norm.weight"][2]
    path.write_bytes(gguf_bytes(SETTINGS, tensors | {"output_norm.weight": (24, (32,), norm)}))  # 24: I8
    refused(path, tmp_path, "output_norm.weight is stored as I8, which the gguf package cannot dequantise")
    path.write_bytes(gguf_bytes(SETTINGS, tensors))
    refused(path, tmp_path, "holds a policy; leave kind and draft_family out", kind="draft")
    refused(path, tmp_path, "step=3 is for run directories", step=3)


def test_without_the_package_the_way_to_it_is_told(written, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    refused(written[0], tmp_path, "pip install 'draftco.gguf.'")
