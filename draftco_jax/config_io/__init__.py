"""Config machinery that knows no component: frozen dataclasses from and to JSON, text overrides, Python files.

A config is a tree of frozen keyword-only dataclasses. Their fields are bool, int, float, str, None, Literal, tuples of
these, other such dataclasses, and unions of all of them. Nothing else: a config only holds values that print and
compare.
"""

from draftco_jax.config_io.overrides import apply_overrides
from draftco_jax.config_io.python_file import load_python_config
from draftco_jax.config_io.tree import diff, from_json, to_json

__all__ = ["apply_overrides", "diff", "from_json", "load_python_config", "to_json"]
