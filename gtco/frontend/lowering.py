"""ATen to gtco's ops: one table, from an overload to a small function.

A lowering takes the overload's own arguments, with tensors as `Value`s, and returns a `Value`, a
tuple of them, or None: "not in this form", and the node becomes an `aten` node.

    aten.add.Tensor(x, 2.0)            -> add(x, other=2.0)
    aten.transpose.int(x, 1, 2)        -> permute(x, dims=[0, 2, 1])
    aten.select.int(x, 1, 0)           -> reshape(slice(x, dim=1, start=0, end=1))
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch._ops import OpOverload

from gtco.frontend.context import Lowering
from gtco.frontend.lower_antialiased import ANTIALIASED
from gtco.frontend.lower_convolutions import CONVOLUTIONS
from gtco.frontend.lower_folds import FOLDS
from gtco.frontend.lower_functions import FUNCTIONS
from gtco.frontend.lower_images import IMAGES
from gtco.frontend.lower_indices import INDICES
from gtco.frontend.lower_math import MATH
from gtco.frontend.lower_matrices import MATRICES
from gtco.frontend.lower_norms import NORMS
from gtco.frontend.lower_pools import POOLS
from gtco.frontend.lower_quantized import FAKE_QUANTIZED, QUANTIZED
from gtco.frontend.lower_shapes import SHAPES
from gtco.frontend.lower_unpool import UNPOOLS

aten = torch.ops.aten

TABLE: Mapping[OpOverload, Lowering] = MappingProxyType(
    SHAPES
    | INDICES
    | MATH
    | FUNCTIONS
    | MATRICES
    | NORMS
    | POOLS
    | UNPOOLS
    | IMAGES
    | ANTIALIASED
    | FOLDS
    | CONVOLUTIONS
    | FAKE_QUANTIZED
)
"""The one table: overload to lowering."""

NAMED: Mapping[str, Lowering] = QUANTIZED
"""The same for overloads outside ATen, by name: torch may not have defined them yet."""

KEPT_AS_ATEN: tuple[OpOverload, ...] = (
    aten.batch_norm.default,  # functionalisation turns it into the no-training form
    aten.linspace.default,  # rounded as it is: 10000 ** linspace(0, 1, n), in radians, shows it
)
"""Overloads without a lowering that one library kernel does better than their decomposition."""
