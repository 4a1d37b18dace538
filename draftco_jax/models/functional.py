"""Flax modules as functions: the structure apart, the parameters as a plain tree.

Steps are functional: a module is split once, jitted functions take and return parameter trees, and `ModelGraph.merge`
puts module and parameters together inside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

Params = dict[str, Any]


@dataclass(frozen=True)
class ModelGraph:
    """Structure of a module and its constants (a vocabulary map), without its parameters."""

    graphdef: nnx.GraphDef
    constants: Params

    def merge(self, params: Params) -> Any:
        """The module with these parameters."""
        return nnx.merge(self.graphdef, params, self.constants)


def split(module: nnx.Module) -> tuple[ModelGraph, Params]:
    """Structure and parameter tree of a module."""
    graphdef, params, constants = nnx.split(module, nnx.Param, ...)
    return ModelGraph(graphdef, nnx.to_pure_dict(constants)), nnx.to_pure_dict(params)


def initialise(build: Callable[[nnx.Rngs], nnx.Module], key: jax.Array) -> tuple[ModelGraph, Params]:
    """Draw a module's parameters from a key."""
    return split(build(nnx.Rngs(params=key)))


def abstract_params(build: Callable[[nnx.Rngs], nnx.Module]) -> Params:
    """Shapes and dtypes of a module's parameters, without making them."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param))


def graph_of(build: Callable[[nnx.Rngs], nnx.Module]) -> ModelGraph:
    """Structure of a module that has no constants, without making its parameters."""
    graphdef, _, constants = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param, ...)
    if jax.tree.leaves(constants):
        raise ValueError("a module with constants has no abstract graph; build it and use split()")
    return ModelGraph(graphdef, {})
