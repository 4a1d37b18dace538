"""Which draft family a folder holds, told by its config.json and the names of its tensors.

| told by | families |
|---|---|
| speculators_model_type | eagle3, dflash, dspark |
| architectures | a class name with Eagle3, DSpark, DFlash or MTP in it |
| tensors | midlayer.* beside a class that says nothing (EAGLE's own files): eagle3; mtp.* without a policy: mtp |

Whether the draft can be read is for its family to say: drafts that go by a known name are refused there, by theirs.
"""

from __future__ import annotations

from pathlib import Path

from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.catalog import FAMILIES, family_named
from draftco_jax.drafts.files import read_settings, tensor_names
from draftco_jax.errors import UserError

_PARTS = {"eagle3": "eagle3", "dspark": "dspark", "dflash": "dflash", "mtp": "mtp"}
"""Part of a class name, in lower case -> family."""
_EMBEDDINGS = (".embed_tokens.weight", ".embeddings.weight")
"""Ends of names that a policy's table has: prefix and all."""


def draft_family_in(folder: Path) -> DraftFamily | None:
    """The family whose draft the folder seems to hold; None for a policy, or for what is not known."""
    settings = read_settings(folder)
    kind, classes = settings.raw.get("speculators_model_type"), settings.raw.get("architectures")
    if isinstance(kind, str):
        return FAMILIES[kind] if kind in _PARTS else None
    for name in classes if isinstance(classes, list) else ():
        for part, family in _PARTS.items():
            if part in str(name).lower():
                return FAMILIES[family]
    try:
        names = tensor_names(folder)
    except UserError:
        return None  # who reads the weights says what is wrong with them
    if any(name.removeprefix("model.").startswith("midlayer.") for name in names):
        return FAMILIES["eagle3"]
    heads = any(name.startswith("mtp.") for name in names)
    return FAMILIES["mtp"] if heads and not any(name.endswith(_EMBEDDINGS) for name in names) else None


def family_with_files(name: str) -> DraftFamily:
    """The family of this name, which must have weights to read."""
    family = family_named(name)
    if family.load is None or family.save is None:
        having = ", ".join(other.name for other in FAMILIES.values() if other.load is not None)
        raise UserError(f"draft family {name} has no weights, so there is no checkpoint of one; those with: {having}")
    return family
