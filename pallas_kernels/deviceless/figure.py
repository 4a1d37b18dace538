"""Pictures of the order in which a program starts its work: one lane for permutes, one for kernels."""

from __future__ import annotations

import re

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pallas_kernels.deviceless.schedule import Order, Work

PERMUTES, KERNELS = 1.0, 0.0
"""Heights of the two lanes."""
HEIGHT = 0.5
_HIDDEN, _EXPOSED, _KERNEL, _LOOP, _REST = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#bbbbbb"
_SIZES = re.compile(r"_\d.*")


def draw_order(axes: Axes, order: Order) -> None:
    """Draw one computation of `orders`.

    One unit of the horizontal axis is one operation that is started. It is not a time: a thin fusion and a kernel of
    milliseconds are equally wide. A permute reaches from the first to the last operation that is started while it is
    under way; one that is waited for at once is a line.
    """
    for place, work in enumerate(order.works):
        colour = {"kernel": _KERNEL, "loop": _LOOP}.get(work.kind, _REST)
        axes.barh(KERNELS, 1, HEIGHT, left=place, color=colour, edgecolor="white", linewidth=0.8)
    named = [(place, short_name(work)) for place, work in enumerate(order.works) if work.kind in ("kernel", "loop")]
    for count, (place, name) in enumerate(named):
        depth = 0.35 + 0.3 * (count % 3)  # neighbours at three depths, so that their names do not meet
        axes.annotate(
            name, (place + 0.5, KERNELS - HEIGHT / 2), (place + 0.5, KERNELS - depth),
            ha="center", va="top", fontsize=7,
            arrowprops={"arrowstyle": "-", "color": _REST, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
    for count, placed in enumerate(order.permutes):
        # Two that are under way together stand at two heights.
        height = PERMUTES + 0.55 * (count % 2)
        colour = _HIDDEN if placed.span.hidden else _EXPOSED
        length = max(placed.end - placed.start, 0.1)
        axes.barh(height, length, HEIGHT, left=placed.start, color=colour)
        middle = placed.start + length / 2
        axes.text(
            middle, height, f"{placed.span.bytes / 2**20:.0f} MiB",
            ha="center", va="center", fontsize=7, color="white" if length > 3 else "black",
        )  # fmt: skip
    runs = "" if order.times is None else f", runs {order.times} time" + "s" * (order.times != 1)
    axes.set_title(f"{order.computation}{runs}", loc="left", fontsize=9)
    axes.set_yticks([KERNELS, PERMUTES], ["kernels", "permutes"])
    axes.set_xlim(0, max(len(order.works), 1) * 1.03)  # the last name reaches over the end
    axes.set_ylim(-1.25, 1.4 if len(order.permutes) == 1 else 1.95)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("operations in the order of their start (not time)", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def short_name(work: Work) -> str:
    """The name of a kernel without its sizes, "branch_forward_8192b_..." -> "branch_forward"; "loop" for a loop."""
    return "loop" if work.kind == "loop" else _SIZES.sub("", work.label)
