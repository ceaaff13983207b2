"""Cases that a decorator registers, which leaves the function as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
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
    """What a corpus registers its functions with, and how inputs are drawn."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family

    def cases(self) -> list[Case]:
        """As cases of the survey."""
        return [drawn.case(self.family) for drawn in self]

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


@dataclass
class Effect:
    """A function or module that prints, logs, warns or raises, and arguments of each call.

    * ``mends``: whether nothing is left that breaks; else ``reason`` holds words of why.
    * ``breaks``: whether TorchDynamo breaks before mending.
    """

    function: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]
    mends: bool
    reason: str
    breaks: bool

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def case(self) -> Case:
        """As a case of the survey."""

        def make() -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
            module = not isinstance(self.function, FunctionType)
            made = copy.deepcopy(self.function) if module else self.function
            return made, [copy.deepcopy(arguments) for arguments in self.inputs]

        expect = "mended" if self.mends else "declined"
        return Case(self.name, "defer", make, expect if self.breaks else "whole", self.reason)


class Effects(list[Effect]):
    """What a corpus registers its functions with; ``usual`` are the inputs if none are given."""

    def __init__(self, usual: Sequence[tuple[Any, ...]]) -> None:
        super().__init__()
        self.usual = usual

    def cases(self) -> list[Case]:
        """As cases of the survey."""
        return [effect.case() for effect in self]

    def case(
        self, inputs: Sequence[tuple[Any, ...]] | None = None, mends: bool = True,
        reason: str = "", breaks: bool = True,
    ) -> Callable[[Any], Any]:  # fmt: skip
        """Register a function, or an instance of a class."""

        def register(function: Any) -> Any:
            made = function() if isinstance(function, type) else function
            given = self.usual if inputs is None else inputs
            self.append(Effect(made, given, mends and not reason, reason, breaks))
            return function

        return register
