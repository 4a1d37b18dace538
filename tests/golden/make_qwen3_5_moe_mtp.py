"""Makes data/qwen3_5_moe_mtp again, with torch and transformers 5.24 on a CPU.

    OMP_NUM_THREADS=1 python tests/golden/make_qwen3_5_moe_mtp.py [FOLDER]

A tiny Qwen3.5-MoE with its prediction head, and what transformers' own `MtpModel` makes of it. Nothing here imports
this project. `README.md` says what the files hold.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

SIZES = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
         "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8, "moe_intermediate_size": 8,
         "shared_expert_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
         "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                           "partial_rotary_factor": 0.25}}  # fmt: skip
ROWS, TOKENS, STEPS = 2, 12, 3
PUBLISHED = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Norm weights around 0 (Qwen3.5 adds 1), states and logits of size 4 and less, attention and routing not flat."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(0.3 * noise)
            elif "embed_tokens" in name or "head" in name:
                weight.copy_(noise * 0.3)
            else:
                gain = 1.5 if "q_proj" in name or "k_proj" in name or "gate.weight" in name else 0.8
                weight.copy_(noise * gain * weight.shape[-1] ** -0.5)


def published(state: dict[str, torch.Tensor], *, per_expert: bool) -> dict[str, torch.Tensor]:
    """The head's tensors by their names in Qwen3.5's files, experts in one tensor for all or one each."""
    found = {}
    for name, tensor in state.items():
        if not name.startswith("layers.0."):
            continue  # the policy's embedding and head
        part, rest = name.removeprefix("layers.0.").split(".", 1)
        full = f"mtp.layers.0.{rest}" if part == "mtp_block" else f"mtp.{PUBLISHED[part]}.{rest}"
        if per_expert and ".experts." in full:
            stem, last = full.rsplit(".", 1)
            for e, one in enumerate(tensor):
                halves = dict(zip(("gate_proj", "up_proj"), one.chunk(2), strict=True)) if "gate_up" in last else {}
                for own, part_of in (halves or {last: one}).items():
                    found[f"{stem}.{e}.{own}.weight"] = part_of.contiguous()
        else:
            found[full] = tensor.contiguous()
    return found


@torch.no_grad()
def chain(head: MtpModel, config: Qwen3_5MoeTextConfig, ids: torch.Tensor, hidden: torch.Tensor) -> tuple:
    """Of one row: outputs after the last norm and logits, of each step from each index; greedy drafts from the last.

    Step 0 at t reads x_{t+1} and the policy's state at t; step k reads x_{t+1+k} of the text and the output before.
    """
    outputs = torch.full((STEPS, TOKENS, hidden.shape[-1]), float("nan"))
    for t in range(TOKENS - 1):
        cache = MtpCache(config=config.get_mtp_config())
        states = head.forward_layer(
            0, hidden[:, : t + 1], torch.arange(1, t + 2)[None], cache, input_ids=ids[:, 1 : t + 2]
        )
        for k in range(STEPS):
            outputs[k, t] = states[0, -1]
            at = t + 1 + k
            if k + 1 < STEPS and at + 1 < TOKENS:
                place = torch.tensor([[at + 1]])
                states = head.forward_layer(0, states[:, -1:], place, cache, input_ids=ids[:, at + 1 : at + 2])
            else:
                break
    cache, drafts = MtpCache(config=config.get_mtp_config()), []
    states = head.forward_layer(0, hidden[:, :-1], torch.arange(1, TOKENS)[None], cache, input_ids=ids[:, 1:])
    for k in range(STEPS):
        token = head.shared_head(states[:, -1]).argmax(-1, keepdim=True)
        drafts.append(int(token))
        place = torch.tensor([[TOKENS + k]])
        states = head.forward_layer(0, states[:, -1:], place, cache, input_ids=token)
    return outputs.numpy(), head.shared_head(outputs).numpy(), np.array(drafts)


def make(folder: Path) -> None:
    """Policy with its head in one file, and the values."""
    config = Qwen3_5MoeTextConfig(**SIZES)
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]  # what transformers calls them
    policy = Qwen3_5MoeForCausalLM(config).eval()
    randomise(policy, 1)
    fresh = MtpModel(policy, 1)
    randomise(fresh.layers, 2)
    policy.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | published(fresh.state_dict(), per_expert=True), folder / "model.safetensors", {"format": "pt"})
    # Read back by transformers, so that the names are the ones that it knows.
    policy = Qwen3_5MoeForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    head = MtpModel.from_pretrained(policy).eval()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name
    fused = published(fresh.state_dict(), per_expert=False)
    save_file({n: t for n, t in fused.items() if ".experts." in n}, folder / "fused_experts.safetensors")
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out = policy(ids, output_hidden_states=True)
    hidden = out.hidden_states[-1]
    assert torch.equal(policy.lm_head(hidden), out.logits), "the last state must be that after the final norm"
    found = [chain(head, config, ids[r : r + 1], hidden[r : r + 1]) for r in range(ROWS)]
    outputs, logits, drafts = (np.stack(parts) for parts in zip(*found, strict=True))
    np.savez_compressed(
        folder / "golden.npz", ids=ids.numpy(), hidden=hidden.numpy(), outputs=outputs, logits=logits, drafts=drafts
    )
    stated = json.loads((folder / "config.json").read_text())
    stated |= {"mtp_num_hidden_layers": 1}  # what Qwen's own files call it
    (folder / "config.json").write_text(json.dumps(stated, indent=2, sort_keys=True) + "\n")
    print(f"largest logit {np.nanmax(np.abs(logits)):.2f}, drafts {drafts.tolist()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "data" / "qwen3_5_moe_mtp")
