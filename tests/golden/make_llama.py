"""Makes data/llama and data/llama_tied again, with torch and transformers 5.24 on a CPU.

    OMP_NUM_THREADS=1 python tests/golden/make_llama.py [FOLDER]

Nothing here imports this project: what the files hold is transformers' own. `README.md` says what that is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

# Of the eight pairs of a head three keep their frequency, four are slowed down and one lies between.
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
SIZES = {"vocab_size": 160, "hidden_size": 48, "head_dim": 16, "intermediate_size": 64, "rms_norm_eps": 1e-5}
POLICIES = {
    "llama": SIZES | {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                      "rope_parameters": LLAMA31, "tie_word_embeddings": False, "max_position_embeddings": 2048},
    # SmolLM2: three query heads to a key head, tied, its own theta.
    "llama_tied": SIZES | {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
                           "tie_word_embeddings": True, "max_position_embeddings": 8192},
}  # fmt: skip
DOCUMENTS = ((1, 12, 2, 25), (17, 16, 7))  # lengths in each packed row of 40
PROMPT, GIVEN, NEW = 12, 12, 24


def randomise(model: LlamaForCausalLM, seed: int) -> None:
    """Queries and keys of gain 1.2 (attention is not flat), norms around 1, states and logits of size 4 and less."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(1 + 0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.copy_(noise * 0.1)
            else:
                gain = 1.2 if "q_proj" in name or "k_proj" in name else 0.6
                weight.copy_(noise * gain * weight.shape[1] ** -0.5)


def packed_positions() -> np.ndarray:
    """Restarting at each document: how transformers is told of packed rows."""
    return np.stack([np.concatenate([np.arange(length) for length in row]) for row in DOCUMENTS])


@torch.no_grad()
def packed_logits(model: LlamaForCausalLM, ids: torch.Tensor) -> np.ndarray:
    """Logits of packed rows, held to those of each document alone.

    Without `use_cache=False` there would be a cache, and the restarts would be overlooked.
    """
    found = model(ids, position_ids=torch.from_numpy(packed_positions()), use_cache=False).logits
    for row, lengths in enumerate(DOCUMENTS):
        for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
            alone = model(ids[row : row + 1, start : start + length]).logits[0]
            difference = (alone - found[row, start : start + length]).abs().max()
            assert difference < 5e-6, f"transformers lets documents see one another: {difference}"
    return found.numpy()


@torch.no_grad()
def cached_logits(model: LlamaForCausalLM, ids: torch.Tensor) -> np.ndarray:
    """Of a prompt of PROMPT tokens, then of one token a call."""
    cache = DynamicCache(config=model.config)
    parts = [model(ids[:, :PROMPT], cache=cache).logits]
    parts += [model(ids[:, t : t + 1], cache=cache).logits for t in range(PROMPT, ids.shape[1])]
    return torch.cat(parts, dim=1).numpy()


@torch.no_grad()
def greedy(model: LlamaForCausalLM, ids: torch.Tensor) -> np.ndarray:
    """Greedy text without the last id, as in the other folders."""
    text = ids[:1, :GIVEN]
    for _ in range(NEW):
        top = model(text).logits[0, -1, :-1].topk(2)
        assert top.values[0] - top.values[1] > 1e-4, "a tie that rounding could decide"
        text = torch.cat([text, top.indices[:1, None]], dim=1)
    return text.numpy()


def make(folder: Path, name: str, seed: int) -> None:
    """One policy's files."""
    model = LlamaForCausalLM(LlamaConfig(**POLICIES[name], attn_implementation="eager")).eval()
    randomise(model, seed)
    ids = torch.randint(0, 160, (2, 40), generator=torch.Generator().manual_seed(seed + 1))
    model.save_pretrained(folder / name)
    (folder / name / "generation_config.json").unlink(missing_ok=True)
    # Taken with hooks, so that the list does not depend on what the library calls a hidden state.
    states: list[torch.Tensor] = []
    keep = lambda module, given, out: states.append((out[0] if isinstance(out, tuple) else out).detach())  # noqa: E731
    watched = [model.model.embed_tokens, *model.model.layers[:-1], model.model.norm]
    hooks = [module.register_forward_hook(keep) for module in watched]
    out = model(ids, labels=ids)
    for hook in hooks:
        hook.remove()
    out.loss.backward()
    norms = {name: float(weight.grad.norm()) for name, weight in model.named_parameters()}
    (folder / name / "gradnorms.json").write_text(json.dumps(norms, indent=1) + "\n")
    values = {
        "ids": ids.numpy(),
        "logits": out.logits.detach().numpy(),
        "hidden": torch.stack(states).numpy(),
        "greedy": greedy(model, ids),
        "loss": np.float64(out.loss.item()),
        "packed_positions": packed_positions(),
        "packed_logits": packed_logits(model, ids),
        "cached_logits": cached_logits(model, ids),
    }
    np.savez_compressed(folder / name / "golden.npz", **values)
    print(name, f"largest logit {np.abs(values['logits']).max():.2f}, loss {values['loss']:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "data"
    for seed, name in enumerate(POLICIES):
        make(target, name, 100 * (seed + 1))
