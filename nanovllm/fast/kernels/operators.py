"""Operators that torch.compile does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_libraries: dict[str, torch.library.Library] = {}  # an operator lives as long as its library


def define_operator(
    name: str, run: Callable[..., Any], fake: Callable[..., Any], *, mutates: tuple[str, ...] = ()
) -> Any:
    """Register `run`, which has no gradient, as the operator `name` ("namespace::name"); returns the operator.

    A call takes 5 µs; of `torch.library.custom_op`, which looks for gradients and aliases in Python, 32 µs.

    Args:
        fake: computes the results' shapes and dtypes.
        mutates: arguments that `run` writes to; results are new tensors.
    """
    namespace, short_name = name.split("::")
    _libraries.pop(name, None)  # a module that is imported again must not register twice
    library = _libraries[name] = torch.library.Library(namespace, "FRAGMENT")
    schema = torch.library.infer_schema(run, mutates_args=mutates)
    library.define(short_name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(short_name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    return getattr(getattr(torch.ops, namespace), short_name).default
