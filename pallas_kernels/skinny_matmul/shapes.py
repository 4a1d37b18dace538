"""Named sizes of the op: what its bench speaks of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Weights that a step goes through, one after the other.

    Attributes:
        inputs: K.
        outputs: N.
        weights: of this size. Whether they fit into the cache together decides what one row costs.
    """

    inputs: int
    outputs: int
    weights: int

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "weights"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; leave out what is empty")


SHAPES: dict[str, Shape] = {
    # Gate and up of a policy of width 256: 6 layers, 9 MB.
    "256x1536": Shape(inputs=256, outputs=1536, weights=6),
    # Gate and up of a policy of width 768: 14 layers, 176 MB, which no cache holds.
    "768x4096": Shape(inputs=768, outputs=4096, weights=14),
    # Projections of a policy of width 128, on one thread.
    "128x384": Shape(inputs=128, outputs=384, weights=8),
    # For tests.
    "tiny": Shape(inputs=8, outputs=24, weights=2),
}
