"""The report of a run: one page that shows what happened."""

from draftco_jax.report.write import write_report

__all__ = ["write_report"]
