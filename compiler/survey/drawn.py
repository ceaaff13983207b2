"""Cases whose inputs are drawn at random, registered by a decorator that leaves the function be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compiler.survey.case import Case

Maker = Callable[[torch.Generator], tuple[Any, ...]]
DRAWS = 8


@dataclass
class Drawn:
    """A function or module class, and how its inputs are drawn.

    * ``declined``: words of the reason why mending must leave it; None where it must not.
    * ``gradients``: compare those of floating-point inputs too.
    """

    target: Any
    maker: Maker
    declined: str | None
    gradients: bool

    @property
    def name(self) -> str:
        return str(self.target.__name__)

    def case(self, family: str) -> Case:
        """As a case of the survey, with ``DRAWS`` calls."""

        def make() -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
            torch.manual_seed(7)
            made = self.target() if isinstance(self.target, type) else self.target
            calls = [self.maker(torch.Generator().manual_seed(k)) for k in range(DRAWS)]
            for leaf in tree_leaves(calls) if self.gradients else ():
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    leaf.requires_grad_()
            return made, calls

        expect = "mended" if self.declined is None else "declined"
        return Case(self.name, family, make, expect, self.declined or "", backward=self.gradients)


class Cases(list[Drawn]):
    """What a corpus registers its functions with; ``family`` is that of its cases."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family

    def mended(self, maker: Maker, gradients: bool = True) -> Callable[[Any], Any]:
        """A case that must be captured whole once it is mended."""
        return self._register(maker, None, gradients)

    def declined(self, maker: Maker, reason: str, gradients: bool = True) -> Callable[[Any], Any]:
        """A case that must be left as it is, for a reason that contains these words."""
        return self._register(maker, reason, gradients)

    def _register(self, maker: Maker, reason: str | None, gradients: bool) -> Callable[[Any], Any]:
        def register(target: Any) -> Any:
            self.append(Drawn(target, maker, reason, gradients))
            return target

        return register
