"""The draft families there are. A new family is a folder beside this file and one line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from draftco_jax.drafts.base import DraftConfig, DraftFamily
from draftco_jax.drafts.dflash import DFLASH
from draftco_jax.drafts.dspark import DSPARK
from draftco_jax.drafts.eagle3 import EAGLE3
from draftco_jax.drafts.mtp import MTP
from draftco_jax.drafts.ngram import NGRAM
from draftco_jax.drafts.previous import PREVIOUS
from draftco_jax.drafts.self_int8 import SELF_INT8
from draftco_jax.drafts.suffix import SUFFIX
from draftco_jax.errors import UserError


def catalog_of(families: Iterable[DraftFamily]) -> Mapping[str, DraftFamily]:
    """Families by name, read-only; a name or a config class may stand for one family only."""
    by_name: dict[str, DraftFamily] = {}
    for family in families:
        clash = [other.name for other in by_name.values() if other.config is family.config]
        if family.name in by_name or clash:
            raise ValueError(
                f"draft family {family.name} ({family.config.__name__}) is in the catalog already; "
                "give it a name and a config class of its own"
            )
        by_name[family.name] = family
    return MappingProxyType(by_name)


FAMILIES = catalog_of((EAGLE3, DFLASH, DSPARK, MTP, NGRAM, SUFFIX, PREVIOUS, SELF_INT8))


def draft_configs() -> tuple[type[DraftConfig], ...]:
    """The config class of every family: what a saved config's `draft` may be."""
    return tuple(family.config for family in FAMILIES.values())


def family_named(name: str) -> DraftFamily:
    """The family of this name."""
    if name not in FAMILIES:
        raise UserError(f"draft family {name} is unknown; there are: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_of(cfg: DraftConfig) -> DraftFamily:
    """The family a config belongs to."""
    for family in FAMILIES.values():
        if type(cfg) is family.config:
            return family
    raise UserError(f"draft={type(cfg).__name__} is of no family in the catalog; there are: {', '.join(FAMILIES)}")
