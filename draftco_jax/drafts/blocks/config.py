"""Fields that the two block drafts have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from draftco_jax.drafts.base import DraftConfig, check_model_draft, check_tap_layers, sizes_from
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.transformer import check_sizes

if TYPE_CHECKING:
    from draftco_jax.models.transformer import DecoderConfig

LayerType = Literal["full_attention", "sliding_attention"]

_PUBLISHED_DECAYS = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True, kw_only=True)
class BlockDraftConfig(DraftConfig):
    """Sizes, attention pattern, anchors and loss of a draft that fills blocks.

    A block has `rows` rows at positions a, a + 1, ... of the anchor a: the anchor's token, then mask tokens. Draft i
    (from 0) is read off row `first_row + i` and stands for x_{a + 1 + i}.
    """

    training_fields: ClassVar[tuple[str, ...]] = (
        "num_anchors",
        "row_anchors",
        "anchor_rule",
        "loss",
        "loss_decay_gamma",
    )
    cut_at_gap: ClassVar[bool] = False
    """Whether a label that is not supervised ends its block (DSpark) or only itself (DFlash)."""

    tap_layers: tuple[int, ...]
    """Policy layers whose outputs are read, 0-based, OUTPUT convention, low to high."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mask_token_id: int
    """Id whose embedding stands for "not known yet". Every checkpoint has its own; there is no default."""
    num_hidden_layers: int = 5
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    layer_types: tuple[LayerType, ...] = ()
    """One for each layer; empty: full attention in all."""
    sliding_window: int | None = None
    """W: row j of a sliding layer sees the context a + j - (W - 1) <= s < a. Its own block it sees whole."""
    sliding_causal: bool = True
    """In sliding layers a row sees the rows of its block up to itself; False: all of them."""
    causal: bool = False
    """The same for the layers of full attention."""

    num_anchors: int = 512
    """Most anchors that are trained on in one document."""
    row_anchors: int | None = None
    """Anchors that a device has room for in a packed row: the size the update is compiled for. None: one for each of
    its tokens."""
    anchor_rule: Literal["label", "official"] = "label"
    """label: an anchor is legal where its first label is supervised, so the last prompt token is one. official: the
    anchor's own token must be supervised too."""
    loss: DraftLossConfig = field(default_factory=lambda: DraftLossConfig(hard_cross_entropy=1.0))
    loss_decay_gamma: float | None = 7.0
    """Draft i weighs exp(-i / gamma); None: all weigh 1."""

    def __post_init__(self) -> None:
        """Refuse sizes and patterns that do not fit together."""
        check_tap_layers(self.tap_layers)
        check_sizes(self, ("vocab_size", "num_hidden_layers", "max_position_embeddings", "num_anchors"))
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        self._check_layers()
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} must be in 0..{self.vocab_size - 1}; "
                "take the value of the checkpoint, or an id that texts do not use"
            )
        if self.max_draft_length < 1:
            raise ValueError(f"block_size={self.block_size} must leave room for a draft; 16 is usual")
        if self.row_anchors is not None and self.row_anchors < 1:
            raise ValueError(f"row_anchors={self.row_anchors} must be >= 1; use none for one anchor a token")
        if self.loss_decay_gamma is not None and not self.loss_decay_gamma > 0:
            raise ValueError(f"loss_decay_gamma={self.loss_decay_gamma} must be > 0; use none for equal weights")

    def _check_layers(self) -> None:
        kinds = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if len(self.layer_types) != self.num_hidden_layers or kinds:
            raise ValueError(
                f"layer_types={self.layer_types} must be {self.num_hidden_layers} times full_attention or "
                "sliding_attention; give one for each of num_hidden_layers, or none for full attention"
            )
        if "sliding_attention" in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(
                f"sliding_window={self.sliding_window} must be >= 1 where layer_types holds sliding_attention; "
                "set it to the window the draft was trained with"
            )

    def window_of(self, kind: LayerType) -> int | None:
        """Context that a row of such a layer sees; None: all before the anchor."""
        return self.sliding_window if kind == "sliding_attention" else None

    def rule_of(self, kind: LayerType) -> Literal["all", "causal"]:
        """Which rows of its own block a row of such a layer sees."""
        causal = self.sliding_causal if kind == "sliding_attention" else self.causal
        return "causal" if causal else "all"

    @property
    def rows(self) -> int:
        """Rows of a block."""
        raise NotImplementedError

    @property
    def first_row(self) -> int:
        """Row that the first draft is read off."""
        return self.rows - self.max_draft_length

    @property
    def max_draft_length(self) -> int:
        """Drafts of a block."""
        raise NotImplementedError

    @property
    def label_reach(self) -> int:
        """Tokens after an index that its labels lie within."""
        return self.max_draft_length

    def check_target(self, target: DecoderConfig) -> None:
        """Raise ValueError where this draft cannot read that policy."""
        check_model_draft(self, target)


def values_for(target: DecoderConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """Fields of a draft of the policy's own width with the published taps, then `changes`."""
    taps = default_taps(changes.get("num_hidden_layers", 5), target.num_hidden_layers)
    return sizes_from(target) | {"tap_layers": taps} | changes


def default_taps(count: int, layers: int) -> tuple[int, ...]:
    """Published taps of a draft of `count` layers on a policy of `layers`: one a draft layer, from 1 to layers - 3.

    One tap is the middle layer. A policy of fewer than 5 layers is read whole, and taps that fall on one layer are one.
    Source: z-lab/dflash, model.py.
    """
    if layers < 5:
        return tuple(range(layers))
    if count == 1:
        return (layers // 2,)
    return tuple(sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)}))


def published_decay(block_size: int) -> float:
    """gamma of exp(-i / gamma) as DFlash published it for blocks of 16, 10 and 8; half a block for others."""
    return _PUBLISHED_DECAYS.get(block_size, block_size / 2)
