"""What a run measures, kept on disk and shown while it runs."""

from draftco_jax.metrics.progress import Progress
from draftco_jax.metrics.records import (
    MetricsWriter,
    read_metrics,
    read_summary,
    write_summary,
    write_text_whole,
)

__all__ = ["MetricsWriter", "Progress", "read_metrics", "read_summary", "write_summary", "write_text_whole"]
